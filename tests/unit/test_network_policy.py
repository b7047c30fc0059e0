"""What an allow-list means: its entries, the addresses behind a name, and the bytes that say who is meant."""

from __future__ import annotations

import contextlib
import ssl
import struct
import time
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import SandboxDefaults, ValidationError
from lowtide.providers.network import inspect, names
from lowtide.providers.network.policy import STAND_INS, Policy, entry

PUBLIC, PUBLIC6 = "93.184.216.34", "2606:2800:220:1::1"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("*.Example.org", "*.example.org"),
        ("example.org:8443", "example.org:8443"),
        ("10.1.2.0/24", "10.1.2.0/24"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.3/32", "10.1.2.3"),
        ("10.1.2.0/24:5432", "10.1.2.0/24:5432"),
        ("2606:2800::/32", "2606:2800::/32"),
        ("[2606:2800::1]:443", "[2606:2800::1]:443"),
    ],
)
def test_an_entry_has_one_spelling(text: str, meant: str) -> None:
    assert entry(text).text == meant
    assert entry(meant).text == meant
    assert SandboxDefaults(network=[text]).network.allow == (meant,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "*.",
        "a.*.example.org",
        "*example.org",
        "http://example.org",
        "example.org/path",
        "example.org:0",
        "example.org:65536",
        "example.org:http",
        "exa mple.org",
        "exämple.org",
        "-a.example.org",
        "a..example.org",
        "localhost",
        "a.localhost",
        "2130706433",
        "0x7f000001",
        "127.1",
        "1.2.3.0x4",
        "127.0.0.1",
        "127.0.0.0/16",
        "0.0.0.0",
        "169.254.169.254",
        "169.254.0.0/16",
        "224.0.0.1",
        "::1",
        "fe80::/64",
        "10.1.2.3/24",
        "10.1.2.0/33",
        "[2606::1",
        "198.18.0.5",
        "a" * 64 + ".org",
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_made(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SandboxDefaults(network={"allow": [text]})
    assert caught.value.argument == "network"


def test_a_name_means_the_web_and_a_range_every_port() -> None:
    policy = Policy.of(["example.org", "*.below.org", "db.example.org:5432", "10.1.2.0/24", "10.2.0.0/16:22"])
    assert policy.allows_name("example.org", 443)
    assert policy.allows_name("example.org", 80)
    assert not policy.allows_name("example.org", 22)
    assert not policy.allows_name("a.example.org")
    assert policy.allows_name("a.b.below.org", 443)
    assert not policy.allows_name("below.org")
    assert policy.allows_name("db.example.org", 5432)
    assert not policy.allows_name("db.example.org", 443)
    assert policy.allows_address(ip_address("10.1.2.3"), 9999)
    assert policy.allows_address(ip_address("10.2.2.3"), 22)
    assert not policy.allows_address(ip_address("10.2.2.3"), 80)
    assert not policy.allows_address(ip_address("10.1.3.1"), 80)


INSIDE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.192",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::1",
    "2001:0:1::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", INSIDE)
def test_neither_a_name_nor_a_wide_range_leads_inside(address: str) -> None:
    for allow in (["example.org"], ["0.0.0.0/0", "::/0", "example.org"], ["0.0.0.0/1", "128.0.0.0/1"]):
        policy = Policy.of(allow)
        assert not policy.may_lead_to(ip_address(address), 443)
        assert not policy.allows_address(ip_address(address), 443)


def test_a_wide_range_is_the_public_internet() -> None:
    policy = Policy.of(["0.0.0.0/0", "::/0"])
    assert policy.allows_address(ip_address(PUBLIC), 443)
    assert policy.allows_address(ip_address(PUBLIC6), 22)


def test_a_private_range_is_reached_when_it_is_named_by_address_and_by_name() -> None:
    policy = Policy.of(["intranet.example", "10.0.0.0/8:443"])
    assert policy.may_lead_to(ip_address("10.1.2.3"), 443)
    assert policy.may_lead_to(ip_address("::ffff:10.1.2.3"), 443)
    assert not policy.may_lead_to(ip_address("10.1.2.3"), 80)
    assert not policy.may_lead_to(ip_address("192.168.1.1"), 443)


def test_stand_ins_never_mean_two_names_at_once() -> None:
    stand_ins = names.StandIns()
    first = stand_ins.of("a.example")
    assert stand_ins.of("a.example") == first
    assert stand_ins.name(first) == "a.example"
    for number in range(40_000):
        assert stand_ins.of(f"{number}.example") in STAND_INS
    assert stand_ins.name(first) is None  # forgotten, and not somebody else's
    assert stand_ins.name(stand_ins.of("39999.example")) == "39999.example"


# ---------------------------------------------------------------- bytes


def hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    wrapped = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        wrapped.do_handshake()
    return outgoing.read()


_HELLO = hello("good.example")  # once: a context takes a while to make


def in_records(data: bytes, size: int) -> bytes:
    """The same ClientHello in many small records."""
    body = data[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack(">H", len(part)) + part for part in parts)


def test_the_server_name_is_read_however_it_is_cut() -> None:
    data = hello("Good.Example")
    assert inspect.HelloReader().feed(data) == "good.example"
    assert inspect.HelloReader().feed(data + b"more") == "good.example"
    for size in (1, 3, 100):
        assert inspect.HelloReader().feed(in_records(data, size)) == "good.example"
    for cut in range(len(data)):
        assert inspect.HelloReader().feed(data[:cut]) is None


def test_a_clienthello_that_names_nobody_is_refused() -> None:
    with pytest.raises(inspect.RefusedBytesError):
        inspect.HelloReader().feed(hello(None))


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 400))
def test_hostile_bytes_are_refused_or_incomplete_and_never_an_accident(noise: bytes, at: int) -> None:
    data = bytearray(_HELLO)
    data[at : at + len(noise)] = noise
    for reader in (inspect.HelloReader, inspect.RequestReader, inspect.HttpDetector):
        for given_bytes in (
            bytes(data),
            noise,
            b"\x16\x03\x01" + noise,
            b"GET / HTTP/1.1\r\n" + noise + b"\r\n\r\n",
        ):
            with contextlib.suppress(inspect.RefusedBytesError):
                reader().feed(given_bytes)
    names.query(noise)
    names.query(b"\0\1\1\0\0\1\0\0\0\0\0\0" + noise)


def test_a_request_is_sent_on_for_one_connection_and_without_an_upgrade() -> None:
    data = (
        b"GET http://good.example/a?b HTTP/1.1\r\nhOST: good.example\r\nConnection: keep-alive, Upgrade\r\n"
        b"Upgrade: websocket\r\nAccept: */*\r\n\r\nrest"
    )
    parsed = inspect.RequestReader().feed(data)
    assert parsed is not None
    request, rest = parsed
    assert (request.host, request.port, request.length, rest) == ("good.example", None, 0, b"rest")
    assert request.head == (
        b"GET /a?b HTTP/1.1\r\nhOST: good.example\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    )


def test_names_with_dots_inside_a_label_are_nobodys() -> None:
    asked = names.query(b"\0\1\1\0\0\1\0\0\0\0\0\0" + b"\x0cgood.example\0\0\1\0\1")
    assert asked is not None
    assert not Policy.of(["good.example", "*.example"]).allows_name(asked.name)


@pytest.mark.parametrize(
    "label", [b"evil.org\0", b"93.184.216.34\0", b"evil.", b"a\\", b"a b", b"\xe4", b"a\n", b"%lo", b"\0"]
)
def test_only_a_host_name_is_below_a_wildcard(label: bytes) -> None:
    question = bytes([len(label)]) + label + b"\4wild\7example\0\0\1\0\1"
    asked = names.query(b"\0\1\1\0\0\1\0\0\0\0\0\0" + question)
    assert asked is not None
    assert asked.name.endswith(".wild.example")
    assert not Policy.of(["*.wild.example"]).allows_name(asked.name)


@pytest.mark.parametrize("name", ["a.wild.example", "_srv.a.wild.example", "r3---a-.wild.example"])
def test_every_host_name_is_below_a_wildcard(name: str) -> None:
    assert Policy.of(["*.wild.example"]).allows_name(name)


@pytest.mark.parametrize(
    "request_", [b"GET / HTTP/1.1\r\n", b"\r\nPOST /a HTTP/1.0\r\n", b"BREW /pot HTTP/1.1\r\n"]
)
def test_a_request_is_seen_however_it_is_cut(request_: bytes) -> None:
    told = [inspect.HttpDetector().feed(request_[:cut]) for cut in range(1, len(request_) + 1)]
    assert False not in told
    assert told[-1] is True


@pytest.mark.parametrize(
    "first", [b"EHLO me\r\n", b"\0\0\0\x08", b"*1\r\n$4\r\nPING\r\n", b"AMQP\0\0\t\1", b"\x80"]
)
def test_another_protocol_is_not_kept_waiting(first: bytes) -> None:
    assert inspect.HttpDetector().feed(first) is False


def test_a_first_line_without_an_end_is_refused() -> None:
    with pytest.raises(inspect.RefusedBytesError):
        inspect.HttpDetector().feed(b"A" * (inspect.MOST_HEAD_BYTES + 1))


def fed(reader: inspect.HelloReader | inspect.RequestReader | inspect.HttpDetector, data: bytes) -> object:
    """What a reader tells when each byte comes alone."""
    told = None
    for at in range(len(data)):
        told = reader.feed(data[at : at + 1])
        if told is not None:
            break
    return told


@settings(deadline=None, max_examples=200)
@given(
    st.one_of(
        st.binary(max_size=60), st.from_regex(rb"\s{0,3}[A-Z]{0,8} ?/? HTTP?/?1?.{0,9}", fullmatch=True)
    )
)
def test_a_protocol_is_told_alike_byte_by_byte(data: bytes) -> None:
    assert fed(inspect.HttpDetector(), data) in (inspect.HttpDetector().feed(data), False)


def test_heads_that_come_byte_by_byte_are_read_in_linear_time() -> None:
    """Counted in bytes that are looked at, not in time: each reader looks at a byte a bounded number of times."""
    head = b"GET / HTTP/1.1\r\nHost: good.example\r\nX: " + b"a" * 32_000 + b"\r\n\r\n"
    records = in_records(b"\x16\x03\x01\0\0" + _HELLO[5:], 1)
    assert fed(inspect.RequestReader(), head) is not None
    assert fed(inspect.HelloReader(), records) == "good.example"
    for reader, data in (
        (inspect.RequestReader, head[:-4]),
        (inspect.HelloReader, b"\x16\x03\x01\x40\0\1\0\xff\0" + b"\0" * 16_000),
        (inspect.HttpDetector, b"A" * 32_000),
    ):
        short, long = (_cpu_seconds(reader, data[: len(data) // part]) for part in (8, 1))
        # Eight times the bytes: eight times the work, not sixty-four times. Twice that for a noisy machine.
        assert long < 16 * short + 0.01, (reader, short, long)


def _cpu_seconds(
    reader: type[inspect.HelloReader | inspect.RequestReader | inspect.HttpDetector], data: bytes
) -> float:
    return min(_one_run(reader, data) for _ in range(3))


def _one_run(
    reader: type[inspect.HelloReader | inspect.RequestReader | inspect.HttpDetector], data: bytes
) -> float:
    began = time.process_time()
    assert fed(reader(), data) is None
    return time.process_time() - began


@pytest.mark.parametrize("address", [*INSIDE, "::10.0.0.1", "::ffff:0:10.0.0.1", "2001:db8::1", "4000::1"])
def test_the_public_internet_is_nobodys_inside(address: str) -> None:
    policy = Policy.public_internet()
    assert not policy.allows_address(ip_address(address), 443)
    assert policy.allows_address(ip_address(PUBLIC), 25)
    assert policy.allows_address(ip_address(PUBLIC6), 22)
    assert policy.allows_address(ip_address(f"::ffff:{PUBLIC}"), 22)
