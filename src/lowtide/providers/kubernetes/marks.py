"""Finding our marks in a stream of somebody else's bytes."""

from __future__ import annotations

_LONGEST_MARK = 32


class MarkedStream:
    """Takes the marks (``mark`` + text + ``;``) out of a stream and holds back only what may become one."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._held = b""

    def feed(self, data: bytes) -> tuple[bytes, list[str]]:
        """The command's own bytes, and the texts of the marks that were among them."""
        buffer = self._held + data if self._held else data
        clean: list[bytes] = []
        found: list[str] = []
        start = 0
        while True:
            at = buffer.find(self._mark, start)
            if at < 0:
                break
            begin = at + len(self._mark)
            end = buffer.find(b";", begin, begin + _LONGEST_MARK)
            if end < 0:
                if len(buffer) - begin < _LONGEST_MARK:
                    clean.append(buffer[start:at])
                    self._held = buffer[at:]
                    return b"".join(clean), found
                # Too long for one of ours: the command's own bytes after all.
                clean.append(buffer[start:begin])
                start = begin
                continue
            clean.append(buffer[start:at])
            found.append(buffer[begin:end].decode("ascii", "replace"))
            start = end + 1
        keep = self._possible_beginning(buffer, start)
        clean.append(buffer[start : len(buffer) - keep])
        self._held = buffer[len(buffer) - keep :] if keep else b""
        return b"".join(clean), found

    def rest(self) -> bytes:
        """What was held back, once it is certain that no more comes."""
        held, self._held = self._held, b""
        return held

    def _possible_beginning(self, buffer: bytes, start: int) -> int:
        at = buffer.rfind(self._mark[:1], max(start, len(buffer) - len(self._mark) + 1))
        return len(buffer) - at if at >= 0 and self._mark.startswith(buffer[at:]) else 0
