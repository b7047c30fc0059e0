"""Daytona as a provider: one hosted sandbox each, made and ended through Daytona's async SDK."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Self

from lowtide import errors
from lowtide.providers import derived, hosted
from lowtide.providers.base import (
    LABEL_PREFIX,
    Capability,
    CodeResult,
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.daytona import changing, creation, looking, states
from lowtide.providers.daytona.access import Access
from lowtide.providers.daytona.boxes import Boxes
from lowtide.providers.daytona.client import Client
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import mapped, status_of, was_cut
from lowtide.providers.daytona.options import DaytonaOptions

log = logging.getLogger("lowtide.daytona")

CREATE_SECONDS = 60.0
_LEASE = LABEL_PREFIX + "lease"
_PREVIEW_HEADERS = {"X-Daytona-Skip-Preview-Warning": "true"}


class DaytonaProvider:
    """The primitives over Daytona's API. A sandbox id is Daytona's own; its name is the lease id."""

    name: ClassVar[str] = "daytona"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.IMAGE,
            Capability.STDIN,
            Capability.TTY,
            Capability.SIGNALS,
            Capability.CPU_LIMIT,
            Capability.MEMORY_LIMIT,
            Capability.DISK_LIMIT,
            Capability.NETWORK_NONE,
            Capability.NETWORK_FULL,
            Capability.NETWORK_ALLOW,
            Capability.PORTS,
            Capability.SNAPSHOT,
            Capability.PAUSE,
            Capability.LIFETIME,
            Capability.RENEW,
            Capability.CODE,
        }
    )
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME,
        # The name is taken before anything else is done for a sandbox, so what was asked for shows soon;
        # what comes later than this ends by its own lifetime, and a sweep finds it by its labels.
        create_window_seconds=15.0,
    )
    options_type: ClassVar[type | None] = DaytonaOptions

    def __init__(self, access: Access) -> None:
        self._access = access
        self._client = Client(access)
        self._boxes = Boxes(self._client)
        self._fresh: dict[str, SandboxInfo] = {}

    # Connection

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        access = Access.resolve(environ, options)
        if importlib.util.find_spec("daytona") is None:
            raise hosted.missing_dependency("daytona", "Daytona's SDK")
        return cls(access)

    @property
    def account(self) -> str:
        return self._access.account

    def credentials(self) -> dict[str, str]:
        return self._access.credentials()

    async def aclose(self) -> None:
        self._boxes.forget_all()
        self._fresh.clear()
        await self._client.aclose()

    # Lifecycle

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            sdk = await self._client.sdk()
            asked = creation.parameters(spec, self._access.snapshot)
        try:
            with mapped():
                # timeout=0: the SDK's own would be an alarm or a cancelled task; the bound is ours.
                made = await within(CREATE_SECONDS, sdk.create(asked, timeout=0), "create")
        except errors.LowtideError as error:
            found = await self._made_all_the_same(spec, error)
            if found is None:
                raise
            log.info("lease %s: the answer to create was lost; found %s", spec.lease_id, found.sandbox_id)
            return found
        info = states.info(made)
        self._boxes.remember(made, spec.working_dir)
        self._fresh[info.sandbox_id] = info
        return info

    async def _made_all_the_same(self, spec: SandboxSpec, error: errors.LowtideError) -> SandboxInfo | None:
        """A create that raised may have made it: its error says which, or its name does."""
        known = getattr(error.__cause__, "sandbox_id", None)
        if known is None and status_of(error.__cause__) != 409 and not was_cut(error):
            return None
        try:
            found = await self.get(known) if known is not None else await self.find(spec)
        except errors.LowtideError:
            return None
        if found is None or found.labels.get(_LEASE) != spec.lease_id or found.state.terminal:
            return None
        return found

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        try:
            found = await self.get(spec.lease_id)
        except errors.SandboxNotFoundError:
            return None
        return found if found.labels.get(_LEASE) == spec.lease_id else None

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """By id, or by name: Daytona takes both."""
        return await looking.info(self._client, sandbox_id)

    async def attach(self, *, labels: Mapping[str, str]) -> SandboxInfo:
        """The one sandbox with these labels, confirmed by its id. Missing is an error, and so is more than one."""
        return await looking.the_one(self._client, labels)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        fresh = self._fresh.pop(sandbox_id, None)
        if fresh is not None and fresh.state is SandboxState.RUNNING:
            return fresh
        return await looking.until_ready(self._client, sandbox_id)

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        async for info in looking.listed(self._client, labels):
            yield info

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        from lowtide.providers.daytona import endings

        if not looking.is_name(sandbox_id):
            return False
        self._fresh.pop(sandbox_id, None)
        self._boxes.forget(sandbox_id)
        return await endings.delete(await self._client.sdk(), sandbox_id)

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        return await changing.renew(self._boxes, sandbox_id, lifetime_seconds)

    # Stopping without deleting

    async def stop_only(self, sandbox_id: str, *, delete_after_seconds: float) -> None:
        """Stopped, and deleted by Daytona itself after that time: both clocks are set before it stops."""
        await changing.delete_after(self._boxes, sandbox_id, delete_after_seconds)
        await self.stop(sandbox_id)

    async def stop(self, sandbox_id: str) -> None:
        """Silent when it does not run."""
        await changing.stop(self._client, self._boxes, sandbox_id)

    async def start(self, sandbox_id: str) -> None:
        """From stopped, archived or paused; silent when it runs."""
        await changing.start(self._boxes, sandbox_id)

    async def archive(self, sandbox_id: str) -> None:
        """Its files go to object storage. It is stopped first; `start` brings it back."""
        await changing.archive(self._client, self._boxes, sandbox_id)

    async def pause(self, sandbox_id: str) -> None:
        await changing.pause(self._boxes, sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        await self.start(sandbox_id)

    # Commands

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        from lowtide.providers.daytona.process import DaytonaProcess
        from lowtide.providers.daytona.terminal import DaytonaTerminal

        async def explain(error: errors.LowtideError) -> errors.LowtideError:
            return await self._boxes.explained(error, sandbox_id)

        async with self._boxes.inside(sandbox_id) as box:
            with mapped(sandbox_id):
                if spec.tty is not None:
                    return await DaytonaTerminal.start(
                        box.sdk, spec, working_dir=box.working_dir, explain=explain
                    )
                return await DaytonaProcess.start(
                    box.sdk, box.sessions, spec, working_dir=box.working_dir, explain=explain
                )

    async def run_code(
        self, sandbox_id: str, code: str, *, language: str, context: str | None, timeout_seconds: float | None
    ) -> CodeResult:
        from lowtide.providers.daytona import code as interpreter

        async with self._boxes.inside(sandbox_id) as box:
            with mapped(sandbox_id):
                return await interpreter.run(
                    box.sdk, code, language=language, context=context, timeout_seconds=timeout_seconds
                )

    # Files and ports

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        from lowtide.providers.daytona import files

        if not _is_plain(path):
            async for chunk in derived.read_file(self, sandbox_id, path):
                yield chunk
            return
        async with (
            self._boxes.inside(sandbox_id) as box,
            contextlib.aclosing(files.read(box.sdk, path)) as chunks,  # type: ignore[type-var]
        ):
            async for chunk in chunks:
                yield chunk

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        from lowtide.providers.daytona import files

        if not _is_plain(path):
            return await derived.write_file(self, sandbox_id, path, chunks, mode=mode)
        async with self._boxes.inside(sandbox_id) as box:
            return await files.write(self, box.sdk, path, chunks, mode=mode)

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in derived.DerivedTrees(self).read_tree(sandbox_id, path):
            yield chunk

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        from lowtide.providers.daytona import files

        async with self._boxes.inside(sandbox_id) as box:
            await files.write_tree(self, box.sdk, path, chunks)

    async def url(self, sandbox_id: str, port: int) -> Url:
        async with self._boxes.inside(sandbox_id) as box:
            with mapped(sandbox_id):
                asking = box.sdk.get_preview_link(port)
                link = await within(looking.CALL_SECONDS, asking, "preview link", sandbox_id)
        headers = dict(_PREVIEW_HEADERS)
        if link.token:
            headers["X-Daytona-Preview-Token"] = link.token
        return Url(url=str(link.url).rstrip("/"), headers=headers)

    # Snapshots

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        from lowtide.providers.daytona import snapshots

        try:
            box = await self._boxes.get(sandbox_id)
        except errors.SandboxNotFoundError as error:
            raise looking.gone(sandbox_id) from error
        return await snapshots.take(await self._client.sdk(), box.sdk, name)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        from lowtide.providers.daytona import snapshots

        return await snapshots.delete(await self._client.sdk(), snapshot_id)

    async def list_snapshots(self) -> Sequence[str]:
        from lowtide.providers.daytona import snapshots

        return await snapshots.own(await self._client.sdk())


def _is_plain(path: str) -> bool:
    """Whether the transfer carries this name: it goes through a header, which takes printable ASCII only."""
    return path.isascii() and path.isprintable()
