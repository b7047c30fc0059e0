"""File-system snapshots: the content of one scratch volume, kept after its sandbox."""

from __future__ import annotations

import asyncio
from typing import Any

from lowtide.errors import SandboxError, UnsupportedError
from lowtide.providers.coreweave.access import messages
from lowtide.providers.coreweave.errors import SERVICE
from lowtide.providers.hosted import backoff
from lowtide.providers.hosted.grpc_calls import Connections, reason_of

_SECONDS = 30.0


async def take(connections: Connections, sandbox_id: str) -> str:
    """Returns its id when it is ready, however long that takes: the caller has the deadline."""
    pb = messages()
    context: dict[str, Any] = {"provider": SERVICE.provider, "sandbox_id": sandbox_id}
    asked = pb.CreateFileSystemSnapshotRequest(sandbox_id=sandbox_id)
    try:
        made = await connections.call("CreateFileSystemSnapshot", asked, _SECONDS, sandbox_id)
    except SandboxError as error:
        if reason_of(error) != "CWSANDBOX_FSS_NOT_SUPPORTED":
            raise
        raise UnsupportedError(
            "this sandbox has no scratch volume, and CoreWeave's snapshots are of one",
            feature="snapshot",
            alternative='create it with provider_options={"file_system_snapshot": {"mount_path": "/workspace"}}',
            **context,
        ) from error
    asked = pb.GetFileSystemSnapshotRequest(file_system_snapshot_id=made.file_system_snapshot_id)
    delays = backoff(0.02, 2.0)
    while made.state != pb.SNAPSHOT_STATE_READY:
        if made.state == pb.SNAPSHOT_STATE_FAILED:
            raise SandboxError("CoreWeave could not take the snapshot", **context)
        await asyncio.sleep(next(delays))
        made = await connections.call("GetFileSystemSnapshot", asked, _SECONDS, sandbox_id)
    return str(made.file_system_snapshot_id)


async def delete(connections: Connections, snapshot_id: str) -> bool:
    """Whether it was there."""
    asked = messages().DeleteFileSystemSnapshotRequest(
        file_system_snapshot_id=snapshot_id, allow_missing=True
    )
    answer = await connections.call("DeleteFileSystemSnapshot", asked, _SECONDS)
    return bool(answer.file_system_snapshot_id)


async def listed(connections: Connections) -> list[str]:
    asked = messages().ListFileSystemSnapshotsRequest(page_size=100)
    rows = connections.pages("ListFileSystemSnapshots", asked, "file_system_snapshots", _SECONDS)
    return [one.file_system_snapshot_id async for one in rows]
