"""The real Kubernetes node of the tests: where it is, the one reason for which its tests are skipped, its sandboxes."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pytest

from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers.base import (
    STDOUT,
    Labels,
    Network,
    NetworkMode,
    ProcessHandle,
    ProcessSpec,
    SandboxInfo,
    SandboxSpec,
)
from lowtide.providers.kubernetes import KubernetesProvider

IMAGE = os.environ.get("LOWTIDE_TEST_IMAGE", "lowtide-test:latest")


@cache
def missing() -> str | None:
    """Why there is no node to test on, None when there is one."""
    if not os.environ.get("KUBECONFIG"):
        return "no Kubernetes node: KUBECONFIG is not set (scripts/engines up kube)"
    from lowtide.errors import LowtideError
    from lowtide.providers.kubernetes.access import Access

    try:
        server = urlsplit(Access.resolve(os.environ, {}).server)
        socket.create_connection((server.hostname or "", server.port or 443), 5).close()
    except (LowtideError, OSError) as error:
        return f"no Kubernetes node: what KUBECONFIG names does not answer ({type(error).__name__})"
    return None


needs_node = [pytest.mark.engine, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

FULL = Network(mode=NetworkMode.INTERNET)


class Node:
    """A provider, and a way to make sandboxes that end with the test."""

    def __init__(self) -> None:
        self.provider = KubernetesProvider.connect(os.environ, {"image": IMAGE})
        self.mark = f"test-{secrets.token_hex(6)}"
        self._made: list[str] = []

    def spec(self, **changes: Any) -> SandboxSpec:
        labels = Labels(lease_id=new_lease_id(), ledger_id=self.mark, owner="tests")
        return SandboxSpec(**{"labels": labels, "lifetime_seconds": 600, "network": FULL, **changes})

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        info = await self.provider.create(spec)
        self._made.append(info.sandbox_id)
        return info

    async def ready(self, **changes: Any) -> str:
        info = await self.create(self.spec(**changes))
        return (await self.provider.wait_ready(info.sandbox_id)).sandbox_id

    async def run(
        self, sandbox_id: str, *argv: str, stdin: bytes | None = None, **more: Any
    ) -> tuple[int, bytes, bytes]:
        handle = await self.provider.start_process(
            sandbox_id, ProcessSpec(argv=argv, stdin=stdin is not None, **more)
        )
        feeding = asyncio.ensure_future(self._feed(handle, stdin))
        try:
            out, err = bytearray(), bytearray()
            async for stream, data in handle.output():
                (out if stream == STDOUT else err).extend(data)
            await feeding
            return await handle.wait(), bytes(out), bytes(err)
        finally:
            feeding.cancel()
            await handle.aclose()

    async def _feed(self, handle: ProcessHandle, stdin: bytes | None) -> None:
        if stdin is not None:
            await handle.write_stdin(stdin)
            await handle.close_stdin()

    async def kube(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The API server as somebody else would use it."""
        return await self.provider._api.request(method, path, body=body)

    async def aclose(self) -> None:
        await asyncio.gather(*(self.provider.destroy(one) for one in self._made))
        left = [info async for info in self.provider.list({"lowtide-ledger": self.mark})]
        await self.provider.aclose()
        assert left == []
