"""What a provider gives: a pair of byte streams to the program inside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from lowtide.errors import SandboxUnavailableError


class Channel(Protocol):
    """Bytes to the program and bytes from it, in order. It may break at any time and is opened anew then."""

    async def send(self, data: bytes) -> None:
        """Returns when more can be sent. Raises OSError (a LowtideError may be one) when it is broken."""
        ...

    async def receive(self) -> bytes:
        """The next bytes, or b"" at the end, which may be a break: nothing is lost by it."""
        ...

    def close(self) -> None:
        """Let go of it now. Silent when it is gone already."""
        ...


class Spent(EOFError):
    """Raised by `receive` of a channel that was one answer and no more: while nothing is under way, none is
    opened in its place, and the next command has a client of its own."""


class Asleep(SandboxUnavailableError):
    """Raised by an `Opener` whose sandbox is paused. A new client reports it to its caller. A client whose channel
    broke keeps trying for as long as the sandbox is paused, because its commands continue after the resume."""


class Answer:
    """Implements `Channel` over all that one request brought back."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    async def send(self, data: bytes) -> None:
        raise BrokenPipeError("an answer takes no more")

    async def receive(self) -> bytes:
        text, self._text = self._text, b""
        if not text:
            raise Spent
        return text

    def close(self) -> None:
        return None


Opener = Callable[[bytes], Awaitable[Channel]]
"""Starts or finds the program and sends it these first bytes. Where a service starts it by a request of its
own, they travel in that request, with the first command among them. Raises LowtideError."""
