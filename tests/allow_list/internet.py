"""What is tried from a sandbox with the public internet, on the machine of a small world. Prints one line for each.

`works`: what is of the internet, and has to work. Everything else must come to nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from lowtide import Sandbox
from tests.allow_list import attempts
from tests.allow_list.attempts import machine_services
from tests.allow_list.world import (
    GOOD,
    GOOD6,
    MACHINE,
    MACHINE6,
    METADATA,
    NOT_PUBLIC,
    PRIVATE,
    ROUTED,
    ROUTED6,
    SECOND,
)

WEB = """
def web(host): return get(host, extra="Connection: close\\r\\n")
"""
_works: list[Callable[[Sandbox], object]] = []
_held: list[tuple[str, str]] = []


def works(check: Callable[[Sandbox], object]) -> Callable[[Sandbox], object]:
    _works.append(check)
    return check


def held(name: str, code: str) -> None:
    """This code must not print anything with "world" or "machine" in it."""
    _held.append((name, code))


def inside(box: Sandbox, code: str) -> str:
    return attempts.inside(box, WEB + code)


@works
def a_name_by_http(box: Sandbox) -> None:
    assert f"world {GOOD}" in inside(box, "show(web('good.example'))")


@works
def a_name_has_its_own_addresses(box: Sandbox) -> None:
    code = "show(sorted({item[4][0] for item in socket.getaddrinfo('good.example', 443)}))"
    assert inside(box, code).strip() == f"['{GOOD}']"


@works
def the_shells_own_look_up(box: Sandbox) -> None:
    assert GOOD in box.exec(["getent", "ahosts", "good.example"], timeout_seconds=60).result().stdout


@works
def only_the_public_addresses_of_a_name(box: Sandbox) -> None:
    code = "show(sorted({item[4][0] for item in socket.getaddrinfo('mixed.example', 443)}), web('mixed.example'))"
    answer = inside(box, code)
    assert f"['{GOOD}']" in answer
    assert f"world {GOOD}" in answer


@works
def a_name_that_has_only_ipv6(box: Sandbox) -> None:
    assert f"world {GOOD6}" in inside(box, "show(web('six.example'))")


@works
def names_by_tcp(box: Sandbox) -> None:
    code = """
q = struct.pack(">HHHHHH", 7, 256, 1, 0, 0, 0) + b"\\4good\\7example\\0" + struct.pack(">HH", 1, 1)
s = socket.create_connection(("198.18.0.1", 53), 20); s.sendall(struct.pack(">H", len(q)) + q)
show(socket.inet_ntoa(s.recv(500)[-4:]))
"""
    assert GOOD in inside(box, code)


@works
def every_port_and_protocol(box: Sandbox) -> None:
    assert "SSH-2.0-world" in inside(box, f"show(talk('{GOOD}', 22))")
    assert "EHLO me" in inside(box, "show(talk('good.example', 5432, b'EHLO me\\r\\n'))")
    assert "world" in inside(box, "show(talk('good.example', 443, hello('another.example')))")


@works
def a_literal_address_of_ipv6(box: Sandbox) -> None:
    assert "world" in inside(box, f"show(talk('{GOOD6}', 8443, b'x'))")


@works
def a_connection_that_is_used_twice(box: Sandbox) -> None:
    code = """
s = socket.create_connection(("good.example", 80), 20)
for _ in range(2):
    s.sendall(b"GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n"); show(s.recv(9999).decode())
"""
    assert inside(box, code).count(f"world {GOOD}") == 2


@works
def thirty_megabytes_whole(box: Sandbox) -> None:
    code = "show(len(talk('good.example', 80, b'GET /big HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n', count=1<<30)))"
    assert int(inside(box, code)) > 30_000_000


@works
def its_own_loopback(box: Sandbox) -> None:
    code = """
l = socket.create_server(("0.0.0.0", 8443)); c = socket.create_connection(("127.0.0.1", 8443), 5); a, _ = l.accept()
a.sendall(b"own"); show(c.recv(9).decode())
"""
    assert "own" in inside(box, code)


@works
def a_redirect_leads_nowhere_inside(box: Sandbox) -> None:
    code = """
import urllib.request
try: show(urllib.request.urlopen("http://good.example/redirect", timeout=20).read())
except OSError as e: show("stopped", e)
"""
    assert "stopped" in inside(box, code)


@works
def a_name_that_changes_its_address_leads_nowhere_inside(box: Sandbox) -> None:
    code = """
began, seen = time.monotonic(), []
while time.monotonic() - began < 60 and not (seen and seen[-1][0] == "!"): seen.append(web("rebind.example")); time.sleep(2)
show([s[-20:] for s in seen])
"""
    seen = inside(box, code)
    assert f"world {GOOD}" in seen
    assert METADATA not in seen
    assert seen.rstrip().endswith("!gaierror']"), seen


@works
def what_is_refused_is_listed(box: Sandbox) -> None:
    inside(
        box,
        f"""
talk("{PRIVATE}", 5432); talk("{METADATA}", 80); talk("private.example", 443); talk("{MACHINE}", 80)
for host, family in (("{GOOD}", socket.AF_INET), ("{GOOD6}", socket.AF_INET6)):
    s = socket.socket(family, socket.SOCK_DGRAM)
    try: s.connect((host, 4433)); s.send(b"x"); s.settimeout(5); s.recv(1)
    except ConnectionRefusedError: show("refused at once")
time.sleep(0.5)
""",
    )
    listed = {(one.host, one.port, one.protocol) for one in box.denied_connections().result(20)}
    assert {
        (PRIVATE, 5432, "tcp"),
        (METADATA, 80, "tcp"),
        ("private.example", None, "dns"),
        (MACHINE, 80, "tcp"),
        (GOOD, 4433, "udp"),
        (GOOD6, 4433, "udp"),
    } <= listed, listed
    assert not {one for one in listed if one[0] == GOOD and one[2] != "udp"}


for _label, _host in {
    "loopback": "127.0.0.1",
    "loopback_of_another_number": "127.9.9.9",
    "loopback_v6": "::1",
    "loopback_mapped": "::ffff:127.0.0.1",
    "zero": "0.0.0.0",
    "zero_v6": "::",
    "decimal": "2130706433",
    "hexadecimal": "0x7f000001",
    "octal": "0177.0.0.1",
    "short": "127.1",
    "localhost": "localhost",
    "the_machines_own_address": MACHINE,
    "the_machines_own_address_v6": MACHINE6,
    "the_machines_second_address": SECOND,
    "a_range_that_is_the_machines": ROUTED,
    "a_range_that_is_the_machines_v6": ROUTED6,
    "the_machines_own_address_mapped": f"::ffff:{MACHINE}",
    "metadata_mapped": f"::ffff:{METADATA}",
    "private_mapped": f"::ffff:{PRIVATE}",
    "broadcast": "255.255.255.255",
    "multicast": "224.0.0.1",
    "link_local_v6": "fe80::1%lo",
    **NOT_PUBLIC,
}.items():
    held(
        f"connect_{_label}",
        f"show([talk('{_host}', p, b'GET / HTTP/1.0\\r\\n\\r\\n', 5) for p in (80, 443, 5432, 8080)])",
    )
for _name in (
    "private",
    "meta",
    "shared",
    "loop",
    "zero",
    "self",
    "second",
    "many",
    "mapped",
    "nat64",
    "local6",
    "alias",
    "alias-of-self",
):
    held(
        f"a_name_that_leads_inside_{_name}".replace("-", "_"),
        f"show(web('{_name}.example'), talk('{_name}.example', 443, hello('{_name}.example')))",
    )
held(
    "datagrams",
    f"""
for host in ("{GOOD}", "{METADATA}", "{PRIVATE}", "8.8.8.8"):
  for port in (123, 443, 4433):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
    try: s.connect((host, port)); s.send(b"x"); show(host, s.recv(100))
    except OSError as e: show(type(e).__name__)
""",
)
held(
    "raw_and_packet_sockets",
    """
for family, kind, proto in ((2, 3, 1), (2, 3, 255), (17, 3, 3), (17, 2, 3), (10, 3, 58)):
  try: socket.socket(family, kind, proto); show("opened", family)
  except OSError as e: show(type(e).__name__)
""",
)
held(
    "abstract_socket",
    """
try: s = socket.socket(socket.AF_UNIX); s.connect("\\0lowtide-allow-list-test"); show("machine")
except OSError as e: show(type(e).__name__)
""",
)
held(
    "its_own_rules",
    """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
show("changed" if libc.unshare(0x40000000) == 0 else "")
s = socket.socket(16, 3, 0)
body = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 4, 0, 1, 0) + struct.pack("=HHI", 8, 4, 1)
s.send(struct.pack("=IHHII", 16 + len(body), 24, 0x405, 1, 0) + body)
show("machine" if struct.unpack_from("=i", s.recv(4096), 16)[0] == 0 else "refused")
""",
)


def main(network: str, *only: str) -> None:
    machine_services()
    with Sandbox.run(provider="local", network=network) as box:  # type: ignore[arg-type]
        for check in _works:
            if not only or check.__name__ in only:
                try:
                    check(box)
                    line = f"works {check.__name__}"
                except Exception:
                    line = f"BROKEN {check.__name__} {traceback.format_exc()[-600:]!r}"
                print(line, flush=True)
        for name, code in _held:
            if not only or name in only:
                got = inside(box, code)
                out = any(word in got for word in ("world", "machine", "opened", "changed"))
                print(f"GOT OUT {name} {got!r}" if out else f"held {name}", flush=True)


def everything() -> list[str]:
    return [check.__name__ for check in _works] + [name for name, _ in _held]


if __name__ == "__main__":
    main(*sys.argv[1:])
