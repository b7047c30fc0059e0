"""`RunloopProvider`: the seam's primitives on Runloop's devboxes."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from lowtide import errors
from lowtide.in_thread import in_thread
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
from lowtide.providers.hosted.transfer import BulkFiles, Counted
from lowtide.providers.inside import Clients
from lowtide.providers.inside.program import new_key
from lowtide.providers.runloop import create, destroy, lookup, snapshots
from lowtide.providers.runloop.access import PROVIDER, Access
from lowtide.providers.runloop.channel import Door, ExecutionChannel, open_channel
from lowtide.providers.runloop.errors import SERVICE
from lowtide.providers.runloop.options import RunloopOptions

if TYPE_CHECKING:
    from runloop_api_client import AsyncRunloop

_READY_SECONDS = 600.0
_GOODBYE_SECONDS = 2.0
_SEND_SECONDS = 3600.0
_AMBIGUOUS = (errors.SandboxError, errors.ValidationError)
"""What the way in may say of a sandbox that has ended or sleeps."""


class RunloopProvider(BulkFiles, hosted.Hosted):
    """One devbox per sandbox. The sandbox id is Runloop's own; its name is the lease id."""

    name: ClassVar[str] = PROVIDER
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        Capability.NETWORK_INTERNET,
        *(Capability.SNAPSHOT, Capability.PAUSE, Capability.LIFETIME, Capability.RENEW),
    }
    traits: ClassVar[Traits] = Traits(
        # Not REPLAY, although every create has its key: that the service knows it again is not promised.
        recovery=Recovery.BY_LABEL,
        create_window_seconds=60.0,  # the request is given up after 45 s
        max_lifetime_seconds=172_800.0,
    )
    options_type: ClassVar[type | None] = RunloopOptions
    access_type = Access
    _access: Access

    def __init__(self, access: Access) -> None:
        self._access = access
        self._client: AsyncRunloop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keys: dict[str, bytes] = {}
        self._doors: dict[str, Door] = {}
        self._lifetimes: dict[str, float] = {}
        self._ours: set[str] = set()
        """Made by this process, and not known to have ended."""
        self._channels: dict[str, set[ExecutionChannel]] = {}
        super().__init__(Clients(PROVIDER, self._open_channel, self._key, text=True))

    # -- connecting

    def client(self) -> AsyncRunloop:
        """One per event loop: a forked child or another loop gets its own."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client, self._loop = self._access.client(), loop
            self._channels = {}
            self.begin_calls(self.clients)
        return self._client

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is None or self._loop is not asyncio.get_running_loop():
            return
        self.end_calls()
        open_ones = [channel.closed.wait() for channels in self._channels.values() for channel in channels]
        with contextlib.suppress(TimeoutError):  # each takes its leave, so that nothing of ours stays inside
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.gather(*open_ones)
        self._channels.clear()
        await client.close()

    # -- creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            asked = create.arguments(spec, self._access.blueprint)
            client = self.client()

        doors: dict[str, Door] = {}

        async def make(seconds: float) -> SandboxInfo:
            view = await create.make(client, asked, seconds)
            doors[view.id] = Door.of(view)
            return lookup.info_of(view)

        made = await hosted.recovered(
            make,
            lambda: self.find(spec),
            self.get,
            service=SERVICE,
            labels=spec.labels,
            seconds=create.CREATE_SECONDS,
        )
        if made.sandbox_id in doors:
            self._doors[made.sandbox_id] = doors[made.sandbox_id]
        lives = float(asked["launch_parameters"]["keep_alive_time_seconds"])
        self._ours.add(made.sandbox_id)
        self._lifetimes[made.sandbox_id] = lives
        return replace(made, expires_at=lookup.until(lives))

    # -- looking

    async def get(self, sandbox_id: str) -> SandboxInfo:
        found = lookup.info_of(await lookup.view_of(self.client(), sandbox_id))
        if found.state.terminal:
            self._ours.discard(sandbox_id)
        return found

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        async for info in lookup.listed(self.client(), labels):
            yield info

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        client = self.client()
        return await hosted.until_ready(
            lambda: lookup.settled(client, sandbox_id, ("running", "suspended")),
            service=SERVICE,
            sandbox_id=sandbox_id,
            seconds=_READY_SECONDS,
        )

    # -- ending

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        client = self.client()
        self.forget_calls(sandbox_id, goodbye=False)
        ended = await destroy.destroy(client, sandbox_id, alive=sandbox_id in self._ours)
        self._shut(sandbox_id, SERVICE.gone(sandbox_id))
        for known in (self._keys, self._doors, self._lifetimes):
            known.pop(sandbox_id, None)
        self._ours.discard(sandbox_id)
        return ended

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """Runloop only starts the time of the create call again: the answer says until when that is."""
        client = self.client()
        lives = self._lifetimes.get(sandbox_id)
        if lives is None:
            launch = (await lookup.view_of(client, sandbox_id)).launch_parameters
            lives = float(getattr(launch, "keep_alive_time_seconds", None) or 0.0)
        try:
            await SERVICE.again(lambda: client.devboxes.keep_alive(sandbox_id), "keep alive", sandbox_id)
        except errors.ValidationError as error:
            if (await self.get(sandbox_id)).state.terminal:
                raise SERVICE.missing(sandbox_id) from error
            raise
        self._lifetimes[sandbox_id] = lives
        return lookup.until(lives) if lives else None

    # -- the program inside

    async def _key(self, sandbox_id: str) -> bytes:
        """The server inside is this process's own and learns the key with its first words: nobody else needs it."""
        return self._keys.setdefault(sandbox_id, new_key())

    async def _open_channel(self, sandbox_id: str, first: bytes) -> ExecutionChannel:
        async def explain(error: errors.LowtideError) -> errors.LowtideError:
            found = await hosted.explained(
                error,
                lambda: self.get(sandbox_id),
                service=SERVICE,
                sandbox_id=sandbox_id,
                ambiguous=_AMBIGUOUS,
            )
            if isinstance(found, errors.ValidationError):
                # Nothing of the caller's is in these requests: the devbox is about to end, and its state lags behind.
                return SERVICE.error(errors.SandboxUnavailableError, str(found), sandbox_id)
            return found

        channel = await open_channel(self.client(), sandbox_id, await self._door(sandbox_id), first, explain)
        channels = self._channels.setdefault(sandbox_id, set())
        channels.difference_update([one for one in channels if one.closed.is_set()])
        channels.add(channel)
        return channel

    def _shut(self, sandbox_id: str, why: errors.LowtideError) -> None:
        """What runs inside has ended: whoever listens hears why."""
        for channel in self._channels.pop(sandbox_id, ()):
            channel.close(why)

    async def _door(self, sandbox_id: str) -> Door:
        if sandbox_id not in self._doors:
            self._doors[sandbox_id] = Door.of(await lookup.view_of(self.client(), sandbox_id))
        return self._doors[sandbox_id]

    async def send_file(self, sandbox_id: str, path: str, source: Counted) -> None:
        """Through Runloop's own transfer, from a file: its SDK takes no stream."""
        client = self.client()
        with tempfile.TemporaryFile() as file:
            async for chunk in source:
                await in_thread(partial(file.write, chunk))  # a slow disk holds up nobody else
            file.seek(0)
            sent = source.read_from(file)
            work = client.devboxes.upload_file(sandbox_id, path=path, file=sent, timeout=_SEND_SECONDS)
            sending = SERVICE.call(_SEND_SECONDS, work, "upload", sandbox_id, path=path)
            await source.watched(sending, service=SERVICE, sandbox_id=sandbox_id)

    # -- what Runloop does beyond the primitives

    async def url(self, sandbox_id: str, port: int) -> Url:
        client = self.client()
        tunnel = (await lookup.view_of(client, sandbox_id)).tunnel
        if tunnel is None:
            work = client.devboxes.enable_tunnel(sandbox_id, **create.TUNNEL)
            tunnel = await SERVICE.call(lookup.CALL_SECONDS, work, "a tunnel", sandbox_id)
        headers = {}
        if tunnel.auth_token:
            headers["X-Runloop-Tunnel-Authorization"] = f"Bearer {tunnel.auth_token}"
        host, which = urlsplit(self._access.base_url).hostname or "", f"{port}-{tunnel.tunnel_key}"
        if host.startswith("api."):
            return Url(url=f"https://{which}.tunnel.{host.removeprefix('api.')}", headers=headers)
        # An emulator has one address: a header says which tunnel, and which port.
        return Url(url=self._access.base_url, headers={**headers, "X-Lowtide-Tunnel": which})

    async def pause(self, sandbox_id: str) -> None:
        """Files stay; what runs, ends."""
        await self._change(sandbox_id, SandboxState.PAUSED, "suspend", "suspended")
        # The program inside has ended, too: whoever comes next starts another, and does not look for this one.
        words = "the sandbox was paused, and on Runloop that ends its commands: start them again"
        self.forget_calls(sandbox_id, goodbye=False)
        self._shut(
            sandbox_id, SERVICE.error(errors.SandboxUnavailableError, words, sandbox_id, retryable=False)
        )

    async def resume(self, sandbox_id: str) -> None:
        await self._change(sandbox_id, SandboxState.RUNNING, "resume", "running")

    async def _change(self, sandbox_id: str, wanted: SandboxState, verb: str, status: str) -> None:
        client = self.client()
        if (await self.get(sandbox_id)).state is not wanted:
            work = getattr(client.devboxes, verb)(sandbox_id)
            await SERVICE.call(lookup.CALL_SECONDS, work, verb, sandbox_id)
        async with asyncio.timeout(_READY_SECONDS):
            while (found := await lookup.settled(client, sandbox_id, (status,))).state is not wanted:
                if found.state.terminal:
                    raise SERVICE.gone(sandbox_id)

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        return await snapshots.take(self.client(), sandbox_id, name)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await snapshots.delete(self.client(), snapshot_id)

    async def list_snapshots(self) -> Sequence[str]:
        return await snapshots.listed(self.client())
