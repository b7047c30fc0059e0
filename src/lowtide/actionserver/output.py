"""Output in bounded memory: the beginning and the end are kept, what is between is counted."""

from __future__ import annotations

import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEAD_BYTES = 64 << 10
TAIL_BYTES = 256 << 10
WAITING_BYTES = 32 << 20
_PIECE = 1 << 20


class HeadTail:
    """Takes bytes for ever, holds at most about `head` + 2 × `tail` of them."""

    def __init__(self, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._head_limit, self._tail_limit = head, tail
        self._head = bytearray()
        self._tail = bytearray()
        self._forgotten = 0

    def append(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        if room > 0 and not self._tail:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        if len(data) >= self._tail_limit:
            self._forgotten += len(self._tail) + len(data) - self._tail_limit
            self._tail = bytearray(data[len(data) - self._tail_limit :])
            return
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit:  # trimmed seldom, so that each byte moves about once
            self._trim()

    def drop_end(self, end: bytes) -> None:
        """Leave these last bytes out, if they are the last ones."""
        part = self._tail or self._head
        if part.endswith(end):
            del part[len(part) - len(end) :]

    def __bool__(self) -> bool:
        return bool(self._head)

    def take(self) -> tuple[bytes, int, bytes]:
        """(beginning, how many bytes are left out, end), and start anew. Whole lines where there are any."""
        if len(self._tail) > self._tail_limit:
            self._trim()
        head, tail, dropped = bytes(self._head), bytes(self._tail), self._forgotten
        self._head, self._tail, self._forgotten = bytearray(), bytearray(), 0
        if not dropped:
            return head + tail, 0, b""
        cut = head.rfind(b"\n") + 1
        if cut:
            dropped += len(head) - cut
            head = head[:cut]
        begin = tail.find(b"\n") + 1
        if 0 < begin < len(tail):
            dropped += begin
            tail = tail[begin:]
        return head, dropped, tail

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_limit
        self._forgotten += excess
        del self._tail[:excess]


class Pieces:
    """Output on its way to a listener, and at last an end: what a slow listener has not taken is bounded."""

    def __init__(self, limit: int = WAITING_BYTES) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._held = bytearray()
        self._left_out = 0
        self._stopped = False
        self._end: Any = None

    def put(self, data: bytes) -> None:
        """Never waits: whoever has it holds a lock that commands need."""
        with self._changed:
            if self._stopped:
                return
            room = self._limit - len(self._held) if not self._left_out else 0
            self._held += data[: max(0, room)]
            self._left_out += len(data) - max(0, min(room, len(data)))
            self._changed.notify()

    def end(self, item: Any) -> None:
        with self._changed:
            self._end = item
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped, self._held = True, bytearray()

    def get(self) -> Any:
        """Bytes, as many as there are up to a bound; the end when there are no more."""
        with self._changed:
            while not self._held and self._end is None:
                self._changed.wait()
            if not self._held:
                return self._end
            data = bytes(self._held[:_PIECE])
            del self._held[:_PIECE]
            if self._left_out and not self._held:
                data += b"\n[... %d bytes of output left out here ...]\n" % self._left_out
                self._left_out = 0
            return data


def text(taken: tuple[bytes, int, bytes]) -> str:
    """What people read: with a line that says how much is left out."""
    head, dropped, tail = taken
    begin = head.decode("utf-8", "replace")
    if not dropped:
        return begin
    return f"{begin}[... {dropped} bytes of output left out here ...]\n{tail.decode('utf-8', 'replace')}"
