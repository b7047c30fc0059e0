"""Finding the shell's mark in a stream of the command's own bytes."""

from __future__ import annotations


class MarkedStream:
    """Bytes go in as they come; out come the command's own, until the mark, and then the exit code."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark + b"="
        self._held = b""
        self.code: int | None = None

    def feed(self, data: bytes) -> bytes:
        """What of it is the command's. After the mark nothing is: a background job may still write."""
        if self.code is not None:
            return b""
        if self._held:
            data, self._held = self._held + data, b""
        begin = data.find(self._mark)
        if begin >= 0:
            number, end, _ = data[begin + len(self._mark) :].partition(b";")
            if end and number.isdigit():
                self.code = int(number)
                return data[:begin]
            if not end and len(number) < 4:
                self._held = data[begin:]
                return data[:begin]
            return data  # not ours after all
        keep = self._beginning(data)
        if keep:
            self._held = data[-keep:]
            return data[:-keep]
        return data

    def rest(self) -> bytes:
        """What was held back in case it became the mark."""
        held, self._held = self._held, b""
        return held

    def _beginning(self, data: bytes) -> int:
        """How many last bytes could be the beginning of the mark."""
        start = data.rfind(self._mark[:1], max(0, len(data) - len(self._mark) + 1))
        if start >= 0 and self._mark.startswith(data[start:]):
            return len(data) - start
        return 0
