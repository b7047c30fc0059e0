"""From a session's log back to the command's own bytes: base64 lines, and the marks between them."""

from __future__ import annotations

import base64
import binascii


class EncodedStream:
    """Text goes in as the log has it; out come the command's bytes, until the mark, and then the exit code."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._mark = mark.encode()
        self._line = ""
        self._held = b""
        self.taken = 0
        """How much of the log has been read, so that it can be read on after the connection broke."""
        self._skip = 0
        self.leader: int | None = None
        self.input_broken = False
        self.code: int | None = None

    def again(self) -> None:
        """The log comes from its beginning once more: drop what was already read of it."""
        self._skip = self.taken

    def feed(self, text: str) -> bytes:
        """What of it is the command's. After the mark nothing is: a background job may still write."""
        if self._skip:
            dropped = min(self._skip, len(text))
            self._skip -= dropped
            text = text[dropped:]
        self.taken += len(text)
        if self.code is not None:
            return b""
        *lines, self._line = (self._line + text).split("\n")
        found = []
        for line in lines:
            try:
                data = base64.b64decode(line, validate=True)
            except (binascii.Error, ValueError):
                continue  # not ours: what the daemon itself may say in between
            found.append(self._without_marks(data))
        return b"".join(found)

    def rest(self) -> bytes:
        """What was held back in case it became a mark."""
        held, self._held = self._held, b""
        return held

    def _without_marks(self, data: bytes) -> bytes:
        data, self._held = self._held + data, b""
        out = []
        while self.code is None:
            begin = data.find(self._mark)
            if begin < 0:
                keep = self._beginning(data)
                self._held = data[len(data) - keep :]
                out.append(data[: len(data) - keep])
                break
            said, end, after = data[begin + len(self._mark) :].partition(b";")
            if not end and len(said) < 12:
                self._held = data[begin:]
                out.append(data[:begin])
                break
            out.append(data[:begin])
            if not (end and self._understood(said)):
                out.append(self._mark)  # the command's own bytes after all
                after = data[begin + len(self._mark) :]
            data = after
        return b"".join(out)

    def _understood(self, said: bytes) -> bool:
        kind, number = said[:1], said[1:]
        if kind == b"=" and number.isdigit():
            self.code = int(number)
        elif kind == b"+" and number.isdigit():
            self.leader = int(number)
        elif said == b"!":
            self.input_broken = True
        else:
            return False
        return True

    def _beginning(self, data: bytes) -> int:
        """How many last bytes could be the beginning of the mark."""
        start = data.rfind(self._mark[:1], max(0, len(data) - len(self._mark) + 1))
        if start >= 0 and self._mark.startswith(data[start:]):
            return len(data) - start
        return 0
