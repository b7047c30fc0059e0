"""What the main command printed: from the program inside while it runs, from Modal's own log when it has ended.

Not from Modal's alone: its SDK reads that to the end and decodes it strictly, and does not say where it stands now.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from lowtide.errors import SandboxFailedError, SandboxGone, SandboxUnavailableError
from lowtide.providers.inside import logs
from lowtide.providers.inside.client import Client
from lowtide.providers.inside.frames import LOG_KEPT
from lowtide.providers.last_lines import last_lines
from lowtide.providers.modal.errors import PROVIDER, SERVICE

ENDED = (SandboxGone, SandboxFailedError)
_SECONDS = 60.0


async def running(client: Client, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
    """That it has ended is an error only before its first bytes: later, it has printed what it had to."""
    begun = False
    try:
        reading = logs.read(client, follow=follow, tail_lines=tail_lines)
        async with contextlib.aclosing(reading):  # type: ignore[type-var]
            async for data in reading:
                begun = begun or bool(data)
                yield data
    except ENDED:
        if not begun:
            raise


async def ended(sandbox: Any, sandbox_id: str, *, tail_lines: int | None) -> bytes:
    """Of each stream as much as is kept of both while it runs. The SDK reads a log once for each of its objects."""
    printed = b""
    for stream in (sandbox.stdout, sandbox.stderr):
        try:  # whole: as an iterator it goes from thread to thread for each line
            text = await SERVICE.call(_SECONDS, stream.read.aio(), "logs", sandbox_id)
        except UnicodeDecodeError as error:
            raise SandboxUnavailableError(
                "the main command printed what is no UTF-8, which Modal's SDK does not read: read the log while it runs",
                provider=PROVIDER,
                sandbox_id=sandbox_id,
                retryable=False,
            ) from error
        printed += last_lines(text[-LOG_KEPT:].encode(), None, cut=len(text) > LOG_KEPT)
    return last_lines(printed, tail_lines, cut=False)
