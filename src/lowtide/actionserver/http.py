"""HTTP/1.1 as far as the action server needs it: one thread for each connection, bodies of any size as streams.

The standard library's own server imports the mail package and takes longer to load than everything else.
"""

from __future__ import annotations

import json
import resource
import socket
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

MAX_HEAD_BYTES = 64 << 10
MAX_JSON_BYTES = 96 << 20
MAX_STRANGERS = 100
_LINGER_SECONDS = 2.0
_PAUSE = 0.02

_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    507: "Insufficient Storage",
}


class HttpError(Exception):
    """An answer with that status and ``{"detail": message}``."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Request:
    """One request; its body is read by `json` or `read`, or skipped."""

    def __init__(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        source: IO[bytes],
        on_trust: Callable[[], None] = lambda: None,
    ) -> None:
        self.method = method
        self.path, _, query = target.partition("?")
        self.query = _parse_query(query)
        self.headers = headers
        self._source = source
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise HttpError(400, "Content-Length must be a number")
        self._left = 0 if self._chunked else int(length)
        self._ended = False
        self.trusted, self._on_trust = False, on_trust

    def trust(self) -> None:
        """It came with the key."""
        self.trusted = True
        self._on_trust()

    def json(self) -> Any:
        if self._left > MAX_JSON_BYTES:
            raise HttpError(
                413, f"a JSON body may have {MAX_JSON_BYTES >> 20} MiB at most; upload the file instead"
            )
        pieces, size = [], 0
        while piece := self.read(1 << 20):
            size += len(piece)
            if size > MAX_JSON_BYTES:
                raise HttpError(413, f"a JSON body may have {MAX_JSON_BYTES >> 20} MiB at most")
            pieces.append(piece)
        try:
            return json.loads(b"".join(pieces))
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is no JSON: {error}") from None

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the body; empty at its end."""
        if self._chunked and self._left == 0 and not self._ended:
            line = self._source.readline(64)
            size_word = line.split(b";")[0].strip()
            # int() also takes signs and underscores, and a negative size would mean "to the end".
            if not 0 < len(size_word) <= 15 or size_word.strip(b"0123456789abcdefABCDEF"):
                self._ended = True
                raise HttpError(400, "the body is not chunked as it says")
            self._left = int(size_word, 16)
            if self._left == 0:
                self._ended = True
                while self._source.readline(MAX_HEAD_BYTES).strip():
                    pass
        if self._left == 0:
            return b""
        data = self._source.read(min(size, self._left))
        if not data:
            raise ConnectionError("the body ended early")
        self._left -= len(data)
        if self._chunked and self._left == 0:
            self._source.readline(8)
        return data

    def skip(self) -> bool:
        """Read what is left of the body. False when that is too much to wait for."""
        limit = MAX_JSON_BYTES if self.trusted else MAX_HEAD_BYTES
        while self._left <= limit:
            piece = self.read(1 << 16)
            if not piece:
                return True
            limit -= len(piece)
        return False


class Response:
    """Written through `reply`, or piece by piece between `begin` and `end`."""

    def __init__(self, connection: socket.socket, *, keep: bool) -> None:
        self._connection, self.keep = connection, keep
        self.begun = False

    def reply(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode("utf-8", "surrogatepass")
        self._head(status, "application/json", f"Content-Length: {len(body)}", body)

    def begin(self, content_type: str, extra: str = "") -> None:
        self._head(200, content_type, f"Transfer-Encoding: chunked{extra}")

    def write(self, data: bytes) -> int:
        if data:
            self._connection.sendall(b"%x\r\n%b\r\n" % (len(data), data))
        return len(data)

    def flush(self) -> None:
        """As a file has it."""

    def end(self) -> None:
        self._connection.sendall(b"0\r\n\r\n")

    def _head(self, status: int, content_type: str, length: str, body: bytes = b"") -> None:
        self.begun = True
        reason = _REASONS.get(status, "")
        connection = "keep-alive" if self.keep else "close"
        head = (
            f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\n{length}\r\nConnection: {connection}\r\n"
            "Cache-Control: no-store\r\n\r\n"
        )
        self._connection.sendall(head.encode() + body)


class _Strangers:
    """Connections on which no key has come yet. There may be so many: the oldest one makes way for a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(MAX_STRANGERS, limit // 4) if limit > 0 else MAX_STRANGERS

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections[connection] = None
            crowded = len(self._connections) > self._most
        if crowded:
            self.end_oldest()

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def end_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._connections), None)
            if oldest is None:
                return
            del self._connections[oldest]
            try:
                oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            except OSError:
                pass


def serve(listener: socket.socket, handle: Callable[[Request, Response], None]) -> None:
    """For ever, also where descriptors, threads or memory run out: then for those that are there."""
    strangers = _Strangers()
    while True:
        connection = None
        try:
            connection, _ = listener.accept()
            strangers.add(connection)
            threading.Thread(
                target=_converse, args=(connection, strangers, handle), name="connection", daemon=True
            ).start()
        except (OSError, RuntimeError, MemoryError):
            if connection is not None:
                strangers.remove(connection)
                connection.close()
            strangers.end_oldest()
            time.sleep(_PAUSE)


def _converse(
    connection: socket.socket, strangers: _Strangers, handle: Callable[[Request, Response], None]
) -> None:
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        source: IO[bytes] = connection.makefile("rb", 1 << 16)  # type: ignore[assignment]
        while _one(connection, source, strangers, handle):
            pass
        _linger(connection)
    except (OSError, ValueError):
        pass  # the other end has left
    finally:
        strangers.remove(connection)
        connection.close()


def _linger(connection: socket.socket) -> None:
    """What is still coming is taken for a while: the kernel would throw the answer away with it."""
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(_LINGER_SECONDS)
    deadline = time.monotonic() + _LINGER_SECONDS
    while time.monotonic() < deadline and connection.recv(1 << 16):
        pass


def _one(
    connection: socket.socket,
    source: IO[bytes],
    strangers: _Strangers,
    handle: Callable[[Request, Response], None],
) -> bool:
    """One request and its answer. False when the connection is over."""
    response = Response(connection, keep=False)
    try:
        head = _read_head(source)
        if head is None:
            return False
        method, target, version, headers = head
        response.keep = version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
        request = Request(method, target, headers, source, lambda: strangers.remove(connection))
        if headers.get("expect", "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            handle(request, response)
        except HttpError as error:
            if response.begun:
                return False
            response.reply(error.status, {"detail": str(error)})
        return response.keep and request.skip()
    except HttpError as error:
        if not response.begun:  # else what is left of its body is at fault, and it has its answer
            response.reply(error.status, {"detail": str(error)})
        return False


def _read_head(source: IO[bytes]) -> tuple[str, str, str, dict[str, str]] | None:
    line = source.readline(MAX_HEAD_BYTES + 1)
    while line in (b"\r\n", b"\n"):
        line = source.readline(MAX_HEAD_BYTES + 1)
    if not line:
        return None
    words = line.decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HttpError(400, "this is no HTTP/1.1 request")
    headers: dict[str, str] = {}
    size = len(line)
    while True:
        line = source.readline(MAX_HEAD_BYTES + 1)
        size += len(line)
        if size > MAX_HEAD_BYTES:
            raise HttpError(431, f"the headers may have {MAX_HEAD_BYTES >> 10} KiB at most")
        if line in (b"\r\n", b"\n", b""):
            break
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return words[0], words[1], words[2], headers


def _parse_query(query: str) -> dict[str, str]:
    found = {}
    for pair in query.split("&"):
        name, given, value = pair.partition("=")
        if given:
            found[_unquote(name)] = _unquote(value)
    return found


def _unquote(text: str) -> str:
    head, *parts = text.replace("+", " ").encode("latin-1", "replace").split(b"%")
    out = bytearray(head)
    for part in parts:
        try:
            out += bytes((int(part[:2], 16),)) + part[2:]
        except ValueError:
            out += b"%" + part
    return out.decode("utf-8", "surrogateescape")


def multipart_file(request: Request) -> Iterator[bytes | str]:
    """The first part of a form that is a file: its name, then its bytes."""
    kind = request.headers.get("content-type", "")
    if "multipart/form-data" not in kind or "boundary=" not in kind:
        raise HttpError(400, "an upload is multipart/form-data with one part 'file'")
    boundary = kind.partition("boundary=")[2].split(";")[0].strip().strip('"').encode("latin-1")
    delimiter = b"\r\n--" + boundary
    data, ended = b"\r\n", False

    def more() -> bool:
        nonlocal data, ended
        piece = request.read(1 << 18)
        ended = ended or not piece
        data += piece
        return bool(piece)

    while True:
        while delimiter not in data and len(data) < MAX_HEAD_BYTES and more():
            pass
        at = data.find(delimiter)
        if at < 0 or data.startswith(delimiter + b"--", at):
            raise HttpError(400, "the form has no part 'file'")
        data = data[at + len(delimiter) :]
        while b"\r\n\r\n" not in data and len(data) < MAX_HEAD_BYTES and more():
            pass
        head, found, data = data.partition(b"\r\n\r\n")
        if not found:
            raise HttpError(400, "a part of the form has no end of its headers")
        name = _file_name(head.decode("utf-8", "surrogateescape"))
        if name is not None:
            break
    yield name
    while True:
        at = data.find(delimiter)
        if at >= 0:
            yield data[:at]
            return
        keep = len(delimiter) - 1
        if len(data) > keep:
            yield data[:-keep]
            data = data[-keep:]
        if not more():
            raise HttpError(400, "the form ends early")


def _file_name(head: str) -> str | None:
    for line in head.split("\r\n"):
        if line.lower().startswith("content-disposition:") and "filename=" in line:
            name = line.partition("filename=")[2]
            name = name[1:].split('"')[0] if name.startswith('"') else name.split(";")[0]
            return name.replace("%22", '"').rpartition("/")[2] or "upload"
    return None
