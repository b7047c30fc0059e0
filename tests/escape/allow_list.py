"""Attempts to reach this machine from a sandbox that has an allow-list or the public internet.

Every way to write its addresses is tried. What takes other hosts (names, rebinding, wrong SNI, smuggling, private
ranges) is tried in a world of its own: tests/allow_list.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lowtide import Sandbox, UnsupportedError
from tests.escape.attempt import LeftOut, Target, attempt

ALLOW = ["allowed.invalid", "*.below.invalid", "10.99.98.0/24", "0.0.0.0/0:9"]
ADDRESSES: dict[str, str | None] = {
    "its own address": None,
    "its loopback": "127.0.0.1",
    "another number of its loopback": "127.3.2.1",
    "its loopback by IPv6": "::1",
    "its loopback as a mapped address": "::ffff:127.0.0.1",
    "its loopback as zero": "0.0.0.0",
    "its loopback as a decimal number": "2130706433",
    "its loopback as a hexadecimal number": "0x7f000001",
    "its loopback as localhost": "localhost",
}


@contextlib.contextmanager
def _listening() -> Iterator[tuple[int, list[object]]]:
    """A server on every address of this machine, and who came."""
    came: list[object] = []
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, who = server.accept()
                    came.append(who)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], came
        server.shutdown(socket.SHUT_RDWR)


def _attempt(about: str, host: str | None, network: Any) -> Callable[[Target], str | None]:
    def work(target: Target) -> str | None:
        with _listening() as (port, came), _made(target, network) as box:
            code = "import socket\ntried(socket.create_connection, (sys.argv[1], int(sys.argv[2])), 5)"
            target.python(code, host or _own_address(), str(port), box=box)
            return f"somebody came: {came}" if came else None

    work.__name__ = about.replace(",", "").replace(" ", "_").replace("-", "_")
    return work


@contextlib.contextmanager
def _made(target: Target, network: Any) -> Iterator[Sandbox]:
    if target.provider == "docker" and os.geteuid() != 0:
        raise LeftOut("only root may enter a container's network")
    try:
        box = target.make(network=network)
    except UnsupportedError as error:
        raise LeftOut(str(error)) from error
    with box:
        yield box


def _own_address() -> str:
    """An address of this machine that others would reach it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError as error:
            raise LeftOut("this machine has no address but its loopback") from error
        return str(probe.getsockname()[0])


NETWORKS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("with an allow-list", ALLOW, ("local", "docker")),
    # On Docker it is the engine's own network: docs/network.md says what it holds back.
    ("with the public internet", "internet", ("local",)),
    ("with the word full", "full", ("local",)),
)
for _with, _network, _providers in NETWORKS:
    for _about, _host in ADDRESSES.items():
        _whole = f"{_with}, reach {_about}"
        attempt(_whole, providers=_providers)(_attempt(_whole, _host, _network))


def _abstract(about: str, network: Any) -> Callable[[Target], str | None]:
    def work(target: Target) -> str | None:
        name = f"escape-{secrets.token_hex(6)}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"\0{name}")
            server.listen()
            code = "import socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect(chr(0) + sys.argv[1]); print('in')\nexcept OSError: pass"
            with _made(target, network) as box:
                return target.python(code, name, box=box) or None

    work.__name__ = about.replace(",", "").replace(" ", "_").replace("-", "_")
    return work


def _routes(about: str, network: Any) -> Callable[[Target], str | None]:
    code = """
import socket, struct
s = socket.socket(16, 3, 0)
body = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)
s.send(struct.pack("=IHHII", 16 + len(body), 24, 0x405, 1, 0) + body)
print("changed" if struct.unpack_from("=i", s.recv(4096), 16)[0] == 0 else "")
"""

    def work(target: Target) -> str | None:
        with _made(target, network) as box:
            return target.python(code, box=box) or None

    work.__name__ = about.replace(",", "").replace(" ", "_").replace("-", "_")
    return work


for _with, _network, _providers in NETWORKS:
    _whole = f"{_with}, reach an abstract socket of this machine"
    attempt(_whole, providers=_providers)(_abstract(_whole, _network))
    _whole = f"{_with}, change its own routes"
    attempt(_whole, providers=_providers)(_routes(_whole, _network))
