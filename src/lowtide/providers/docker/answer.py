"""What our program in the container answers to a call: a line, then bytes."""

from __future__ import annotations

from lowtide.errors import SandboxUnavailableError
from lowtide.providers.docker.channel import ChannelProcess
from lowtide.providers.docker.client import RawStream
from lowtide.providers.docker.faults import file_error


class Answer:
    """What a file call inside says: a line, then bytes."""

    def __init__(self, stream: RawStream | ChannelProcess, path: str, sandbox_id: str) -> None:
        self._stream, self._path, self._sandbox_id = stream, path, sandbox_id
        self._rest = b""
        self._noise = b""

    async def piece(self) -> bytes:
        """The next bytes of standard output; b"" at the end."""
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        while (chunk := await self._stream.next()) is not None:
            if chunk[0] == 1:
                return chunk[1]
            self._noise += chunk[1][:400]
        return b""

    async def line(self) -> list[str]:
        data = b""
        while b"\n" not in data:
            more = await self.piece()
            if not more or len(data) > 400:
                raise self.cut_short(data)
            data += more
        line, _, self._rest = data.partition(b"\n")
        words = line.decode("utf-8", "replace").split()
        if not words or words[0] not in ("ok", "done", "error"):
            raise self.cut_short(data)
        return words

    async def expect(self, word: str) -> list[str]:
        words = await self.line()
        if words[0] == "error":
            raise file_error(int(words[1]), self._path, self._sandbox_id)
        if words[0] != word:
            raise self.cut_short(" ".join(words).encode())
        return words

    def cut_short(self, said: bytes = b"") -> SandboxUnavailableError:
        words = (said + self._noise)[:400].decode("utf-8", "replace").strip()
        return SandboxUnavailableError(
            f"{self._path}: the file call was cut short{': ' + words if words else ''}",
            provider="docker",
            sandbox_id=self._sandbox_id,
        )
