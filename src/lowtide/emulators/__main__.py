"""The process behind `lowtide.emulators.start`: serve, print one JSON line, end with its parent."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lowtide.emulators.ground import DEFAULT_LIMIT, Settings
from lowtide.emulators.package_managers import CHECK
from lowtide.emulators.serve import serve
from lowtide.errors import LowtideError, ValidationError


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="python -m lowtide.emulators")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--port-base", type=int)
    parser.add_argument("--limit", type=int, default=DEFAULT_LIMIT)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--network", default="none")
    parser.add_argument("--packages", default=CHECK)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--until-stdin-closes", action="store_true")
    given = parser.parse_args(arguments)
    settings = Settings(
        names=tuple(given.names),
        port_base=given.port_base,
        limit=given.limit,
        plain=given.plain,
        network=given.network,
        packages=given.packages,
        home=given.home,
    )
    try:
        return serve(settings, ready=_say, until_stdin_closes=given.until_stdin_closes)
    except (LowtideError, OSError) as error:
        _say({"error": str(error), "kind": "validation" if isinstance(error, ValidationError) else "failure"})
        return 1


def _say(described: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(described) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
