"""The action server's client: HTTP/1.1 over whatever opens a pair of streams, on the engine's loop."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

from lowtide import sandbox_json
from lowtide.actionserver.models import Action, Observation
from lowtide.errors import (
    AuthenticationError,
    RequestTimeoutError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)

GRACE_SECONDS = 30.0
"""On top of an action's own limit, for the way there and back."""
_CHUNK = 1 << 18
MAX_ANSWER_BYTES = 512 << 20
"""More than any file that an action reads becomes as JSON."""
MAX_DOWNLOAD_BYTES = 64 << 30
"""What one download writes at most."""


class Writer(Protocol):
    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


Streams = tuple[asyncio.StreamReader, Writer]
Dial = Callable[[], Awaitable[Streams]]


class ActionClient:
    """Connections are kept for the next request; several requests may be under way at once."""

    def __init__(
        self,
        dial: Dial,
        key: str,
        *,
        host: str = "sandbox",
        prefix: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._dial, self._prefix = dial, prefix.rstrip("/")
        named = {"Host": host, "X-Session-API-Key": key, **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self._idle: list[Streams] = []
        self._closed = False

    async def alive(self, timeout_seconds: float) -> None:
        """Raises SandboxUnavailableError, RequestTimeoutError; AuthenticationError when the key is not the server's."""
        await self._json("GET", "/alive", timeout_seconds=timeout_seconds)
        await self._json("GET", "/sessions", timeout_seconds=timeout_seconds)

    async def server_info(self) -> dict[str, Any]:
        return _dict(await self._json("GET", "/server_info"))

    async def execute(
        self,
        action: Action,
        *,
        seconds: float,
        on_output: Callable[[str], None] | None = None,
    ) -> Observation:
        """`on_output` gets the output as it appears."""
        body = json.dumps({"action": action.to_json()}).encode()
        extra = "Accept: text/event-stream\r\n" if on_output is not None else ""
        found: Any = None
        async with (
            asyncio.timeout(seconds + GRACE_SECONDS),
            _Exchange(self, "POST", "/execute_action") as exchange,
        ):
            await exchange.send(body, extra)
            if on_output is None:
                found = _parsed(await exchange.read_all())
            else:
                async for name, data in _events(exchange.body()):
                    if name == "output":
                        on_output(str(data.get("text", "")))
                    elif name == "error":
                        raise SandboxError(f"the action server failed: {data.get('detail')}")
                    else:
                        found = data
        try:
            return Observation.from_json(found)
        except (ValueError, TypeError, AttributeError) as error:
            raise _nonsense(f"no observation ({error})") from error

    async def cancel(self, session: str, grace_seconds: float) -> bool:
        """End what runs there. False when nothing does."""
        try:
            body: dict[str, Any] = {"session": session, "grace_seconds": grace_seconds}
            await self._json("POST", "/cancel", body, timeout_seconds=3 * grace_seconds + GRACE_SECONDS)
        except Conflict:
            return False
        return True

    async def list_files(self, path: str | None) -> list[str]:
        found = await self._json("POST", "/list_files", {"path": path})
        return [str(name) for name in found] if isinstance(found, list) else []

    async def sessions(self) -> dict[str, Any]:
        return _dict(_dict(await self._json("GET", "/sessions")).get("sessions"))

    async def close_session(self, session: str) -> None:
        await self._json("POST", "/close_session", {"session": session})

    async def connection_token(self) -> str | None:
        token = _dict(await self._json("GET", "/vscode/connection_token")).get("token")
        return None if token is None else str(token)

    async def shutdown(self, timeout_seconds: float) -> None:
        """End all that the server started, and the server."""
        await self._json("POST", "/shutdown", {}, timeout_seconds=timeout_seconds)

    async def upload(self, source: Path, destination: str, *, recursive: bool) -> int:
        """A file into that directory; with `recursive` it is a zip of what goes there."""
        boundary = secrets.token_hex(16)
        name = source.name.replace('"', "%22")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        query = urlencode({"destination": destination, "recursive": str(recursive).lower()})
        async with _Exchange(self, "POST", f"/upload_file?{query}") as exchange:
            with source.open("rb") as file:
                size = left = os.fstat(file.fileno()).st_size
                kind = f"Content-Type: multipart/form-data; boundary={boundary}\r\n"
                await exchange.begin(len(head) + size + len(tail), kind)
                await exchange.write(head)
                while left and not exchange.refused:
                    piece = file.read(min(left, _CHUNK))
                    if not piece:  # as much as was promised must come, or the server waits for ever
                        raise SandboxFileError(f"{source} became shorter while it was uploaded")
                    left -= len(piece)
                    await exchange.write(piece)
            await exchange.write(tail)
            await exchange.answered()
            await exchange.read_all()
        return size

    async def download(self, path: str, destination: Path, *, raw: bool = False) -> int:
        """A zip, or with `raw` the plain file, into `destination`: 64 GiB at most."""
        size = 0
        query = urlencode({"path": path, "raw": "1" if raw else "0"})
        async with _Exchange(self, "GET", f"/download_files?{query}") as exchange:
            await exchange.send(b"", "")
            with destination.open("wb") as file:
                async for piece in exchange.body():
                    size += len(piece)
                    if size > MAX_DOWNLOAD_BYTES:
                        raise _nonsense(f"more than {MAX_DOWNLOAD_BYTES >> 30} GiB")
                    file.write(piece)
        return size

    async def aclose(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for _, writer in idle:
            writer.close()

    async def _json(self, method: str, path: str, body: Any = None, *, timeout_seconds: float = 30.0) -> Any:
        try:
            async with asyncio.timeout(timeout_seconds), _Exchange(self, method, path) as exchange:
                await exchange.send(b"" if body is None else json.dumps(body).encode(), "")
                return _parsed(await exchange.read_all())
        except TimeoutError:
            raise RequestTimeoutError(
                f"the action server did not answer within {timeout_seconds:g} seconds"
            ) from None


class Conflict(SandboxError):
    """Status 409: it makes sense, but not now."""


class _Exchange:
    """One request and its answer. Its connection is kept when both were whole, and closed otherwise."""

    def __init__(self, client: ActionClient, method: str, path: str) -> None:
        self._client, self._method, self._path = client, method, path
        self._streams: Streams | None = None
        self._chunked, self._length, self._keep, self._whole = False, 0, False, False
        self.refused = False
        """The other end takes no more of the body; its answer may say why."""
        self._begun = False

    async def __aenter__(self) -> _Exchange:
        if self._client._closed:
            raise SandboxError("the runtime is closed; connect() again")
        try:
            while self._client._idle:
                self._streams = self._client._idle.pop()
                if not self._streams[0].at_eof():
                    return self
            self._streams = await self._client._dial()
        except OSError as error:
            raise SandboxUnavailableError(f"the action server cannot be reached: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is None:
            return
        if self._whole and self._keep and not self._client._closed:
            self._client._idle.append(self._streams)
        else:
            self._streams[1].close()

    async def send(self, body: bytes, extra: str) -> None:
        await self.begin(len(body), extra + "Content-Type: application/json\r\n" if body else extra, body)
        await self.answered()

    async def begin(self, length: int, extra: str, body: bytes = b"") -> None:
        head = (
            f"{self._method} {self._client._prefix}{self._path} HTTP/1.1\r\n{self._client._headers}{extra}"
            f"Content-Length: {length}\r\n\r\n"
        )
        await self.write(head.encode("latin-1") + body)

    async def write(self, data: bytes) -> None:
        assert self._streams is not None
        if self.refused:
            return
        reader, writer = self._streams
        try:
            for at in range(0, len(data), _CHUNK):
                # An answer before the end of the body is a refusal: no more is sent, and it is read.
                if self._begun and _holds_data(reader):
                    self.refused = True
                    return
                writer.write(data[at : at + _CHUNK])
                await writer.drain()
                self._begun = True
        except OSError as error:
            if not self._begun:
                raise SandboxUnavailableError(f"the way to the action server broke: {error}") from error
            self.refused = True

    async def answered(self) -> None:
        """The head of the answer; raises what a status other than 200 means."""
        head = (await self._read(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = head[0].split()
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        try:
            status = int(words[1])
            self._length = int(headers.get("content-length", "0"))
        except (ValueError, IndexError):
            raise _nonsense("no HTTP") from None
        if self._length < 0:
            raise _nonsense("no HTTP")
        self._keep = headers.get("connection", "").lower() != "close" and not self.refused
        if status != 200:
            raise _failure(status, await self.read_all())

    async def read_all(self) -> bytes:
        pieces, size = [], 0
        async for piece in self.body():
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise _nonsense(f"more than {MAX_ANSWER_BYTES >> 20} MiB")
            pieces.append(piece)
        return b"".join(pieces)

    async def body(self) -> AsyncIterator[bytes]:
        """In pieces of bounded size: the other end is in the sandbox, and may say that it sends anything."""
        while self._chunked:
            try:
                size = int((await self._read(b"\r\n")).split(b";")[0], 16)
            except ValueError:
                raise _nonsense("no HTTP") from None
            if size < 0:
                raise _nonsense("no HTTP")
            last, left = not size, size
            while left:
                piece = await self._exactly(min(left, _CHUNK))
                left -= len(piece)
                yield piece
            await self._exactly(2)
            if last:
                break
        while self._length:
            piece = await self._exactly(min(self._length, _CHUNK))
            self._length -= len(piece)
            yield piece
        self._whole = True

    async def _read(self, end: bytes) -> bytes:
        assert self._streams is not None
        try:
            return await self._streams[0].readuntil(end)
        except asyncio.LimitOverrunError:
            raise _nonsense("no HTTP") from None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _broken(error) from error

    async def _exactly(self, size: int) -> bytes:
        assert self._streams is not None
        try:
            return await self._streams[0].readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise _broken(error) from error


def _broken(error: Exception) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"the connection to the action server ended before its answer ({type(error).__name__}); what was asked for "
        "may have happened",
        retryable=False,
    )


def _failure(status: int, body: bytes) -> Exception:
    try:
        said = str(sandbox_json.parse(body)["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = body.decode("utf-8", "replace")[:500]
    if status in (400, 405, 413, 431):
        return ValidationError(said)
    if status == 403:
        return AuthenticationError(f"the action server refuses: {said}")
    if status == 404:
        return SandboxFileNotFoundError(said)
    if status == 409:
        return Conflict(said)
    if status in (502, 503, 504):
        return SandboxUnavailableError(f"the way to the action server answers {status}: {said}")
    return SandboxError(f"the action server answers {status}: {said}")


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Any]]:
    held = bytearray()
    async for piece in pieces:
        seen = max(0, len(held) - 1)  # what was looked at is not looked at again
        held += piece
        while (at := held.find(b"\n\n", seen)) >= 0:
            name, _, data = bytes(held[:at]).partition(b"\n")
            del held[: at + 2]
            seen = 0
            yield (
                name.decode("utf-8", "replace").removeprefix("event: "),
                _dict(_parsed(data.removeprefix(b"data: "))),
            )
        if len(held) > MAX_ANSWER_BYTES:
            raise _nonsense(f"an event of more than {MAX_ANSWER_BYTES >> 20} MiB")


def _holds_data(reader: asyncio.StreamReader) -> bool:
    """Whether the other end has said something already, or has left."""
    return reader.at_eof() or bool(reader._buffer)  # type: ignore[attr-defined]  # no public way to look


def _parsed(data: bytes) -> Any:
    try:
        return sandbox_json.parse(data)
    except sandbox_json.TooLargeError as error:
        raise _nonsense(f"too much: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _nonsense(f"no JSON ({type(error).__name__})") from None


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _nonsense("not what was asked for")
    return value


def _nonsense(what: str) -> SandboxError:
    """What runs in the sandbox can take the server's place: its answers are as hostile as its programs."""
    return SandboxError(
        f"what answers on the action server's port in the sandbox says {what}; the server may have been replaced"
    )
