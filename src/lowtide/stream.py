"""Streams: bytes and text that come out of a sandbox, and bytes that go in, for any thread or loop."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from lowtide import loops, threads
from lowtide.arguments import content
from lowtide.errors import SandboxError
from lowtide.operation import Operation, generation, refuse_to_block

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T", str, bytes)

_HIGH_WATER = 4 << 20
_NOTHING_YET = object()
_END = object()


class StreamReader(Generic[T]):
    """What a command prints, in chunks as they come: ``for chunk in reader`` or ``async for``.

    A chunk is not a line; `lines` gives those. Text is decoded as UTF-8 across chunk borders; a byte that is no UTF-8
    becomes U+FFFD. An error of the sandbox is raised where the stream breaks off.
    """

    def __init__(
        self,
        *,
        text: bool,
        on_close: Callable[[], object] | None = None,
        on_raise: Callable[[], object] | None = None,
    ) -> None:
        self._chunks: deque[bytes] = deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if text else None
        self._on_close = on_close
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self._buffered = 0
        self._on_raise = on_raise
        self.wanted = False
        """Whether anybody has begun to read."""
        self._lock = threads.Lock()
        self._waiting: list[Callable[[], object]] = []
        self._room: asyncio.Future[None] | None = None
        self._generation = generation()
        self._held: _Held[T] = _Held()

    def __iter__(self) -> StreamReader[T]:
        return self

    def __next__(self) -> T:
        return self._held.all() or self._next()

    def _next(self) -> T:
        while (piece := self._take()) is _NOTHING_YET:
            refuse_to_block()
            arrived = threads.Event()
            self._wake_with(arrived.set)
            arrived.wait()
        if piece is _END:
            raise StopIteration
        return cast("T", piece)

    def __aiter__(self) -> StreamReader[T]:
        return self

    async def __anext__(self) -> T:
        return self._held.all() or await self._anext()

    async def _anext(self) -> T:
        while (piece := self._take()) is _NOTHING_YET:
            await self._arrival()
        if piece is _END:
            raise StopAsyncIteration
        return cast("T", piece)

    def lines(self) -> Lines[T]:
        """Whole lines, each with its end: ``for line in process.stdout.lines()`` or ``async for``.

        A line ends at ``\\n``; the last one may have no end. Asked for again, it goes on where the lines before left off,
        and so does the stream itself.
        """
        return Lines(self)

    def close(self) -> None:
        """Read no further. A command goes on; a file transfer ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._ended = True
            self._chunks.clear()
            self._buffered = 0
            self._wake()
        if self._on_close is not None:
            self._on_close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be pickled: read it here and pass on what it brings")

    # The engine's side.

    @property
    def buffered(self) -> int:
        """Bytes that have come and nobody has taken."""
        return self._buffered

    def put(self, data: bytes) -> None:
        """More has come."""
        with self._lock:
            if self._closed or not data:
                return
            self._chunks.append(data)
            self._buffered += len(data)
            if self._waiting:
                self._wake()

    async def room(self) -> None:
        """Wait until the reader has caught up. Without it, memory is not bounded."""
        while (room := self.crowded()) is not None:
            await room

    def crowded(self) -> asyncio.Future[None] | None:
        """What to wait for before more is put, for who must not hold the reader meanwhile; None: there is room."""
        import asyncio

        if self._buffered <= _HIGH_WATER:
            return None
        with self._lock:
            if self._buffered <= _HIGH_WATER:
                return None
            self._room = asyncio.get_running_loop().create_future()
            return self._room

    def end(self, error: BaseException | None = None) -> None:
        """No more will come; `error` is raised when what has come is read."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._error = error
            self._wake()

    # Both sides.

    def _take(self) -> object:
        if self._generation != generation():
            raise SandboxError("this stream was opened before os.fork() and belongs to the parent process")
        self.wanted = True
        with self._lock:
            while self._chunks:
                data = self._chunks.popleft()
                self._buffered -= len(data)
                if self._room is not None and self._buffered <= _HIGH_WATER // 2:
                    self._make_room()
                piece = self._decoder.decode(data) if self._decoder else data
                if piece:
                    return piece
            if not self._ended:
                return _NOTHING_YET
            if self._closed:
                return _END
            if self._decoder and (rest := self._decoder.decode(b"", final=True)):
                self._decoder.reset()
                return rest
            if self._error is not None:
                if self._on_raise is not None:
                    self._on_raise()
                raise self._error
            return _END

    def _wake_with(self, wake: Callable[[], object]) -> None:
        with self._lock:
            if self._chunks or self._ended:
                wake()
            else:
                self._waiting.append(wake)

    async def _arrival(self) -> None:
        wake, arrived = loops.event()
        self._wake_with(wake)
        await arrived()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()
        if self._ended and self._room is not None:
            self._make_room()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.get_loop().call_soon_threadsafe(_tell, room)


class Lines(Generic[T]):
    """The lines of a `StreamReader`."""

    def __init__(self, reader: StreamReader[T]) -> None:
        self._reader: StreamReader[T] = reader

    def __iter__(self) -> Lines[T]:
        return self

    def __next__(self) -> T:
        held = self._reader._held
        while (line := held.line()) is None:
            try:
                held.take(self._reader._next())
            except Exception:  # its end too
                if not self._last_line():
                    raise
        return line

    def __aiter__(self) -> Lines[T]:
        return self

    async def __anext__(self) -> T:
        held = self._reader._held
        while (line := held.line()) is None:
            try:
                held.take(await self._reader._anext())
            except Exception:
                if not self._last_line():
                    raise
        return line

    def _last_line(self) -> bool:
        """Whether there is one without its end, to be given out before an error is raised."""
        return self._reader._ended and self._reader._held.end_line()


class _Held(Generic[T]):
    """What was taken from a stream for its lines and not given out yet. The stream has it: a loop over lines may be left."""

    def __init__(self) -> None:
        self._lock = threads.Lock()
        self._ready: deque[T] = deque()
        self._rest: list[T] = []  # pieces of a line whose end has not come: joined once

    def line(self) -> T | None:
        with self._lock:
            return self._ready.popleft() if self._ready else None

    def all(self) -> T | None:
        if not self._ready and not self._rest:
            return None
        with self._lock:
            self._rest[:0] = self._ready
            self._ready.clear()
            return self._joined() if self._rest else None

    def take(self, chunk: T) -> None:
        end: Any = "\n" if isinstance(chunk, str) else b"\n"
        pieces: list[Any] = list(chunk.split(end))
        with self._lock:
            for piece in pieces[:-1]:
                self._rest.append(piece + end)
                self._ready.append(self._joined())
            if pieces[-1]:
                self._rest.append(pieces[-1])

    def end_line(self) -> bool:
        with self._lock:
            if self._rest:
                self._ready.append(self._joined())
            return bool(self._ready)

    def _joined(self) -> T:
        pieces, self._rest = self._rest, []
        return pieces[0] if len(pieces) == 1 else pieces[0][:0].join(pieces)


def _tell(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class StreamWriter:
    """The standard input of a command. Writes happen in the order they were made."""

    def __init__(
        self, write: Callable[[bytes], Awaitable[None]], close: Callable[[], Awaitable[None]]
    ) -> None:
        self._write = write
        self._close = close
        self._turn: asyncio.Lock | None = None

    def write(self, data: bytes | str) -> Operation[None]:
        """Done when the sandbox has taken it. BrokenPipeError when the command reads no more."""
        payload = content("data", data)
        return Operation.start(self._in_turn(lambda: self._write(payload)))

    def writeline(self, text: str) -> Operation[None]:
        """`write`, with a line's end."""
        return self.write(content("text", text) + b"\n")

    def close(self) -> Operation[None]:
        """The command sees the end of its input. Silent when it has already ended."""
        return Operation.start(self._in_turn(self._close))

    async def _in_turn(self, act: Callable[[], Awaitable[None]]) -> None:
        import asyncio

        if self._turn is None:  # made on the engine's loop, where all of this runs
            self._turn = asyncio.Lock()
        async with self._turn:
            await act()


async def pump(chunks: AsyncIterable[bytes], stream: StreamReader[bytes]) -> int:
    """All of them into the stream, never further ahead than its reader follows; how many bytes."""
    count = 0
    async for chunk in chunks:
        count += len(chunk)
        stream.put(chunk)
        await stream.room()
    return count
