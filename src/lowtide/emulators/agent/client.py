"""The emulator's end of a file agent: starts it, asks it, and believes nothing it says blindly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.emulators.backing import Backing
from lowtide.errors import SandboxUnavailableError
from lowtide.providers.base import STDOUT, ProcessHandle

_HEAD = struct.Struct(">III")
_LARGEST_FRAME = 64 << 20
PIECE = 1 << 20


class AgentError(Exception):
    """The agent refused: `kind` is an errno name (ENOENT) or one of its own words (invalid, exists…)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


_WATCH = "from lowtide.emulators.agent.inside_watch import Watch\n"


@cache
def _source() -> str:
    """One text of both parts, without their docstrings, which are for readers."""
    parts = [Path(__file__).with_name(f"{name}.py").read_text() for name in ("inside_watch", "inside")]
    watch, rest = (text.partition('"""')[2].partition('"""')[2].lstrip() for text in parts)
    return watch + rest.replace(_WATCH, "")


def agent_command() -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", _source())


class Agent:
    """One running agent: one sandbox, one user."""

    def __init__(self, handle: ProcessHandle, home: str) -> None:
        self._handle = handle
        self._home = home
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._events: dict[int, Callable[[list[dict[str, Any]]], None]] = {}
        self._sending = asyncio.Lock()
        self._asking: set[asyncio.Future[Any]] = set()
        self._reading = asyncio.create_task(self._read())
        self.ended = False

    @classmethod
    async def start(cls, backing: Backing, sandbox_id: str, *, user: str | None, home: str) -> Agent:
        handle = await backing.start(
            sandbox_id, agent_command(), user=user, cwd="/", environment={"HOME": home}, stdin=True
        )
        return cls(handle, home)

    async def ask(self, op: str, data: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        """One question, one answer. AgentError for a refusal, SandboxUnavailableError when it is gone.

        A caller may leave at any time, and the question goes on without it: the agent would take the next
        one for the rest of a frame that was half sent, and keep open what nobody heard of.
        """
        asking = asyncio.ensure_future(self._ask(op, data, **fields))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(self._take_back)
            raise

    def _take_back(self, asked: asyncio.Future[tuple[dict[str, Any], bytes]]) -> None:
        """Close what an answer opened that nobody waits for any more."""
        if asked.cancelled() or asked.exception() is not None or self.ended:
            return
        answer = asked.result()[0]
        for op, name in (("close", "handle"), ("unwatch", "watch")):
            if name in answer:
                closing = asyncio.ensure_future(self._ask(op, **{name: answer[name]}))
                self._asking.add(closing)
                closing.add_done_callback(self._asking.discard)
                closing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _ask(self, op: str, data: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        if self.ended:
            raise SandboxUnavailableError("the sandbox's file agent has ended")
        number = next(self._ids) & 0xFFFFFFFF
        text = json.dumps({"op": op, "home": self._home, **fields}).encode()
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        # The end of the agent is told to whoever asks, also when what was asked could not even be sent.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[number] = future
        try:
            async with self._sending:
                head = _HEAD.pack(len(text) + len(data), number, len(text))
                await self._handle.write_stdin(head + text + data if data else head + text)
            answer, found = await future
        except BrokenPipeError as error:
            raise SandboxUnavailableError("the sandbox's file agent has ended") from error
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise AgentError(str(answer["error"]), str(answer.get("message", "")))
        return answer, found

    async def read_file(self, path: str) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """What it is, and its pieces. Raises before the first piece when it cannot be read."""
        opened, first = await self.ask("open_read", path=path)

        async def pieces() -> AsyncIterator[bytes]:
            handle = opened["handle"]
            coming: asyncio.Task[tuple[dict[str, Any], bytes]] | None = None
            try:
                piece = first
                while piece:
                    # The next one is on its way while this one is passed on.
                    coming = asyncio.create_task(self.ask("read", handle=handle, length=PIECE))
                    yield piece
                    _, piece = await coming
            finally:
                if coming is not None:
                    coming.add_done_callback(lambda done: done.cancelled() or done.exception())
                    coming.cancel()
                with contextlib.suppress(AgentError, SandboxUnavailableError):
                    await asyncio.shield(self.ask("close", handle=handle))

        return opened, pieces()

    async def write_file(
        self,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        metadata: dict[str, str] | None = None,
        mode: int | None = None,
    ) -> dict[str, Any]:
        """Write it in place, as the service does. Returns its path and the metadata it now has."""
        opened: dict[str, Any] | None = None
        held = b""
        try:
            async for chunk in chunks:
                held = held + chunk if held else chunk
                if len(held) < PIECE:
                    continue
                opened = await self._push(opened, path, held)
                held = b""
            if held or opened is None:
                opened = await self._push(opened, path, held)
        except BaseException:
            if opened is not None:
                with contextlib.suppress(AgentError, SandboxUnavailableError):
                    await asyncio.shield(self.ask("close", handle=opened["handle"]))
            raise
        finished, _ = await self.ask("finish", handle=opened["handle"], metadata=metadata or {}, mode=mode)
        return {"path": opened["path"], "metadata": finished.get("metadata") or {}}

    async def _push(self, opened: dict[str, Any] | None, path: str, data: bytes) -> dict[str, Any]:
        if opened is None:
            opened, _ = await self.ask("open_write", data[:PIECE], path=path)
            data = data[PIECE:]
        for at in range(0, len(data), PIECE):
            await self.ask("write", data[at : at + PIECE], handle=opened["handle"])
        return opened

    async def watch(
        self, path: str, *, recursive: bool, entry: bool, on_events: Callable[[list[dict[str, Any]]], None]
    ) -> int:
        answer, _ = await self.ask("watch", path=path, recursive=recursive, entry=entry)
        number = int(answer["watch"])
        self._events[number] = on_events
        return number

    async def flush(self, number: int) -> None:
        """Wait until every event up to now has been delivered."""
        answer, _ = await self.ask("events", watch=number)
        self._deliver(number, answer.get("events"))

    async def unwatch(self, number: int) -> None:
        self._events.pop(number, None)
        with contextlib.suppress(AgentError, SandboxUnavailableError):
            await self.ask("unwatch", watch=number)

    async def aclose(self) -> None:
        self._reading.cancel()
        self._fail()
        await self._handle.aclose()

    async def _read(self) -> None:
        buffer = bytearray()
        try:
            async for stream, data in self._handle.output():
                if stream != STDOUT:
                    continue
                buffer += data
                while len(buffer) >= _HEAD.size:
                    size, number, length = _HEAD.unpack_from(buffer)
                    if size > _LARGEST_FRAME or length > size:
                        return  # not one of our frames: something in there got at the stream
                    if len(buffer) < _HEAD.size + size:
                        break
                    text = bytes(buffer[_HEAD.size : _HEAD.size + length])
                    rest = bytes(buffer[_HEAD.size + length : _HEAD.size + size])
                    del buffer[: _HEAD.size + size]
                    self._take(number, json.loads(text.decode("utf-8", "replace")), rest)
        except ValueError:
            return
        finally:
            self._fail()

    def _take(self, number: int, answer: Any, data: bytes) -> None:
        if not isinstance(answer, dict):
            raise ValueError("not an object")
        if number == 0:
            self._deliver(answer.get("watch"), answer.get("events"))
            return
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result((answer, data))

    def _deliver(self, number: Any, events: Any) -> None:
        deliver = self._events.get(number)
        if deliver is not None and isinstance(events, list) and events:
            deliver(events)

    def _fail(self) -> None:
        self.ended = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxUnavailableError("the sandbox's file agent has ended"))
