"""What a sandbox's main process prints, as a stream: what `Sandbox.stream_logs` gives."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from lowtide import capabilities
from lowtide.errors import SandboxFailedError, SandboxGone
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
    reading = Operation.start(_read(life, reader, follow, tail_lines))
    return reader


async def _read(life: HeldSandbox, reader: StreamReader[str], follow: bool, tail_lines: int | None) -> None:
    error: BaseException | None = None
    try:
        provider, sandbox_id = await _there(life)
        assert isinstance(provider, Logs)
        lines = provider.logs(sandbox_id, follow=follow, tail_lines=tail_lines)
        async with contextlib.aclosing(lines):  # type: ignore[type-var]
            async for data in lines:
                reader.put(data)
                await reader.room()
    except Exception as failure:  # whatever it is: what was read is not all
        error = failure
    finally:
        reader.end(error)


async def _there(life: HeldSandbox) -> tuple[Provider, str]:
    """Where it runs, or ran: a main command may end before anybody has seen that it runs."""
    try:
        return await life.ready()
    except (SandboxGone, SandboxFailedError):
        if life.info is None or life.report is not None:
            raise
        return life.connect(), life.info.sandbox_id
