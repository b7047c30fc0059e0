"""File-system snapshots: the content of one scratch volume, kept after its sandbox."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from lowtide.errors import RequestTimeoutError, SandboxError, UnsupportedError
from lowtide.providers.coreweave.access import messages
from lowtide.providers.coreweave.errors import SERVICE
from lowtide.providers.hosted import backoff
from lowtide.providers.hosted.grpc_calls import Connections, reason_of

_SECONDS = 30.0
_READY_SECONDS = 1800.0


async def take(connections: Connections, sandbox_id: str) -> str:
    """Returns its id when it is ready."""
    pb = messages()
    context: dict[str, Any] = {"provider": SERVICE.provider, "sandbox_id": sandbox_id}
    asked = pb.CreateFileSystemSnapshotRequest(sandbox_id=sandbox_id, request_id=str(uuid.uuid4()))
    try:
        made = await SERVICE.again(  # the same request, so that it is one snapshot
            lambda: connections.call("CreateFileSystemSnapshot", asked, _SECONDS, sandbox_id),
            "CreateFileSystemSnapshot",
            sandbox_id,
            seconds=_SECONDS + 10.0,
            patience=_SECONDS,
        )
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
    delays, deadline = backoff(0.02, 2.0), time.monotonic() + _READY_SECONDS
    while made.state != pb.SNAPSHOT_STATE_READY:
        if made.state == pb.SNAPSHOT_STATE_FAILED:
            raise SandboxError(
                f"CoreWeave could not take the snapshot: {made.state_reason[:200] or 'it does not say why'}",
                **context,
            )
        if time.monotonic() > deadline:
            raise RequestTimeoutError(
                f"the snapshot {asked.file_system_snapshot_id} is not ready after {_READY_SECONDS:g} s: it may still be; "
                "delete it where it is not wanted",
                **context,
            )
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
