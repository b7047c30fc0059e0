"""The way out of a sandbox that has an allow-list: its proxy, started after it and ended with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from lowtide.providers.local import files
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory
from lowtide.providers.network import start
from lowtide.providers.network.names import RESOLVER_FILE


async def open_way(
    directory: SandboxDirectory, inner: ProcessMark, allow: tuple[str, ...], inside: files.Caller
) -> None:
    """Serve its network. The proxy ends by itself with `inner`, and is written down so that a destroy can be sure."""
    served = await start.start("local", directory.sandbox_id, inner.pid, inner.start_time, allow)
    with contextlib.suppress(FileNotFoundError):  # destroyed meanwhile: the caller looks
        directory.set_proxy(ProcessMark(served.pid, served.start_time))
    await files.write_file(inside, "/etc/resolv.conf", _once(RESOLVER_FILE), 0o644)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
