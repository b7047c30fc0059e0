"""What the main process of a sandbox printed: kept with its time, followed, and read again from any offset."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.coreweave.model import stamp
from lowtide.providers.last_lines import last_lines

_KEPT = 16 << 20
_SESSIONS = 64


class Log:
    """Pieces with the time they came at. The oldest go when it gets too long."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.dropped = 0
        self.over = False
        self.news = asyncio.Event()
        self._size = 0
        self._sessions: dict[str, tuple[int, bytes, bool]] = {}
        """Of each stream: the piece it began at, what stood before that, and whether it has timestamps."""

    def add(self, when: float, data: bytes) -> None:
        self.pieces.append((when, data))
        self._size += len(data)
        while self._size > _KEPT:
            self._size -= len(self.pieces.pop(0)[1])
            self.dropped += 1
        self._wake()

    def end(self) -> None:
        self.over = True
        self._wake()

    def _wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    async def stream(self, request: Any, cut: asyncio.Event) -> AsyncIterator[Any]:
        """The answers to one StreamLogs call. Offsets count the bytes of a session from its own start."""
        resumed = request.resume_log_session_id
        if resumed and resumed not in self._sessions:
            yield _error("SESSION_NOT_FOUND", f"there is no log session {resumed}")
            return
        if resumed:
            session, (at, before, stamped) = resumed, self._sessions[resumed]
        else:
            session, stamped = secrets.token_hex(12), request.timestamps
            at, before = self._start(request)
            self._sessions[session] = at, before, stamped
            while len(self._sessions) > _SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        if at < self.dropped:
            yield _error("REPLAY_GAP", "what the session began with is not kept any more")
            return
        skip, offset = (request.resume_log_offset if resumed else 0), 0
        fresh = True
        when, data = self.pieces[-1][0] if self.pieces else 0.0, before
        while True:
            if data:
                data, fresh = _stamped(when, data, fresh) if stamped else (data, fresh)
                offset += len(data)
                if offset > skip:
                    part = data[-(offset - skip) :] if offset - skip < len(data) else data
                    entry = pb.LogEntry(data=part, log_session_id=session, next_log_offset=offset)
                    stamp(entry.timestamp, when)
                    yield entry
                    skip = offset
                data = b""
            news = self.news
            if at - self.dropped < len(self.pieces):
                if at < self.dropped:
                    yield _error("REPLAY_GAP", "the reader is too slow")
                    return
                when, data = self.pieces[at - self.dropped]
                at += 1
                continue
            if skip > offset:
                yield _error("INVALID_RESUME_OFFSET", "the session has not come that far")
                return
            if self.over or not request.follow or cut.is_set():
                return
            await news.wait()

    def _start(self, request: Any) -> tuple[int, bytes]:
        """The piece to begin at, and what of the ones before it is meant."""
        first = self.dropped
        if request.HasField("since_time"):
            since = request.since_time.ToMicroseconds() / 1_000_000
            while first - self.dropped < len(self.pieces) and self.pieces[first - self.dropped][0] < since:
                first += 1
        if request.tail_lines <= 0:
            return first, b""
        printed = b"".join(data for _, data in self.pieces[first - self.dropped :])
        return self.dropped + len(self.pieces), last_lines(printed, request.tail_lines, cut=False)


def _stamped(when: float, data: bytes, fresh: bool) -> tuple[bytes, bool]:
    mark = datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z").encode() + b" "
    ended = data.endswith(b"\n")
    lines = data.removesuffix(b"\n").replace(b"\n", b"\n" + mark) + b"\n" * ended
    return (mark if fresh else b"") + lines, ended


def _error(code: str, message: str) -> Any:
    return pb.LogEntry(error=pb.LogStreamError(code=code, message=message))
