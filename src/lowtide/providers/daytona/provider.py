"""`DaytonaProvider`: the seam's primitives over Daytona's API. A sandbox id is Daytona's own; its name is the lease id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from lowtide import errors
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
from lowtide.providers.daytona import channel, create, destroy, lookup
from lowtide.providers.daytona.access import Access, Connection
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.daytona.lookup import CALL_SECONDS, STATE_SECONDS
from lowtide.providers.daytona.options import DaytonaOptions
from lowtide.providers.hosted.transfer import BulkFiles, Counted
from lowtide.providers.inside import Channel, Clients
from lowtide.providers.optional import CodeResult

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

CREATE_SECONDS = 60.0
_PREVIEW_HEADERS = {"X-Daytona-Skip-Preview-Warning": "true"}


class DaytonaProvider(BulkFiles, hosted.Hosted):
    """One hosted sandbox each, made and ended through Daytona's async SDK, used through the program inside."""

    name: ClassVar[str] = "daytona"
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        Capability.IMAGE,
        Capability.CPU_LIMIT,
        Capability.MEMORY_LIMIT,
        Capability.DISK_LIMIT,
        Capability.NETWORK_NONE,
        Capability.NETWORK_INTERNET,
        Capability.NETWORK_ALLOW,
        Capability.SNAPSHOT,
        Capability.PAUSE,
        Capability.LIFETIME,
        Capability.RENEW,
        Capability.CODE,
    }
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME,
        create_window_seconds=60.0,  # the request is given up after that long
    )
    options_type: ClassVar[type | None] = DaytonaOptions
    access_type = Access
    _access: Access

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connection = Connection(access)
        self._known: dict[str, AsyncSandbox] = {}
        self._known_by: AsyncDaytona | None = None
        self._ways: dict[str, channel.Way] = {}
        self._terminals: set[channel.Terminal] = set()
        self._made: dict[str, SandboxInfo] = {}
        super().__init__(Clients("daytona", self._open_channel, self._key, text=True))

    # -- connecting

    async def aclose(self) -> None:
        self.end_calls()
        loop = asyncio.get_running_loop()
        closed = {one.closed for one in self._terminals if one.closed.get_loop() is loop}
        if closed:
            await asyncio.wait(closed, timeout=5.0)
        self._terminals.clear()
        for forgotten in (self._known, self._ways, self._made):
            forgotten.clear()
        await self._connection.aclose()

    # -- creating and looking

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            sdk = await self._sdk()
            asked = create.parameters(spec, self._access.snapshot)

        answers: dict[str, AsyncSandbox] = {}

        async def make(seconds: float) -> SandboxInfo:
            # timeout=0: the SDK's own would be an alarm or a cancelled task; the bound is ours.
            made = await SERVICE.call(seconds, sdk.create(asked, timeout=0), "create")
            info = lookup.info_of(made)
            answers[info.sandbox_id] = made
            return info

        info = await hosted.recovered(
            make,
            lambda: self.find(spec),
            self.get,
            service=SERVICE,
            labels=spec.labels,
            seconds=CREATE_SECONDS,
            lost=lambda error: hosted.was_lost(error) or hasattr(error.__cause__, "sandbox_id"),
        )
        box = answers.get(info.sandbox_id)
        if box is not None:
            self._made[info.sandbox_id], self._known[info.sandbox_id] = info, box
            self._ways[info.sandbox_id] = channel.Way(spec.working_dir, fresh=True)
        return info

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        try:
            found = await self.get(spec.lease_id)
        except errors.SandboxNotFoundError:
            return None
        return found if hosted.is_of_lease(found.labels, spec.labels) else None

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """By id, or by name: Daytona takes both."""
        return await lookup.info(self._connection, sandbox_id)

    async def attach(self, *, labels: Mapping[str, str]) -> SandboxInfo:
        """The one sandbox with these labels, confirmed by its id. Missing is an error, and so is more than one."""
        return await lookup.the_one(self._connection, labels)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        made = self._made.pop(sandbox_id, None)
        if made is not None and made.state is SandboxState.RUNNING:
            return made
        return await hosted.until_ready(lambda: self.get(sandbox_id), service=SERVICE, sandbox_id=sandbox_id)

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        async for info in lookup.listed(self._connection, labels):
            yield info

    # -- ending and changing

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        if not hosted.is_word(sandbox_id):
            return False
        self._forget(sandbox_id)
        return await destroy.delete(await self._connection.sdk(), sandbox_id)

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        lives = create.minutes(lifetime_seconds)
        async with self._confirming(sandbox_id):
            box = await self._sandbox(sandbox_id)
            await SERVICE.call(CALL_SECONDS, box.set_ttl(lives), "set_ttl", sandbox_id)
            if 0 < int(box.auto_stop_interval or 0) < lives:  # else one that is kept would be stopped first
                await SERVICE.call(CALL_SECONDS, box.set_autostop_interval(lives), "set_autostop", sandbox_id)
            with contextlib.suppress(errors.SandboxUnavailableError, errors.ValidationError):
                await SERVICE.call(CALL_SECONDS, box.refresh_activity(), "refresh_activity", sandbox_id)
        return datetime.now(UTC) + timedelta(minutes=lives)

    async def stop_only(self, sandbox_id: str, *, delete_after_seconds: float) -> None:
        """Stopped, and deleted by Daytona itself after that time: both clocks are set before it stops."""
        after = create.minutes(delete_after_seconds)
        async with self._confirming(sandbox_id):
            box = await self._sandbox(sandbox_id)
            await SERVICE.call(
                CALL_SECONDS, box.set_auto_delete_interval(after), "set_auto_delete", sandbox_id
            )
            await SERVICE.call(CALL_SECONDS, box.set_ttl(after), "set_ttl", sandbox_id)
            await self.stop(sandbox_id)

    async def stop(self, sandbox_id: str) -> None:
        """Silent when it does not run."""
        if (await self.get(sandbox_id)).state is not SandboxState.STOPPED:
            box = await self._sandbox(sandbox_id)
            await SERVICE.call(STATE_SECONDS, box.stop(timeout=0), "stop", sandbox_id)
        self._forget(sandbox_id)

    async def start(self, sandbox_id: str) -> None:
        """From stopped, archived or paused; silent when it runs."""
        self._known.pop(sandbox_id, None)
        box = await self._sandbox(sandbox_id)
        if lookup.info_of(box).state is not SandboxState.RUNNING:
            await SERVICE.call(STATE_SECONDS, box.start(timeout=0), "start", sandbox_id)

    async def archive(self, sandbox_id: str) -> None:
        """Its files go to object storage. It is stopped first; `start` brings it back."""
        await self.stop(sandbox_id)
        box = await self._sandbox(sandbox_id)
        await SERVICE.call(CALL_SECONDS, box.archive(), "archive", sandbox_id)
        await lookup.until(self._connection, sandbox_id, "archived")
        self._forget(sandbox_id)

    async def pause(self, sandbox_id: str) -> None:
        box = await self._sandbox(sandbox_id)
        try:
            await SERVICE.call(STATE_SECONDS, box.pause(timeout=0), "pause", sandbox_id)
        except errors.ValidationError as error:
            raise errors.UnsupportedError(
                f"Daytona does not pause this sandbox: {error}",
                feature="pause",
                alternative="a snapshot whose class can be paused",
                provider="daytona",
                sandbox_id=sandbox_id,
            ) from error
        self._forget(sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        await self.start(sandbox_id)

    # -- commands, code and ports; files are `Calls`

    async def send_file(self, sandbox_id: str, path: str, source: Counted) -> None:
        """Through the daemon: a terminal carries text, and 256 KiB of a file at a time."""
        async with self._used(sandbox_id) as box:
            sending = box.fs.upload_file_stream(aiter(source), path, timeout=0)
            await source.watched(sending, service=SERVICE, sandbox_id=sandbox_id)

    async def run_code(
        self, sandbox_id: str, code: str, *, language: str, context: str | None, timeout_seconds: float | None
    ) -> CodeResult:
        from lowtide.providers.daytona import interpreter

        async with self._used(sandbox_id) as box:
            return await interpreter.run(
                box, code, language=language, context=context, timeout_seconds=timeout_seconds
            )

    async def url(self, sandbox_id: str, port: int) -> Url:
        async with self._used(sandbox_id) as box:
            link = await SERVICE.within(CALL_SECONDS, box.get_preview_link(port), "preview link", sandbox_id)
        headers = dict(_PREVIEW_HEADERS)
        if link.token:
            headers["X-Daytona-Preview-Token"] = link.token
        return Url(url=str(link.url).rstrip("/"), headers=headers)

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        from lowtide.providers.daytona import snapshots

        async with self._used(sandbox_id) as box:
            return await snapshots.take(await self._connection.sdk(), box, name)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        from lowtide.providers.daytona import snapshots

        return await snapshots.delete(await self._connection.sdk(), snapshot_id)

    async def list_snapshots(self) -> Sequence[str]:
        from lowtide.providers.daytona import snapshots

        return await snapshots.own(await self._connection.sdk())

    # -- the way in

    async def _open_channel(self, sandbox_id: str, first: bytes) -> Channel:
        async with self._used(sandbox_id) as box:
            way = self._ways.get(sandbox_id)
            if way is None:  # it was ended or stopped from here
                raise errors.SandboxUnavailableError("the sandbox was stopped", retryable=False)
            fresh, way.fresh = way.fresh, False
            if fresh and len(first) <= channel.LONGEST_FIRST:
                answer = await channel.ask_once(box, way, first)
                if answer is not None:
                    return answer
            terminal = await channel.open_terminal(self._connection, box, way, first)
        self._terminals.add(terminal)
        terminal.closed.add_done_callback(lambda _: self._terminals.discard(terminal))
        return terminal

    async def _key(self, sandbox_id: str) -> bytes:
        """Each client has a server of its own; the one that was brought with the first command, two clients."""
        way = self._ways.get(sandbox_id)
        if way is None or not (way.fresh or way.reusable):
            async with self._used(sandbox_id) as box:
                way = self._ways[sandbox_id] = channel.Way((box.labels or {}).get(create.WORKING_DIR))
        way.reusable = False
        return way.key

    @asynccontextmanager
    async def _confirming(self, sandbox_id: str) -> AsyncIterator[None]:
        """For what counts as proof that it is gone: the SDK takes a 404 of anybody on the way for Daytona's."""
        try:
            yield
        except (errors.SandboxNotFoundError, errors.SandboxGone) as error:
            await self.get(sandbox_id)
            raise SERVICE.elsewhere(sandbox_id) from error

    @asynccontextmanager
    async def _used(self, sandbox_id: str) -> AsyncIterator[AsyncSandbox]:
        """For work in it. What goes wrong on the way is told as what it means: mostly that it is gone."""
        try:
            with SERVICE.mapped(sandbox_id):
                yield await self._sandbox(sandbox_id)
        except errors.UnsupportedError:
            raise
        except errors.LowtideError as error:
            meant = await hosted.explained(
                error,
                lambda: self.get(sandbox_id),
                service=SERVICE,
                sandbox_id=sandbox_id,
                wake="start",
                ambiguous=(errors.SandboxError, errors.ValidationError, errors.AuthenticationError),
            )
            if meant is error:
                raise
            self._forget(sandbox_id)
            raise meant from error

    async def _sandbox(self, sandbox_id: str) -> AsyncSandbox:
        """The SDK's object. SandboxNotFoundError when there is none."""
        sdk = await self._sdk()
        known = self._known.get(sandbox_id)
        if known is not None:
            return known
        if not hosted.is_word(sandbox_id):
            raise SERVICE.missing(sandbox_id)
        box = self._known[sandbox_id] = await SERVICE.call(
            CALL_SECONDS, sdk.get(sandbox_id), "get", sandbox_id
        )
        return box

    async def _sdk(self) -> AsyncDaytona:
        """Another event loop, as in a forked child, has another one, with sandboxes of its own."""
        sdk = await self._connection.sdk()
        if self._known_by is not sdk:
            self._known_by, self._known = sdk, {}
        return sdk

    def _forget(self, sandbox_id: str) -> None:
        for known in (self._known, self._ways, self._made):
            known.pop(sandbox_id, None)
        self.forget_calls(sandbox_id)
