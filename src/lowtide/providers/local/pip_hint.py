"""Says in one line why pip cannot reach an index, before pip tries for a minute.

This file is copied into the Python environment of a sandbox and imported there for pip alone, so it uses the
standard library only. It recommends nothing that the sandbox already has.
"""

from __future__ import annotations

import os
import socket
import sys

_USUAL = ["pypi.org", "files.pythonhosted.org"]


def main() -> None:
    words = sys.orig_argv
    if not {"install", "download"} & set(words) or {"--no-index", "-h", "--help"} & set(words):
        return
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return
    said = _hint(words)
    if said is not None:
        os.environ.setdefault("PIP_RETRIES", "0")
        os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        sys.stderr.write(f"lowtide: {said}\n")


def _hint(words: list[str]) -> str | None:
    network = _network()
    if network == "none":
        return (
            'this sandbox has no network, so pip reaches no index: create it with network="internet", or with '
            'network=["pypi.org", "files.pythonhosted.org"]'
        )
    hosts = [host for host in _index_hosts(words) if _is_missing(host)] if network != "host" else []
    if not hosts:
        return None
    if network == "allow-list":
        return f"the allow-list of this sandbox does not have {' and '.join(hosts)}: add it to network=[...]"
    return f"{hosts[0]} has no address on the public internet: list it and its address in network=[...]"


def _network() -> str:
    """What this sandbox may reach. The first line of the resolver file says it where a proxy serves the network."""
    try:
        with open("/etc/resolv.conf") as file:
            first = file.readline()
    except OSError:
        first = ""
    if first.startswith("# lowtide:"):
        return "allow-list" if "allow-list" in first else "internet"
    try:
        with open("/proc/net/route") as v4, open("/proc/net/ipv6_route") as v6:
            offline = len(v4.readlines()) < 2 and all(line.split()[-1] == "lo" for line in v6)
    except OSError:
        offline = False
    return "none" if offline else "host"


def _index_hosts(words: list[str]) -> list[str]:
    from urllib.parse import urlsplit

    named = os.environ.get("PIP_INDEX_URL")
    for at, word in enumerate(words):
        if word in ("-i", "--index-url") and at + 1 < len(words):
            named = words[at + 1]
        elif word.startswith("--index-url="):
            named = word.partition("=")[2]
    host = urlsplit(named).hostname if named else None
    return [host] if host else _USUAL


def _is_missing(host: str) -> bool:
    """Whether there is no such name here. Not: a nameserver that does not answer."""
    try:
        socket.getaddrinfo(host, 443)
    except socket.gaierror as error:
        return error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
    except (OSError, UnicodeError):
        pass
    return False


if (
    __name__ == "_pip_hint"
):  # the name it has in a sandbox; Python reads the line that imports it more than once
    main()
