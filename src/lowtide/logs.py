"""What a sandbox's main process prints, as a stream: what `Sandbox.stream_logs` gives."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from lowtide import capabilities
from lowtide.errors import SandboxError, SandboxFailedError, SandboxGone
from lowtide.operation import Operation
from lowtide.providers.base import Capability
from lowtide.providers.optional import Logs
from lowtide.stream import StreamReader

if TYPE_CHECKING:
    from lowtide.held_sandbox import HeldSandbox
    from lowtide.providers.base import Provider


def stream(life: HeldSandbox, *, follow: bool, tail_lines: int | None) -> StreamReader[str]:
    """Raises UnsupportedError where the provider keeps no log."""
    capabilities.require(life.connect(), Capability.LOGS, "stream_logs")
    reader: StreamReader[str] = StreamReader(text=True, on_close=lambda: reading.cancel())
    this = weakref.ref(reader)
    reading = Operation.start(_read(life, this, follow, tail_lines))
    # A loop over it that was cancelled or left has not closed it: then it is closed when nobody has it any more.
    weakref.finalize(reader, _give_up, reading).atexit = False
    return reader


def _give_up(reading: Operation[None]) -> None:
    with contextlib.suppress(SandboxError):  # in a forked child it is the parent's
        reading.cancel()


async def _read(
    life: HeldSandbox, this: weakref.ref[StreamReader[str]], follow: bool, tail_lines: int | None
) -> None:
    error: BaseException | None = None
    try:
        provider, sandbox_id = await _there(life)
        assert isinstance(provider, Logs)
        lines = provider.logs(sandbox_id, follow=follow, tail_lines=tail_lines)
        async with contextlib.aclosing(lines):  # type: ignore[type-var]
            async for data in lines:
                await _put(this, data)
    except Exception as failure:  # whatever it is: what was read is not all
        error = failure
    finally:
        reader = this()
        if reader is not None:
            reader.end(error)


async def _put(this: weakref.ref[StreamReader[str]], data: bytes) -> None:
    reader = this()
    if reader is not None:
        reader.put(data)
    while reader is not None and (room := reader.crowded()) is not None:
        del reader  # held by its user alone
        await room
        reader = this()


async def _there(life: HeldSandbox) -> tuple[Provider, str]:
    """Where it runs, or ran: a main command may end before anybody has seen that it runs."""
    try:
        return await life.ready()
    except (SandboxGone, SandboxFailedError):
        if life.info is None or life.report is not None:
            raise
        return life.connect(), life.info.sandbox_id
