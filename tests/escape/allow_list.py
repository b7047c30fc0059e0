"""Attempts to reach this machine from a sandbox that has an allow-list, in every way to write its addresses.

What takes other hosts (names, rebinding, wrong SNI, smuggling) is tried in a world of its own: tests/allow_list.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator

from lowtide import UnsupportedError
from tests.escape.attempt import LeftOut, Target, attempt

ALLOW = ["allowed.invalid", "*.below.invalid", "10.99.98.0/24", "0.0.0.0/0:9"]
ADDRESSES = {
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


def _attempt(about: str, host: str) -> Callable[[Target], str | None]:
    def work(target: Target) -> str | None:
        if target.provider == "docker" and os.geteuid() != 0:
            raise LeftOut("only root may enter a container's network")
        with _listening() as (port, came):
            try:
                box = target.make(network=ALLOW)
            except UnsupportedError as error:
                raise LeftOut(str(error)) from error
            with box:
                code = "import socket\ntried(socket.create_connection, (sys.argv[1], int(sys.argv[2])), 5)"
                target.python(code, host, str(port), box=box)
            return f"somebody came: {came}" if came else None

    work.__name__ = "with_an_allow_list_reach_" + about.replace(" ", "_")
    return work


for _about, _host in ADDRESSES.items():
    attempt(f"with an allow-list, reach {_about}", providers=("local", "docker"))(_attempt(_about, _host))


@attempt("with an allow-list, reach an abstract socket of this machine", providers=("local", "docker"))
def with_an_allow_list_reach_an_abstract_socket(target: Target) -> str | None:
    name = f"escape-{secrets.token_hex(6)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        try:
            box = target.make(network=ALLOW)
        except UnsupportedError as error:
            raise LeftOut(str(error)) from error
        with box:
            code = "import socket\ns = socket.socket(socket.AF_UNIX)\ntry: s.connect(chr(0) + sys.argv[1]); print('in')\nexcept OSError: pass"
            return target.python(code, name, box=box) or None


@attempt("with an allow-list, change its own routes", providers=("local", "docker"))
def with_an_allow_list_change_its_routes(target: Target) -> str | None:
    code = """
import socket, struct
s = socket.socket(16, 3, 0)
body = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)
s.send(struct.pack("=IHHII", 16 + len(body), 24, 0x405, 1, 0) + body)
print("changed" if struct.unpack_from("=i", s.recv(4096), 16)[0] == 0 else "")
"""
    try:
        box = target.make(network=ALLOW)
    except UnsupportedError as error:
        raise LeftOut(str(error)) from error
    with box:
        return target.python(code, box=box) or None
