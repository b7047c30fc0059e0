"""`CoreWeaveProvider`: the seam's primitives on CoreWeave's sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import ClassVar

from lowtide.errors import LowtideError, SandboxNotFoundError, SandboxUnavailableError
from lowtide.providers import hosted
from lowtide.providers.base import (
    Capability,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.coreweave import create, destroy, lookup, snapshots
from lowtide.providers.coreweave.access import Access, connections, messages
from lowtide.providers.coreweave.channel import ExecChannel, open_channel
from lowtide.providers.coreweave.errors import SERVICE
from lowtide.providers.coreweave.options import CoreWeaveOptions
from lowtide.providers.hosted.grpc_calls import ALREADY_EXISTS, Connections, has_status
from lowtide.providers.inside import Clients
from lowtide.providers.inside.program import KEY

_CREATE_SECONDS = 45.0
_READY_SECONDS = 600.0  # an image may have to be pulled


class CoreWeaveProvider(hosted.Hosted):
    """One sandbox of CoreWeave per sandbox, with the program inside as its main process."""

    name: ClassVar[str] = "coreweave"
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        Capability.IMAGE,
        Capability.COMMAND,
        Capability.LOGS,
        Capability.USER,
        Capability.CPU_LIMIT,
        Capability.MEMORY_LIMIT,
        Capability.NETWORK_NONE,
        Capability.NETWORK_INTERNET,
        Capability.NETWORK_ALLOW,
        Capability.NETWORK_PORTS,  # of a name: 443 only
        Capability.GVISOR,
        Capability.SNAPSHOT,  # of one volume
        Capability.LIFETIME,
        Capability.RENEW,
    }
    traits: ClassVar[Traits] = Traits(
        own_threads=True,
        recovery=Recovery.REPLAY,
        create_window_seconds=60.0,  # the request is given up after 45 s
        max_lifetime_seconds=float(create.LONGEST_SECONDS),
        default_lifetime_seconds=float(create.LIFETIME_SECONDS),
    )
    options_type: ClassVar[type | None] = CoreWeaveOptions
    access_type = Access
    _access: Access

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connections: Connections | None = None
        self._made: set[str] = set()
        """Sandboxes this process made: known to be ours, and to have run, without asking."""
        self._alone: set[str] = set()
        """Those of them in which nothing but the program inside has run yet."""
        self._keys: dict[str, bytes] = {}
        self._share_tokens: dict[str, str] = {}
        super().__init__(Clients(self.name, self._open_channel, self._key))

    # -- connecting

    async def connections(self) -> Connections:
        """One set per event loop: a forked child or another loop gets its own."""
        found = self._connections
        if found is None or found.loop is not asyncio.get_running_loop():
            found = self._connections = connections(self._access)
            self.begin_calls(self.clients)
        return found

    async def aclose(self) -> None:
        self.end_calls()
        found, self._connections = self._connections, None
        if found is not None and found.loop is asyncio.get_running_loop():
            await found.aclose()

    # -- creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            request = create.request(spec, self._access)
            connections = await self.connections()
        tokens: dict[str, str] = {}

        async def make(seconds: float) -> SandboxInfo:
            box = await connections.call("CreateSandbox", request, seconds)
            if box.endpoint_share_token:
                tokens[box.sandbox_id] = box.endpoint_share_token
            return lookup.info(box)

        async def find() -> SandboxInfo | None:
            # The share token comes with the answer to a create alone: there the same request is sent again.
            return None if request.sandbox.spec.services else await self.find(spec)

        made = await hosted.recovered(
            make,
            find,
            self.get,
            service=SERVICE,
            labels=spec.labels,
            seconds=_CREATE_SECONDS,
            replay=True,
        )
        if made.sandbox_id in tokens:
            self._share_tokens[made.sandbox_id] = tokens[made.sandbox_id]
        self._made.add(made.sandbox_id)
        if spec.command is None:
            self._alone.add(made.sandbox_id)
        self._keys[made.sandbox_id] = self._access.inside_key(spec.lease_id)
        return made

    async def replay(self, spec: SandboxSpec) -> SandboxInfo | None:
        """Take the request's id: after this nothing can come of the request any more but what this returns."""
        connections = await self.connections()
        try:
            box = await connections.call(
                "CreateSandbox", create.tombstone(spec, self._access), _CREATE_SECONDS
            )
        except LowtideError as error:
            if has_status(error, ALREADY_EXISTS):
                # The request was taken: what it made shows, sooner or later.
                async for found in lookup.listed(connections, create.lease_tags(spec), ended=True):
                    return found
                return None
            if hosted.was_lost(error):
                raise
            return None  # no room, or not allowed: then only time is proof
        return lookup.of_lease(box, spec)

    # -- looking

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return await lookup.get(await self.connections(), sandbox_id)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        return await hosted.until_ready(
            lambda: self.get(sandbox_id), service=SERVICE, sandbox_id=sandbox_id, seconds=_READY_SECONDS
        )

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        async for found in lookup.listed(await self.connections(), create.tags_of(labels)):
            yield found

    async def explained(self, sandbox_id: str, error: LowtideError) -> LowtideError:
        """What an error of the way into a sandbox means."""
        return await hosted.explained(
            error, lambda: self._ended_is_gone(sandbox_id), service=SERVICE, sandbox_id=sandbox_id
        )

    async def _ended_is_gone(self, sandbox_id: str) -> SandboxInfo:
        found = await self.get(sandbox_id)
        if found.state.terminal:
            raise SERVICE.missing(sandbox_id)
        return found

    # -- ending

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        connections = await self.connections()
        self.forget_calls(sandbox_id, goodbye=False)
        running = sandbox_id in self._made
        if not running:
            try:
                await self.get(sandbox_id)  # never what lowtide has not made
            except SandboxNotFoundError:
                return False
        ended = await destroy.destroy(connections, sandbox_id, grace_seconds, running=running)
        self._made.discard(sandbox_id)
        self._alone.discard(sandbox_id)
        self._keys.pop(sandbox_id, None)
        self._share_tokens.pop(sandbox_id, None)
        return ended

    # -- the program inside

    async def _open_channel(self, sandbox_id: str, first: bytes) -> ExecChannel:
        return await open_channel(self, sandbox_id, first)

    def alone(self, sandbox_id: str) -> bool:
        """Whether nothing in it can look at what its first command is told. Not so any more after this."""
        alone = sandbox_id in self._alone
        self._alone.discard(sandbox_id)
        return alone

    async def _key(self, sandbox_id: str) -> bytes:
        """Known here, or as the service has it from the create call, or made from this account's own key."""
        known = self._keys.get(sandbox_id)
        if known is None:
            try:
                box = await lookup.message(await self.connections(), sandbox_id)
            except SandboxNotFoundError as error:
                raise SERVICE.gone(sandbox_id) from error
            lease_id = lookup.info(box).labels.get("lowtide-lease", "")
            known = self._access.inside_key(lease_id)
            for container in box.spec.containers:
                text = container.environment_variables.get(KEY, "")
                if len(text) == 32:
                    known = bytes.fromhex(text)
            self._keys[sandbox_id] = known
        return known

    # -- what CoreWeave does beyond the primitives

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """The program inside keeps the clock, as far as the fixed end allows."""
        info = await self.get(sandbox_id)
        if info.state.terminal:
            raise SERVICE.missing(sandbox_id)
        if info.state is not SandboxState.RUNNING:
            # It is there all the same: nobody may think that it is gone.
            words = f"the sandbox does not run: it is {info.state.value}"
            raise SERVICE.error(SandboxUnavailableError, words, sandbox_id)
        return await self.renew_inside(sandbox_id, lifetime_seconds)

    async def url(self, sandbox_id: str, port: int) -> Url:
        """A service's own address where the sandbox was made with one; else a way through the program inside."""
        box = await lookup.message(await self.connections(), sandbox_id)
        for service in box.status.services:
            if service.port == port and service.url:
                token = self._share_tokens.get(sandbox_id)
                return Url(url=service.url, headers={"X-Sandbox-Share-Token": token} if token else {})
        return await self.forwarded_url(sandbox_id, port)

    async def logs(self, sandbox_id: str, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
        # More lines than its field can count are all of them.
        lines = min(tail_lines or 0, 2**31 - 1)
        asked = messages().StreamLogsRequest(sandbox_id=sandbox_id, follow=follow, tail_lines=lines)
        silence = None if follow else lookup.SECONDS
        entries = (await self.connections()).entries("StreamLogs", asked, silence)
        try:
            async with contextlib.aclosing(entries):  # type: ignore[type-var]
                async for entry in entries:
                    if entry.HasField("error"):
                        words = f"the log broke off: {entry.error.message[:400]}"
                        raise SERVICE.error(SandboxUnavailableError, words, sandbox_id)
                    yield bytes(entry.data)
        except LowtideError as error:
            raise await self.explained(sandbox_id, error) from error.__cause__

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        return await snapshots.take(await self.connections(), sandbox_id)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await snapshots.delete(await self.connections(), snapshot_id)

    async def list_snapshots(self) -> Sequence[str]:
        return await snapshots.listed(await self.connections())
