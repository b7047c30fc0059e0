"""`ModalProvider`: the seam's primitives on Modal's sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any, ClassVar

from lowtide.errors import (
    LowtideError,
    RequestTimeoutError,
    SandboxNotFoundError,
    SandboxUnavailableError,
)
from lowtide.providers import hosted
from lowtide.providers.base import (
    Capability,
    Labels,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.hosted import End
from lowtide.providers.inside import Clients
from lowtide.providers.modal import create, logs, lookup
from lowtide.providers.modal.access import Access, Connection
from lowtide.providers.modal.channel import ExecChannel, open_channel
from lowtide.providers.modal.errors import PROVIDER, SERVICE, WORKSPACE
from lowtide.providers.modal.options import LONGEST_SECONDS, ModalOptions

_CREATE_SECONDS = 120.0  # an image may have to be pulled
_ASK_SECONDS = 30.0
_LOOK_SECONDS, _LONGEST_LOOK = 1.0, 10.0
_GRACE_MARGIN = 2.0  # after the KILL, until its end is heard of


class ModalProvider(hosted.Hosted):
    """One sandbox each. Its name is the lease id; the program inside is its main process and keeps the lease."""

    name: ClassVar[str] = PROVIDER
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        Capability.IMAGE,
        Capability.COMMAND,
        Capability.LOGS,
        Capability.CPU_LIMIT,
        Capability.MEMORY_LIMIT,
        Capability.NETWORK_NONE,
        Capability.NETWORK_INTERNET,
        Capability.NETWORK_ALLOW,
        Capability.LIFETIME,
        Capability.RENEW,
    }
    traits: ClassVar[Traits] = Traits(
        own_threads=True,
        recovery=Recovery.BY_NAME,
        create_window_seconds=60.0,
        max_lifetime_seconds=float(LONGEST_SECONDS),
    )
    options_type: ClassVar[type | None] = ModalOptions
    access_type = Access
    _access: Access

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connection = Connection(access)
        self._forget()
        super().__init__(Clients(PROVIDER, self._open_channel, self._key))

    def _forget(self) -> None:
        """Nothing of another event loop or process can be used."""
        self._sandboxes: dict[str, Any] = {}
        self._leases: dict[str, str] = {}
        self._images: dict[Any, Any] = {}
        self._made: dict[str, SandboxInfo] = {}
        self._alone: set[str] = set()
        """Made here without a command of its own, and nothing has run in them yet."""
        self._entered: set[str] = set()
        """The program inside was reached: so they had been started, whatever became of them."""
        self._idle_main: set[str] = set()
        """Made here without a command of its own."""
        self._ending: set[str] = set()

    # -- connecting

    async def _sdk(self) -> tuple[Any, Any, Any]:
        """The SDK, its client, and the app."""
        if self._connection.fresh:
            self._forget()
            self.begin_calls(self.clients)
        client, app = await self._connection.app()
        import modal

        return modal, client, app

    async def aclose(self) -> None:
        self.end_calls()
        await self._connection.aclose()
        self._forget()

    # -- creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            words, given = create.arguments(spec, self._access.key(spec.lease_id))
            modal, client, app = await self._sdk()
            image, known = create.image(modal, spec)
            image = self._images.setdefault(known, image) if known is not None else image

        answers: dict[str, Any] = {}

        async def make(seconds: float) -> SandboxInfo:
            try:
                work = modal.Sandbox.create.aio(*words, app=app, client=client, image=image, **given)
                made = await WORKSPACE.call(seconds, work, "create")
            except SandboxUnavailableError as error:
                if not isinstance(error.__cause__, modal.exception.AlreadyExistsError):
                    raise
                found = await self.find(spec)  # an earlier one of the same lease
                if found is None:
                    raise
                return found
            answers[made.object_id] = made
            return lookup.info(made.object_id, {}, None)

        async def read(sandbox_id: str) -> SandboxInfo:
            """Modal's answer to a create has no tags."""
            asking = answers[sandbox_id].get_tags.aio()
            return lookup.info(sandbox_id, await SERVICE.call(_ASK_SECONDS, asking, "tags", sandbox_id), None)

        info = await hosted.recovered(
            make,
            lambda: self.find(spec),
            read,
            service=SERVICE,
            labels=spec.labels,
            seconds=_CREATE_SECONDS,
            replay=True,
        )
        sandbox = answers.get(info.sandbox_id)
        if sandbox is not None:
            self._keep(sandbox, spec.lease_id)
            self._made[info.sandbox_id] = info
            if spec.command is None:
                self._alone.add(info.sandbox_id)
                self._idle_main.add(info.sandbox_id)
        return info

    def _keep(self, sandbox: Any, lease_id: str | None) -> None:
        self._sandboxes[sandbox.object_id] = sandbox
        if lease_id is not None:
            self._leases[sandbox.object_id] = lease_id

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        modal, client, _ = await self._sdk()
        looking = modal.Sandbox.from_name.aio(
            self._access.app, spec.lease_id, environment_name=self._access.environment, client=client
        )
        try:
            sandbox = await SERVICE.call(_ASK_SECONDS, looking, "find", spec.lease_id)
            tags = await SERVICE.call(_ASK_SECONDS, sandbox.get_tags.aio(), "tags", sandbox.object_id)
        except SandboxNotFoundError:
            return None
        if not hosted.is_id(sandbox.object_id) or not hosted.is_of_lease(tags, spec.labels):
            return None
        self._keep(sandbox, spec.lease_id)
        return lookup.info(sandbox.object_id, tags, None)

    # -- looking

    async def _sandbox(self, sandbox_id: str) -> Any:
        """The SDK's own object. Raises SandboxNotFoundError."""
        modal, client, _ = await self._sdk()
        known = self._sandboxes.get(sandbox_id)
        if known is not None:
            return known
        if not hosted.is_word(sandbox_id) or not sandbox_id.startswith("sb-"):
            raise SERVICE.missing(sandbox_id)
        looking = modal.Sandbox.from_id.aio(sandbox_id, client=client)
        return await SERVICE.call(_ASK_SECONDS, looking, "get", sandbox_id)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        sandbox = await self._sandbox(sandbox_id)
        known = sandbox_id in self._sandboxes
        tags = await SERVICE.call(_ASK_SECONDS, sandbox.get_tags.aio(), "tags", sandbox_id)
        labels = Labels.from_dict(tags)
        if labels is None:
            raise SERVICE.missing(sandbox_id)  # somebody else's
        code = sandbox.returncode
        if known:
            code = await SERVICE.call(_ASK_SECONDS, sandbox.poll.aio(), "poll", sandbox_id)
        self._keep(sandbox, labels.lease_id)
        return lookup.info(sandbox_id, tags, code)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        made = self._made.get(sandbox_id)
        if made is not None and not self._connection.fresh:
            return made  # whether it starts is known with its first command: Modal has no word for it before
        return await hosted.until_ready(
            lambda: self.get(sandbox_id), service=SERVICE, sandbox_id=sandbox_id, seconds=60.0
        )

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        modal, client, app = await self._sdk()
        listed = modal.Sandbox.list.aio(app_id=app.app_id, tags=dict(labels) or None, client=client)

        async def found() -> list[Any]:
            return [one async for one in listed]

        for sandbox in await SERVICE.call(_ASK_SECONDS, found(), "list"):
            tags: Mapping[str, str] = labels
            if not lookup.is_ours(labels):
                try:
                    tags = await SERVICE.call(_ASK_SECONDS, sandbox.get_tags.aio(), "tags", sandbox.object_id)
                except SandboxNotFoundError:
                    continue
            if lookup.is_ours(tags) and labels.items() <= tags.items():
                yield lookup.info(sandbox.object_id, tags, None)

    # -- ending

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        made_here = sandbox_id in self._made and not self._connection.fresh
        try:
            if not made_here and (await self.get(sandbox_id)).state.terminal:
                return False
            sandbox = await self._sandbox(sandbox_id)
        except SandboxNotFoundError:
            return False
        if grace_seconds > 0:
            await self._ask_to_end(sandbox, sandbox_id, grace_seconds)
        self._ending.add(sandbox_id)
        self.forget_calls(sandbox_id, goodbye=False)

        patience = _LOOK_SECONDS

        async def ask() -> End:
            nonlocal patience
            began = time.monotonic()
            try:
                await SERVICE.call(_ASK_SECONDS, sandbox.terminate.aio(), "terminate", sandbox_id)
            except SandboxNotFoundError:
                return End.MISSING
            # Where many end at once, all takes longer, and asking again in the midst of it would make it worse.
            patience = min(_LONGEST_LOOK, max(_LOOK_SECONDS, 5 * (time.monotonic() - began)))
            return End.ACCEPTED

        async def look() -> End:
            return await self._over(sandbox, sandbox_id, patience)

        try:
            ended = await hosted.delete(ask, look, service=SERVICE, sandbox_id=sandbox_id)
        finally:
            self._ending.discard(sandbox_id)
        for known in (self._sandboxes, self._leases, self._made):
            known.pop(sandbox_id, None)
        for kept in (self._alone, self._entered, self._idle_main):
            kept.discard(sandbox_id)
        by_itself = grace_seconds <= 0 and sandbox.returncode not in (None, lookup.TERMINATED)
        return ended and not by_itself

    async def _over(self, sandbox: Any, sandbox_id: str, seconds: float = _LOOK_SECONDS) -> End:
        """Modal answers as soon as it is over; not for long, lest a terminate that was lost is waited for."""
        try:
            wait = sandbox.wait.aio(raise_on_termination=False)
            await SERVICE.within(seconds, wait, "wait", sandbox_id)
        except RequestTimeoutError:
            return End.THERE
        except Exception as error:
            if type(error).__name__ == "SandboxTimeoutError":  # it reached its own end
                return End.GONE
            found = SERVICE.translated(error, sandbox_id)
            if isinstance(found, SandboxNotFoundError):
                return End.GONE
            raise (found or error) from error
        return End.GONE

    async def _ask_to_end(self, sandbox: Any, sandbox_id: str, grace_seconds: float) -> None:
        """Modal's terminate has no grace: what runs inside is told to end, and that is waited for."""
        try:
            async with asyncio.timeout(grace_seconds + _GRACE_MARGIN):
                if sandbox_id in self._idle_main:
                    known = self.clients.known(sandbox_id)
                    if known is not None:
                        await known.end_commands(grace_seconds)
                    return
            async with asyncio.timeout(grace_seconds):
                client = await self.clients.get(sandbox_id)
                words = ("/bin/sh", "-c", 'read target; kill -s TERM -- "$target"')
                telling = await client.start(ProcessSpec(argv=words, stdin=True))
                # As process 1 it listens to nobody in there: then all the others are told.
                target = -1 if client.pid == 1 else client.pid
                await telling.write_stdin(f"{target}\n".encode())
                if sandbox_id not in self._made:
                    # It may have no command of its own, and then waits until it is alone: so we go, too.
                    client.close()
                while await self._over(sandbox, sandbox_id) is not End.GONE:
                    pass
        except (LowtideError, OSError):
            pass  # it is terminated in any case

    # -- the program inside

    async def logs(self, sandbox_id: str, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
        if not (await self.get(sandbox_id)).state.terminal:
            with contextlib.suppress(*logs.ENDED):  # meanwhile
                client = await self.clients.get(sandbox_id)
                reading = logs.running(client, follow=follow, tail_lines=tail_lines)
                async with contextlib.aclosing(reading):  # type: ignore[type-var]
                    async for data in reading:
                        yield data
                return
        modal, connection, _ = await self._sdk()
        looking = modal.Sandbox.from_id.aio(sandbox_id, client=connection)  # anew: the SDK reads a log once
        sandbox = await SERVICE.call(_ASK_SECONDS, looking, "get", sandbox_id)
        yield await logs.ended(sandbox, sandbox_id, tail_lines=tail_lines)

    async def _open_channel(self, sandbox_id: str, first: bytes) -> ExecChannel:
        sandbox = await self._sandbox(sandbox_id)
        try:
            alone = sandbox_id in self._alone
            self._alone.discard(sandbox_id)
            channel = await open_channel(
                sandbox,
                sandbox_id,
                create.place(self._leases[sandbox_id]),
                first,
                alone=alone,
                ending=lambda: sandbox_id in self._ending,
            )
        except LowtideError as error:
            raise await self._explained(sandbox_id, error) from error.__cause__
        self._entered.add(sandbox_id)
        return channel

    async def _key(self, sandbox_id: str) -> bytes:
        if sandbox_id not in self._leases or self._connection.fresh:
            info = await self.get(sandbox_id)
            if info.state.terminal:
                raise self._ended(sandbox_id, info)
        return self._access.key(self._leases[sandbox_id])

    async def _explained(self, sandbox_id: str, error: LowtideError) -> LowtideError:
        """What a failure on the way in means: Modal knows whether the sandbox is over, and why."""
        try:
            info = await self.get(sandbox_id)
        except LowtideError:
            return error
        return self._ended(sandbox_id, info) if info.state.terminal else error

    def _ended(self, sandbox_id: str, info: SandboxInfo) -> LowtideError:
        never_ran = sandbox_id in self._made and sandbox_id not in self._entered
        if info.state is SandboxState.FAILED and info.reason != "expired" and never_ran:
            return SERVICE.failed(sandbox_id, info.reason or "error")
        return SERVICE.gone(sandbox_id)

    # -- what Modal does beyond the primitives

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """Modal's own end cannot be moved; the main process keeps a shorter one, as far as that allows."""
        return await self.renew_inside(sandbox_id, lifetime_seconds)

    async def url(self, sandbox_id: str, port: int) -> Url:
        sandbox = await self._sandbox(sandbox_id)
        tunnels = await SERVICE.call(_ASK_SECONDS, sandbox.tunnels.aio(), "tunnels", sandbox_id)
        if port in tunnels:
            return Url(url=tunnels[port].url)
        return await self.forwarded_url(sandbox_id, port)
