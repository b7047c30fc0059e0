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
_METHOD_START = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|TRACE|CONNECT|PRI) ")
_VERSION = re.compile(rb" HTTP/[0-9]")
_LONGEST_METHOD, _VERSION_LENGTH = len(b"OPTIONS "), len(b" HTTP/1")
# A byte that cannot stand in the first line of a request, its end among them.
_NOT_IN_A_LINE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LINE_END = re.compile(rb"[\r\n]")
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


class HttpDetector:
    """Whether a connection begins as an HTTP request, told from its bytes as they come. Reads each byte once."""

    def __init__(self) -> None:
        self.data = bytearray()
        """Everything that was fed."""
        self._start: int | None = None
        """Where the first line begins, after white space."""
        self._scanned = 0

    def feed(self, data: bytes) -> bool | None:
        """None while it cannot be told: a client that sends byte by byte does not get past."""
        self.data += data
        if self._start is None:
            while self._scanned < len(self.data) and self.data[self._scanned] in b" \t\n\r\f\v":
                self._scanned += 1
            if self._scanned == len(self.data):
                self._check_length()
                return None
            self._start = self._scanned
            if _TOKEN.match(self.data, self._start, self._start + 1) is None:
                return self._has_version(self._start)
        if _METHOD_START.match(self.data, self._start, self._start + _LONGEST_METHOD) is not None:
            return True
        begin = max(self._start, self._scanned - _VERSION_LENGTH + 1)
        if _NOT_IN_A_LINE.search(self.data, self._scanned) is not None:
            return self._has_version(begin)
        if _VERSION.search(self.data, begin) is not None:
            return True
        self._scanned = len(self.data)
        self._check_length()
        return None

    def _has_version(self, begin: int) -> bool:
        """The last look, at what is there of the line: some server may read past a byte that has no place in it."""
        end = _LINE_END.search(self.data, begin)
        return _VERSION.search(self.data, begin, len(self.data) if end is None else end.start()) is not None

    def _check_length(self) -> None:
        if len(self.data) > MOST_HEAD_BYTES:
            raise RefusedBytesError("the first line is too long")


class HelloReader:
    """The server name of a ClientHello, read from its bytes as they come. Reads each byte once."""

    def __init__(self) -> None:
        self.data = bytearray()
        """Everything that was fed, to be sent on as it came."""
        self._message = bytearray()
        self._at = 0
        self._left = 0
        """Bytes of the current record that have not come yet."""

    def feed(self, data: bytes) -> str | None:
        """The name, or None while the ClientHello is not complete. RefusedBytesError: it is none, or names nobody."""
        self.data += data
        while self._at < len(self.data):
            if self._left == 0:
                self._begin_record()
                if self._left == 0:
                    break
            part = self.data[self._at : self._at + self._left]
            self._message += part
            self._at += len(part)
            self._left -= len(part)
            body = self._body()
            if body is not None:
                return _name_in(body)
        if len(self.data) > MOST_HELLO_BYTES:
            raise RefusedBytesError("the ClientHello is too long")
        return None

    def _begin_record(self) -> None:
        if self.data[self._at] != _HANDSHAKE:
            raise RefusedBytesError("this is no TLS")
        if self._at + 5 > len(self.data):
            return
        major, length = self.data[self._at + 1], int.from_bytes(self.data[self._at + 3 : self._at + 5], "big")
        if major != 3 or not 0 < length <= 1 << 14:
            raise RefusedBytesError("this is no TLS")
        self._at += 5
        self._left = length

    def _body(self) -> bytes | None:
        if len(self._message) < 4:
            return None
        if self._message[0] != _CLIENT_HELLO:
            raise RefusedBytesError("the first message is no ClientHello")
        wanted = 4 + int.from_bytes(self._message[1:4], "big")
        if wanted > MOST_HELLO_BYTES:
            raise RefusedBytesError("the ClientHello is too long")
        return bytes(self._message[4:wanted]) if len(self._message) >= wanted else None


def _name_in(hello: bytes) -> str:
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


class RequestReader:
    """The head of an HTTP request, read from its bytes as they come. Reads each byte once."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> tuple[Request, bytes] | None:
        """The head and what came after it; None while it is not complete."""
        begin = max(0, len(self._data) - 3)
        self._data += data
        end = self._data.find(b"\r\n\r\n", begin)
        if end < 0:
            if len(self._data) > MOST_HEAD_BYTES:
                raise RefusedBytesError("the head of the request is too long")
            return None
        return _request(bytes(self._data[:end])), bytes(self._data[end + 4 :])


def _request(head: bytes) -> Request:
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
    return Request(head=packed, host=host, port=port, length=length)


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
