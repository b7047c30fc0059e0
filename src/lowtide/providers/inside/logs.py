"""What the main command printed last, as the program inside keeps it (`guard log`)."""

from __future__ import annotations

from collections.abc import AsyncIterator

from lowtide.errors import SandboxUnavailableError
from lowtide.providers.base import STDERR
from lowtide.providers.inside import frames
from lowtide.providers.inside.client import Client
from lowtide.providers.last_lines import last_lines


async def read(client: Client, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
    """Whole lines are missing, and nothing else, where it printed more than is kept before it was read."""
    so_far: bytearray | None = bytearray()
    cut, whole = False, True
    async with client.log(follow=follow) as process:
        while (chunk := await process.next()) is not None:
            stream, data = chunk
            if stream == STDERR and data == frames.SO_FAR and so_far is not None:
                printed, so_far = last_lines(bytes(so_far), tail_lines, cut=cut), None
                cut, whole = False, printed.endswith(b"\n")
                yield printed
            elif stream == STDERR:
                cut = True
                if so_far is not None:
                    so_far.clear()
                elif not whole:
                    yield b"\n"
                    whole = True
            elif so_far is not None:
                so_far += data
                if len(so_far) > 2 * frames.LOG_KEPT:
                    raise SandboxUnavailableError(
                        "what answers in the sandbox is not lowtide's program: a log that is too long",
                        provider=client.provider,
                        sandbox_id=client.sandbox_id,
                        retryable=False,
                    )
            elif not cut or b"\n" in data:
                data = last_lines(data, None, cut=cut)
                cut, whole = False, data.endswith(b"\n") if data else whole
                yield data
    if so_far is not None:
        yield last_lines(bytes(so_far), tail_lines, cut=cut)
