"""`python3 actionserver.pyz serve | relay PORT | interpret`: the one file's entry."""

from __future__ import annotations

import sys


def main(arguments: list[str]) -> int:
    what = arguments[0] if arguments else "serve"
    if what == "serve":
        from lowtide.actionserver import serve

        return serve.main()
    if what == "relay":
        from lowtide.actionserver import relay

        return relay.main(int(arguments[1]))
    if what == "interpret":
        from lowtide.actionserver import interpret

        return interpret.main()
    sys.stderr.write("usage: serve | relay PORT | interpret\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
