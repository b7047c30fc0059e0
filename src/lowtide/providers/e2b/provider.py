"""E2B as a provider: one microVM per sandbox, made and ended through E2B's async SDK."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import (
    Capability,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.e2b import create, destroy, files, lookup, transport
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.channel import EnvdChannel, Server, all_closed, open_channel
from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.e2b.options import E2BOptions
from lowtide.providers.e2b.sdk import LazySandbox, SdkSandbox, sandbox_class
from lowtide.providers.e2b.snapshots import Snapshots
from lowtide.providers.hosted.transfer import BulkFiles, Counted, is_text
from lowtide.providers.inside import Client, Clients, InsideProcess
from lowtide.providers.inside import files as inside
from lowtide.providers.optional import CodeResult

_MOST = 2048
"""Sandboxes that are remembered; the oldest is asked about again when it is used."""
_CHANNELS = 100
"""Open at once, as far as they are idle: over HTTP/1.1 each is one of the 200 connections that the SDK allows itself."""
_TRIES = 3
"""To open a channel whose stream breaks before the program has answered."""


class E2BProvider(Snapshots, BulkFiles, hosted.Hosted):
    """The primitives over E2B's API. A sandbox id is E2B's own."""

    name: ClassVar[str] = "e2b"
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        *(Capability.USER, Capability.NETWORK_NONE, Capability.NETWORK_INTERNET, Capability.NETWORK_ALLOW),
        *(Capability.SNAPSHOT, Capability.PAUSE, Capability.LIFETIME, Capability.RENEW, Capability.CODE),
    }
    traits: ClassVar[Traits] = Traits(
        # Not REPLAY, although every create has its key: from a guardian that knows the labels only, a
        # replay would be another request under the same key, which is refused; and where nothing was
        # made it would make something. A look-up by metadata makes nothing, whoever does it.
        recovery=Recovery.BY_LABEL,
        create_window_seconds=60.0,  # the request is given up after 45 s
        max_lifetime_seconds=86_400.0,  # 24 hours; an account may have less, and says so
    )
    options_type: ClassVar[type | None] = E2BOptions
    access_type = Access
    _access: Access

    def __init__(self, access: Access) -> None:
        self._access = access
        self._requests = lookup.Requests(access)
        self._known: OrderedDict[str, SdkSandbox] = OrderedDict()
        self._fresh: dict[str, SandboxInfo] = {}
        self._servers: dict[tuple[str, str | None], Server] = {}
        self._others: dict[str, Clients] = {}
        """The clients of users that are not the sandbox's own: envd starts a process as a user, so each has a server."""
        self._process_id = os.getpid()
        super().__init__(self._new_clients(None))

    # -- connecting

    async def aclose(self) -> None:
        for clients in self._others.values():
            clients.close()
        self.end_calls()
        self._known.clear()
        self._fresh.clear()
        await all_closed()
        transport.leave(self)

    def _sdk(self) -> type[LazySandbox]:
        """The SDK's class, imported on first use."""
        transport.join(self)
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._known.clear()  # the SDK's objects hold connections of the process before the fork
        return sandbox_class()

    # -- creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            sdk = self._sdk()
            asked = create.arguments(spec, self._access.template)
        info, made = await create.create(sdk, self._access, spec, asked, lambda: self.find(spec), self.get)
        if made is not None:
            self._keep(info.sandbox_id, made)
            self._fresh[info.sandbox_id] = info
        return info

    # -- looking

    async def get(self, sandbox_id: str) -> SandboxInfo:
        self._sdk()
        return lookup.info_of(await lookup.detail(self._requests, sandbox_id))

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        async for info in lookup.listed(self._sdk(), self._access, labels):
            yield info

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        fresh = self._fresh.pop(sandbox_id, None)

        async def look() -> SandboxInfo:
            known = await self._sandbox(sandbox_id)
            healthy = known.sdk.is_running()
            if await SERVICE.call(lookup.CALL_SECONDS, healthy, "health", sandbox_id):
                return fresh or await self.get(sandbox_id)
            info = await self.get(sandbox_id)
            if info.state is SandboxState.PAUSED:
                return info
            # E2B answers a create when it runs: what does not by then, never will.
            state = SandboxState.PENDING if fresh is None else SandboxState.FAILED
            return replace(info, state=state, reason="not running")

        return await hosted.until_ready(
            look, service=SERVICE, sandbox_id=sandbox_id, seconds=lookup.CALL_SECONDS, most=2.0
        )

    # -- ending

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        if not hosted.is_word(sandbox_id):
            return False
        self._sdk()
        self._forget(sandbox_id)
        return await destroy.destroy(self._requests, sandbox_id)

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        sdk = self._sdk()
        seconds = max(1, math.ceil(lifetime_seconds))
        try:
            with SERVICE.mapped(sandbox_id):
                setting = sdk.set_timeout(sandbox_id, timeout=seconds, **self._access.parameters())
                await SERVICE.within(lookup.CALL_SECONDS, setting, "set_timeout", sandbox_id)
        except (errors.SandboxNotFoundError, KeyError) as error:  # the second: an answer that is not E2B's
            if (await self.get(sandbox_id)).state is SandboxState.PAUSED:
                return None  # a paused one has no clock that could run out
            raise SERVICE.elsewhere(sandbox_id) from error
        return datetime.now(UTC) + timedelta(seconds=seconds)

    def _forget(self, sandbox_id: str) -> None:
        """It is ending: whoever wants to go on with it is told that it is gone, without a request."""
        self._known.pop(sandbox_id, None)
        self._fresh.pop(sandbox_id, None)
        for key in [key for key in self._servers if key[0] == sandbox_id]:
            del self._servers[key]
        self.forget_calls(sandbox_id)
        for clients in self._others.values():
            clients.forget(sandbox_id)

    # -- the program inside

    def _new_clients(self, user: str | None) -> Clients:
        async def key(sandbox_id: str) -> bytes:
            server = self._servers[sandbox_id, user] = Server()
            return server.key

        async def open_way(sandbox_id: str, first: bytes) -> EnvdChannel:
            return await self._open_channel(sandbox_id, first, user)

        return Clients("e2b", open_way, key, most=_CHANNELS)

    async def _client(self, sandbox_id: str, user: str | None) -> Client:
        """For commands of a user who is not the sandbox's own; None: of its own."""
        clients = self.clients
        if user is not None:
            clients = self._others.get(user) or self._others.setdefault(user, self._new_clients(user))
        return await clients.get(sandbox_id)

    async def _open_channel(self, sandbox_id: str, first: bytes, user: str | None) -> EnvdChannel:
        server = self._servers.get((sandbox_id, user))
        if server is None:
            raise SERVICE.gone(sandbox_id)  # ended by this provider meanwhile
        async with self._explaining(sandbox_id):
            if server.opened and (await self.get(sandbox_id)).state is SandboxState.PAUSED:
                # A request would wake one that may: only a new command is reason enough for that.
                raise SERVICE.asleep(sandbox_id, "paused", "resume()")
            known = await self._sandbox(sandbox_id)
            for attempt in range(_TRIES):
                who = user or known.user
                try:
                    with SERVICE.mapped(sandbox_id):
                        channel = await open_channel(
                            known, server, self._access.architecture, first, user=who
                        )
                    self._fresh.pop(sandbox_id, None)
                    return channel
                except errors.AuthenticationError as error:
                    if who is not None and who in str(error):
                        words = f"the sandbox knows no user {who}"
                        raise SERVICE.error(errors.ValidationError, words, argument="user") from error
                    if attempt:
                        raise
                    # envd did not take the token it was made with: it has another one since.
                    known = await self._sandbox(sandbox_id, anew=True)
                except errors.SandboxUnavailableError as error:
                    # Said again to the same server, the same words do nothing twice.
                    slow_down = isinstance(error, errors.RateLimitError)
                    if slow_down or attempt == _TRIES - 1 or not error.retryable:
                        raise
            raise AssertionError

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> InsideProcess:
        async with self._explaining(sandbox_id):
            known = await self._sandbox(sandbox_id)
        user = spec.user if spec.user != known.user else None
        client = await self._client(sandbox_id, user)
        if known.working_dir is not None and not known.entered:
            with contextlib.suppress(errors.SandboxFileError):  # then the command says that it is not there
                await inside.make_dir(client, known.working_dir)
            known.entered = True
        return await client.start(replace(spec, user=None, cwd=spec.cwd or known.working_dir))

    async def run_code(
        self, sandbox_id: str, code: str, *, language: str, context: str | None, timeout_seconds: float | None
    ) -> CodeResult:
        if importlib.util.find_spec("e2b_code_interpreter") is None:
            raise hosted.missing_dependency("e2b", "E2B's SDK")
        from lowtide.providers.e2b import interpreter

        async with self._explaining(sandbox_id):
            known = await self._sandbox(sandbox_id)
            known.untouched = False
            with SERVICE.mapped(sandbox_id):
                return await interpreter.run(
                    known.sdk, code, language=language, context=context, timeout_seconds=timeout_seconds
                )

    # -- files and ports: small writes and all else go through the program inside, see `Calls`

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        """Through envd, whose transfer is faster; else by the program inside.

        That reads what envd's protocol cannot carry, what envd does not find (a 404 may be a proxy's, whatever it
        says), and what is answered without a length, as some proxies do: a cut answer would look like a whole one.
        """
        if is_text(path):
            try:
                async with contextlib.aclosing(self._read_by_envd(sandbox_id, path)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        yield chunk
                return
            except (errors.SandboxFileNotFoundError, files.EndUnknown):
                pass  # both come before the first chunk
        async for chunk in super().read_file(sandbox_id, path):
            yield chunk

    async def _read_by_envd(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async with self._explaining(sandbox_id):
            known = await self._sandbox(sandbox_id)
            with SERVICE.mapped(sandbox_id, path=path):
                reading = files.read(known.sdk, path, user=known.user)
                async with contextlib.aclosing(reading) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        yield chunk

    async def send_file(self, sandbox_id: str, path: str, source: Counted) -> None:
        async with self._explaining(sandbox_id):
            known = await self._sandbox(sandbox_id)
            try:
                with SERVICE.mapped(sandbox_id, path=path):
                    sending = files.send(known.sdk, path, aiter(source), known.user)
                    await source.watched(sending, service=SERVICE, sandbox_id=sandbox_id)
            except errors.SandboxFileNotFoundError as error:  # envd makes the directories that are missing
                raise SERVICE.elsewhere(sandbox_id) from error

    async def url(self, sandbox_id: str, port: int) -> Url:
        known = await self._sandbox(sandbox_id)
        headers = {}
        if known.sdk.traffic_access_token:
            headers["E2B-Traffic-Access-Token"] = known.sdk.traffic_access_token
        if self._access.sandbox_url is not None:
            # One address for every sandbox: the headers say which one, and which port.
            headers |= {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
            return Url(url=self._access.sandbox_url.rstrip("/"), headers=headers)
        return Url(url=f"https://{known.sdk.get_host(port)}", headers=headers)

    # -- what is known

    async def _sandbox(self, sandbox_id: str, *, anew: bool = False) -> SdkSandbox:
        """Raises SandboxGone."""
        self._sdk()
        known = self._known.get(sandbox_id)
        if known is not None and not anew:
            return known
        try:
            detail = await lookup.detail(self._requests, sandbox_id)
        except errors.SandboxNotFoundError as error:
            raise SERVICE.gone(sandbox_id) from error
        known = SdkSandbox.of(detail, self._access.parameters())
        self._keep(sandbox_id, known)
        return known

    def _keep(self, sandbox_id: str, known: SdkSandbox) -> None:
        self._known[sandbox_id] = known
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _explaining(self, sandbox_id: str) -> AsyncIterator[None]:
        """What goes wrong on the way into a sandbox, told as what it means: gone, paused, or out of reach."""
        try:
            yield
        except errors.LowtideError as error:
            meant = await hosted.explained(
                error, lambda: self.get(sandbox_id), service=SERVICE, sandbox_id=sandbox_id
            )
            if meant is error:
                raise
            if isinstance(meant, errors.SandboxGone):
                self._known.pop(sandbox_id, None)
            elif meant.retryable and sandbox_id in self._fresh:
                # E2B answers a create when it runs: what does not by then, never will.
                raise SERVICE.failed(sandbox_id, "not running") from error
            raise meant from error
