"""What is tried from a sandbox with an allow-list, on the machine of a small world. Prints one line for each.

`works`: what is allowed, and has to work. Everything else must come to nothing.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from lowtide import Sandbox
from tests.allow_list.world import GOOD, MACHINE, METADATA, OTHER, PRIVATE, SHARED
from tests.container_engine import IMAGE

ALLOW = [
    "good.example",
    "good.example:22",
    "good.example:5432",
    "good.example:8443",
    "*.wild.example",
    "private.example",
    "meta.example",
    "shared.example",
    "loop.example",
    "zero.example",
    "mixed.example",
    "self.example",
    "mapped.example",
    "nat64.example",
    "rebind.example",
    "10.1.2.0/24:5432",
    "93.184.216.35/32:22",
]

# What hostile code finds defined.
PREAMBLE = """
import os, socket, ssl, struct, sys, time
def talk(host, port, data=b"", seconds=20.0, count=1):
    '''What came back, or "!" and the name of the error.'''
    try:
        s = socket.create_connection((host, port), timeout=seconds)
        if data: s.sendall(data)
        got = b""
        while len(got) < count:
            more = s.recv(65536)
            if not more: break
            got += more
        s.close()
        return got.decode("latin-1")
    except OSError as error:
        return "!" + type(error).__name__
def get(host, header=None, extra="", method="GET", path="/", port=80):
    text = f"{method} {path} HTTP/1.1\\r\\nHost: {header or host}\\r\\n{extra}\\r\\n"
    return talk(host, port, text.encode(), count=100000)
def hello(name):
    context = ssl.create_default_context(); context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    wrapped = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try: wrapped.do_handshake()
    except ssl.SSLWantReadError: pass
    return outgoing.read()
def show(*what): print(*what)
"""

_works: list[Callable[[Sandbox], object]] = []
_held: list[tuple[str, str]] = []
_log = Path()  # what the world has seen


def works(check: Callable[[Sandbox], object]) -> Callable[[Sandbox], object]:
    _works.append(check)
    return check


def held(name: str, code: str) -> None:
    """This code must not print anything with "world" or "machine" in it."""
    _held.append((name, code))


def inside(box: Sandbox, code: str, seconds: float = 90.0) -> str:
    done = box.exec(["python3", "-c", PREAMBLE + code], timeout_seconds=seconds).result(120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@works
def an_allowed_name_by_http(box: Sandbox) -> None:
    answer = inside(box, "show(get('good.example'))")
    assert f"world {GOOD}" in answer, answer


@works
def a_name_below_a_wildcard(box: Sandbox) -> None:
    assert f"world {GOOD}" in inside(box, "show(get('a.b.wild.example'))")


@works
def tls_with_its_own_name(box: Sandbox) -> None:
    assert "world" in inside(box, "show(talk('good.example', 443, hello('good.example')))")


@works
def a_clienthello_in_many_pieces(box: Sandbox) -> None:
    code = """
s = socket.create_connection(("good.example", 443), 20)
for byte in hello("good.example"): s.sendall(bytes([byte]))
show(s.recv(100).decode())
"""
    assert "world" in inside(box, code)


@works
def a_named_port_where_the_server_speaks_first(box: Sandbox) -> None:
    assert "SSH-2.0-world" in inside(box, "show(talk('good.example', 22))")


@works
def a_named_port_with_a_protocol_of_its_own(box: Sandbox) -> None:
    assert "EHLO me" in inside(box, "show(talk('good.example', 5432, b'EHLO me\\r\\n'))")


@works
def an_allowed_range_on_its_port(box: Sandbox) -> None:
    assert "ping" in inside(box, f"show(talk('{PRIVATE}', 5432, b'ping'))")


@works
def a_body_by_length_and_in_chunks(box: Sandbox) -> None:
    for extra, body in (
        ("Content-Length: 5\\r\\n", "12345"),
        ("Transfer-Encoding: chunked\\r\\n", "5\\r\\n12345\\r\\n0\\r\\n\\r\\n"),
    ):
        code = f"show(talk('good.example', 80, b'POST / HTTP/1.1\\r\\nHost: good.example\\r\\n{extra}\\r\\n{body}', count=9999))"
        assert f"world {GOOD}" in inside(box, code), extra


@works
def thirty_megabytes_whole(box: Sandbox) -> None:
    assert (
        int(
            inside(
                box,
                "show(len(talk('good.example', 80, b'GET /big HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n', count=1<<30)))",
            )
        )
        > 30_000_000
    )


@works
def names_by_tcp(box: Sandbox) -> None:
    code = """
q = struct.pack(">HHHHHH", 7, 256, 1, 0, 0, 0) + b"\\4good\\7example\\0" + struct.pack(">HH", 1, 1)
s = socket.create_connection(("198.18.0.1", 53), 20); s.sendall(struct.pack(">H", len(q)) + q)
show(s.recv(500)[-4:-2].hex())
"""
    assert "c612" in inside(box, code)  # 198.18


@works
def its_own_loopback(box: Sandbox) -> None:
    code = """
l = socket.create_server(("0.0.0.0", 8443)); c = socket.create_connection(("127.0.0.1", 8443), 5); a, _ = l.accept()
a.sendall(b"own"); show(c.recv(9).decode())
"""
    assert "own" in inside(box, code)


for _label, _host in {
    "loopback": "127.0.0.1",
    "loopback_of_another_number": "127.9.9.9",
    "loopback_v6": "::1",
    "loopback_mapped": "::ffff:127.0.0.1",
    "zero": "0.0.0.0",
    "decimal": "2130706433",
    "hexadecimal": "0x7f000001",
    "octal": "0177.0.0.1",
    "short": "127.1",
    "localhost": "localhost",
    "the_machines_own_address": MACHINE,
    "metadata": METADATA,
    "metadata_mapped": f"::ffff:{METADATA}",
    "metadata_by_nat64": "64:ff9b::a9fe:a9fe",
    "shared_metadata": SHARED,
    "private": PRIVATE,
    "an_allowed_name_by_its_address": GOOD,
    "another_address": OTHER,
    "an_unused_stand_in": "198.19.200.200",
    "broadcast": "255.255.255.255",
    "multicast": "224.0.0.1",
    "link_local_v6": "fe80::1%lo",
}.items():
    held(
        f"connect_{_label}",
        f"show([talk('{_host}', p, b'GET / HTTP/1.0\\r\\n\\r\\n', 5) for p in (80, 443, 8080)])",
    )

for _name in ("private", "meta", "shared", "loop", "zero", "self", "mapped", "nat64"):
    held(
        f"an_allowed_name_that_leads_inside_{_name}",
        f"show(get('{_name}.example'), talk('{_name}.example', 443, hello('{_name}.example')))",
    )
held("another_name", "show(get('evil.example'), talk('evil.example', 443, hello('evil.example')))")
held("the_name_above_a_wildcard", "show(get('wild.example'))")
held(
    "a_name_that_only_ends_alike",
    "show(get('notgood.example'), get('evilwild.example'), get('good.example.evil.example'))",
)
held(
    "a_port_that_is_not_named", "show(talk('good.example', 25, b'x', 5), talk('good.example', 8080, b'x', 5))"
)
held(
    "a_range_on_another_port",
    f"show(talk('{PRIVATE}', 22, b'', 5), talk('{PRIVATE}', 80, b'GET / HTTP/1.0\\r\\n\\r\\n', 5))",
)
held("another_host_header", "show(get('good.example', 'evil.example'))")
held("two_host_headers", "show(get('good.example', extra='Host: evil.example\\r\\n'))")
held("a_host_header_with_another_port", "show(get('good.example', 'good.example:8080'))")
held("no_host_header", "show(talk('good.example', 80, b'GET / HTTP/1.0\\r\\n\\r\\n', count=9999))")
held("an_absolute_target", "show(get('good.example', path='http://evil.example/'))")
held("connect_method", "show(get('good.example', method='CONNECT', path='evil.example:443'))")
held("connect_method_to_an_address", f"show(get('good.example', method='CONNECT', path='{METADATA}:80'))")
held(
    "http2_without_tls",
    "show(talk('good.example', 80, b'PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n', count=9999))",
)
held("something_else_on_the_web_port", "show(talk('good.example', 80, b'SSH-2.0-x\\r\\n\\r\\n', count=9999))")
held("another_sni", "show(talk('good.example', 443, hello('evil.example')))")
held("no_sni", "show(talk('good.example', 443, hello(None)))")
held(
    "no_tls_on_its_port",
    "show(talk('good.example', 443, b'GET / HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n'))",
)
held(
    "another_host_on_a_named_port_in_two_pieces",
    """
s = socket.create_connection(("good.example", 5432), 20)
for piece in (b"G", b"ET / HT", b"TP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n"): s.sendall(piece); time.sleep(0.3)
try: show(s.recv(65536))
except OSError: pass
""",
)
# A resolver in C takes what is before the NUL, and a backslash for a dot that is a part of a label.
held(
    "a_name_with_a_nul_below_a_wildcard",
    f"""
def ask(*labels):
    name = b"".join(bytes([len(label)]) + label for label in labels) + bytes(1)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(10); s.connect(("198.18.0.1", 53))
    s.send(struct.pack(">HHHHHH", 7, 256, 1, 0, 0, 0) + name + struct.pack(">HH", 1, 1))
    answer = s.recv(4096)
    return answer[-4:] if struct.unpack_from(">H", answer, 6)[0] else None
for front in ("evil.example", "{OTHER}"):
    first, *middle, last = front.encode().split(b".")
    found = ask(first, *middle, last + bytes(1), b"wild", b"example")
    if found: show("world", front, found, talk(socket.inet_ntoa(found), 443, hello("good.example")))
found = ask(b"evil.", b"wild", b"example")
if found: show("world", "backslash", found)
""",
)
held("another_sni_on_a_named_port", "show(talk('good.example', 8443, hello('evil.example')))")
held(
    "another_host_on_a_named_port",
    "show(talk('good.example', 5432, b'GET / HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n'))",
)
for _label, _extra in {
    "length_and_chunks": "Content-Length: 4\\r\\nTransfer-Encoding: chunked\\r\\n",
    "two_lengths": "Content-Length: 4\\r\\nContent-Length: 40\\r\\n",
    "odd_length": "Content-Length: +4\\r\\n",
    "odd_encoding": "Transfer-Encoding: xchunked\\r\\n",
    "two_encodings": "Transfer-Encoding: chunked\\r\\nTransfer-Encoding: identity\\r\\n",
    "space_before_colon": "Transfer-Encoding : chunked\\r\\n",
    "folded_line": "X: a\\r\\n Transfer-Encoding: chunked\\r\\n",
    "bare_line_end": "X: a\\nHost: evil.example\\r\\n",
    "nul": "X: a\\0b\\r\\n",
}.items():
    held(f"smuggling_{_label}", f"show(get('good.example', method='POST', extra='{_extra}'))")
held("huge_headers", "show(get('good.example', extra='X: ' + 'a' * 100000 + '\\r\\n'))")
held(
    "udp",
    f"""
for host in ("{GOOD}", "{METADATA}", "8.8.8.8", "198.18.0.1"):
  for port in (53, 123, 443):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
    try: s.connect((host, port)); s.send(b"x"); show(host, s.recv(100))
    except OSError as e: show(type(e).__name__)
""",
)
held(
    "raw_and_packet_sockets",
    """
for family, kind, proto in ((2, 3, 1), (2, 3, 255), (17, 3, 3), (17, 2, 3), (16, 3, 12)):
  try: socket.socket(family, kind, proto); show("opened" if family != 16 else "", family)
  except OSError as e: show(type(e).__name__)
""",
)
held(
    "abstract_socket",
    """
for name in ("\\0lowtide-allow-list-test",):
  try: s = socket.socket(socket.AF_UNIX); s.connect(name); show("machine")
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


@works
def a_redirect_leads_nowhere_else(box: Sandbox) -> None:
    code = """
import urllib.request
try: show(urllib.request.urlopen("http://good.example/redirect", timeout=20).read())
except OSError as e: show("stopped", e)
"""
    assert "stopped" in inside(box, code)


@works
def names_that_are_not_allowed_are_asked_of_nobody(box: Sandbox) -> None:
    inside(box, "for n in range(20):\n  talk(f'secret{n}.tunnel.example', 80)")
    asked = [json.loads(line).get("query", "") for line in _log.read_text().splitlines()]
    assert "good.example" in asked
    assert not [name for name in asked if "tunnel" in name]


@works
def a_second_request_is_not_sent_on(box: Sandbox) -> None:
    code = """
first = b"GET /first HTTP/1.1\\r\\nHost: good.example\\r\\n\\r\\n"
show(talk("good.example", 80, first + b"GET /second HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n", count=9999))
"""
    assert "world" in inside(box, code)
    seen = _log.read_text()
    assert "/first" in seen
    assert "/second" not in seen
    assert "evil.example" not in seen


@works
def thousands_of_connections_are_bounded_and_pass(box: Sandbox) -> None:
    code = """
import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))
held, lost = [], 0
for n in range(2000):
    s = socket.socket(); s.settimeout(5)
    try: s.connect((socket.gethostbyname("good.example") if not n else held[0].getpeername()[0], 80)); s.sendall(b"G"); held.append(s)
    except OSError: lost += 1
time.sleep(1); alive = 0
for s in held:
    s.setblocking(False)
    try: s.recv(1)
    except BlockingIOError: alive += 1
    except OSError: pass
show(alive)
for s in held: s.close()
time.sleep(2); show(get("good.example"))
"""
    answer = inside(box, code)
    assert 100 < int(answer.split()[0]) <= 256, answer
    assert "world" in answer, answer


@works
def a_slow_client_is_let_go(box: Sandbox) -> None:
    code = """
s = socket.create_connection(("good.example", 80), 20); began = time.monotonic()
try:
    while time.monotonic() - began < 60: s.sendall(b"X"); time.sleep(0.5)
    show("kept")
except OSError: show("let go")
"""
    assert "let go" in inside(box, code)


@works
def a_name_that_changes_its_address_leads_nowhere_new(box: Sandbox) -> None:
    code = """
began, seen = time.monotonic(), []
while time.monotonic() - began < 60 and not (seen and seen[-1][0] == "!"): seen.append(get("rebind.example")); time.sleep(2)
show([s[-20:] for s in seen])
"""
    seen = inside(box, code)
    assert GOOD in seen
    assert METADATA not in seen
    assert seen.rstrip().endswith("Error']"), seen


def machine_services() -> list[socket.socket]:
    """What listens on the machine itself, and must not be reached."""
    made = []
    for port in (80, 443, 8080):
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            server = socket.socket(family)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                server.bind((host, port))
            except PermissionError:  # an ordinary user's are above 1024
                server.close()
                continue
            server.listen()
            made.append(server)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0lowtide-allow-list-test")
    abstract.listen()
    made.append(abstract)
    for server in made:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
    return made


def _answer(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        connection.sendall(b"machine")
        connection.close()


def main(log: str, provider: str, *only: str) -> None:
    global _log
    _log = Path(log)
    machine_services()
    image = None if provider == "local" else IMAGE
    with Sandbox.run(provider=provider, container_image=image, network=ALLOW) as box:
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
                line = (
                    f"held {name}"
                    if not any(word in got for word in ("world", "machine", "opened", "changed"))
                    else f"GOT OUT {name} {got!r}"
                )
                print(line, flush=True)


def everything() -> list[str]:
    return [check.__name__ for check in _works] + [name for name, _ in _held]


if __name__ == "__main__":
    main(*sys.argv[1:])
