"""Who the first bytes of a connection are meant for: the SNI of TLS, the head of an HTTP request. No I/O.

What can be read in two ways is refused: a server that reads it the other way would serve somebody else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_HELLO_BYTES, MOST_HEAD_BYTES = 1 << 16, 1 << 15
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _HOST_NAME = 0, 0

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST = re.compile(rb"([A-Z][A-Z-]{0,31}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_HTTP_START = re.compile(
    rb"\s*(?:(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|TRACE|CONNECT|PRI) |[^\r\n]* HTTP/[0-9])"
)
# What can still become the first line of a request: the letters of a method, and no end of a line yet.
_HALF_A_LINE = re.compile(rb"\s*(?:[!#$%&'*+.^_`|~0-9A-Za-z-][^\x00-\x08\x0a-\x1f\x7f]*)?")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_DIGITS = re.compile(rb"[0-9]{1,15}")
# They say how this one connection is used, and it ends after this request. An upgrade would turn it into
# something that is not looked at any more.
_OF_THE_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"http2-settings", b"te", b"trailer"}
)


class RefusedBytesError(ValueError):
    """What came is not what it should be, or can be read in two ways."""


def looks_like_tls(data: bytes) -> bool:
    return data[:1] == b"\x16"


def looks_like_http(data: bytes) -> bool | None:
    """None while it cannot be told: whoever sends it byte by byte is not to get past."""
    if _HTTP_START.match(data) is not None:
        return True
    if _HALF_A_LINE.fullmatch(data) is None:
        return False
    if len(data) > MOST_HEAD_BYTES:
        raise RefusedBytesError("the first line is too long")
    return None


def server_name(data: bytes) -> str | None:
    """The name in a ClientHello; None while it is not complete. RefusedBytesError: it is none, or names nobody."""
    hello = _hello(data)
    if hello is None:
        return None
    reader = _Reader(hello)
    reader.take(2 + 32)  # version, random
    reader.take(reader.number(1))  # session
    reader.take(reader.number(2))  # ciphers
    reader.take(reader.number(1))  # compressions
    extensions = _Reader(reader.take(reader.number(2)))
    found: list[bytes] = []
    while extensions.left:
        kind, body = extensions.number(2), extensions.take(extensions.number(2))
        if kind == _SERVER_NAME:
            names = _Reader(body)
            names = _Reader(names.take(names.number(2)))
            while names.left:
                of, name = names.number(1), names.take(names.number(2))
                if of == _HOST_NAME:
                    found.append(name)
    if len(found) != 1:
        raise RefusedBytesError("the ClientHello does not name exactly one server")
    return _text(found[0]).rstrip(".")


def _hello(data: bytes) -> bytes | None:
    """The ClientHello, put together from its records."""
    message, at = b"", 0
    while True:
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise RefusedBytesError("the first message is no ClientHello")
            wanted = 4 + int.from_bytes(message[1:4], "big")
            if wanted > MOST_HELLO_BYTES:
                raise RefusedBytesError("the ClientHello is too long")
            if len(message) >= wanted:
                return message[4:wanted]
        if at + 5 > len(data):
            break
        kind, major, length = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != _HANDSHAKE or major != 3 or not 0 < length <= 1 << 14:
            raise RefusedBytesError("this is no TLS")
        message += data[at + 5 : at + 5 + length]
        if at + 5 + length > len(data):
            break
        at += 5 + length
    if data and data[0] != _HANDSHAKE:
        raise RefusedBytesError("this is no TLS")
    if len(data) > MOST_HELLO_BYTES:
        raise RefusedBytesError("the ClientHello is too long")
    return None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise RefusedBytesError("the ClientHello ends in the middle")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The head of one HTTP request, as it is sent on: for one connection and no other request."""

    head: bytes
    host: str
    port: int | None
    length: int
    """How many bytes of body follow; -1: chunks."""


def request(data: bytes) -> tuple[Request, bytes] | None:
    """The head and what came after it; None while it is not complete."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        if len(data) > MOST_HEAD_BYTES:
            raise RefusedBytesError("the head of the request is too long")
        return None
    first, *lines = head.split(b"\r\n")
    if (
        len(head) > MOST_HEAD_BYTES
        or b"\n" in head.replace(b"\r\n", b"")
        or b"\r" in head.replace(b"\r\n", b"")
    ):
        raise RefusedBytesError("the head of the request is too long or has bare line ends")
    matched = _REQUEST.fullmatch(first)
    if matched is None or matched[1] == b"CONNECT":
        raise RefusedBytesError("this is no HTTP/1 request for a resource")
    method, target, version = matched[1], matched[2], matched[3]
    kept: list[bytes] = []
    hosts: list[bytes] = []
    lengths: list[bytes] = []
    encodings: list[bytes] = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise RefusedBytesError("a line of the head is no header")
        lowered, value = name.lower(), value.strip(b" \t")
        for known, values in (
            (b"host", hosts),
            (b"content-length", lengths),
            (b"transfer-encoding", encodings),
        ):
            if lowered == known:
                values.append(value)
        if lowered not in _OF_THE_CONNECTION:
            kept.append(name + b": " + value)
    if len(hosts) != 1:
        raise RefusedBytesError("the request does not name exactly one host")
    host, port = _authority(hosts[0])
    if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
        target = _own_part(target, hosts[0])
    length = _length(lengths, encodings)
    if length < 0 and version == b"HTTP/1.0":
        raise RefusedBytesError("HTTP/1.0 has no chunks")
    packed = b"\r\n".join([b" ".join((method, target, version)), *kept, b"Connection: close", b"", b""])
    return Request(head=packed, host=host, port=port, length=length), rest


def chunk_length(line: bytes) -> int:
    """The length that a chunk's first line (without its end) says."""
    if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
        raise RefusedBytesError("a chunk does not say its length, and nothing else")
    return int(line, 16)


def _length(lengths: list[bytes], encodings: list[bytes]) -> int:
    if encodings:
        if lengths or len(encodings) > 1 or encodings[0].lower() != b"chunked":
            raise RefusedBytesError("the length of the body can be read in two ways")
        return -1
    if not lengths:
        return 0
    if len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0]):
        raise RefusedBytesError("the length of the body can be read in two ways")
    return int(lengths[0])


def _own_part(target: bytes, host: bytes) -> bytes:
    """Of the absolute form, which a proxy is asked with: for the same host only."""
    scheme, separator, rest = target.partition(b"://")
    authority, slash, path = rest.partition(b"/")
    if scheme.lower() != b"http" or not separator or authority.lower() != host.lower():
        raise RefusedBytesError("the request names two hosts")
    return slash + path or b"/"


def _authority(value: bytes) -> tuple[str, int | None]:
    matched = re.fullmatch(rb"(\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]]+)(?::([0-9]{1,5}))?", value)
    if matched is None:
        raise RefusedBytesError("the request's host cannot be read")
    return _text(matched[1]).rstrip("."), int(matched[2]) if matched[2] else None


def _text(name: bytes) -> str:
    try:
        return name.decode("ascii").lower()
    except UnicodeDecodeError:
        raise RefusedBytesError("the name of the host is not in ASCII") from None
