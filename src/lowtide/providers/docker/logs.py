"""What a container's main process prints, as the engine keeps it: the last ten megabytes.

A last line that does not end is lost by the engine now and then, when the container ends with it. Podman stops
to follow when it removes the log of a container that ended, so what was printed last may not come.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider

_HEAD = struct.Struct(">BxxxL")


async def read(
    provider: DockerProvider, sandbox_id: str, *, follow: bool, tail_lines: int | None
) -> AsyncIterator[bytes]:
    import aiohttp

    await provider.get(sandbox_id)  # ours, and there
    client = await provider.client()
    params = {"stdout": "1", "stderr": "1", "follow": "1" if follow else "0"}
    params["tail"] = str(tail_lines) if tail_lines is not None else "all"
    quiet = aiohttp.ClientTimeout(total=None, sock_connect=10)  # nobody knows when it prints again
    with client.translated(sandbox_id):
        path = f"containers/{sandbox_id}/logs"
        async with client.stream("GET", path, params=params, timeout=quiet) as answer:
            head, left = b"", 0  # of the frame that is being read
            async for data, _ in answer.content.iter_chunks():
                while data:
                    if left:
                        piece, data = data[:left], data[left:]
                        left -= len(piece)
                        yield piece
                        continue
                    missing = _HEAD.size - len(head)
                    head, data = head + data[:missing], data[missing:]
                    if len(head) == _HEAD.size:
                        head, left = b"", _HEAD.unpack(head)[1]
