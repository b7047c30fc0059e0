"""E2B as a provider: one microVM per sandbox, made and ended through E2B's async SDK."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from lowtide import errors
from lowtide.providers import derived, hosted
from lowtide.providers.base import (
    LABEL_PREFIX,
    Capability,
    CodeResult,
    Labels,
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
from lowtide.providers.e2b import creation
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.boxes import Box, Boxes
from lowtide.providers.e2b.control import Control
from lowtide.providers.e2b.creation import options_of
from lowtide.providers.e2b.deadline import within
from lowtide.providers.e2b.described import failed, gone, info_of
from lowtide.providers.e2b.failures import mapped, status_of
from lowtide.providers.e2b.options import E2BOptions

if TYPE_CHECKING:
    from e2b import AsyncSandbox

log = logging.getLogger("lowtide.e2b")

T = TypeVar("T")

CREATE_SECONDS = 45.0
KILL_SECONDS = 20.0
CALL_SECONDS = 30.0
SNAPSHOT_SECONDS = 300.0
CONFIRM_SECONDS = 10.0
"""How long a sandbox may still be there after its end was acknowledged, before it is killed again."""
_LEASE = LABEL_PREFIX + "lease"


class E2BProvider:
    """The primitives over E2B's API. A sandbox id is E2B's own."""

    name: ClassVar[str] = "e2b"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.STDIN,
            Capability.TTY,
            Capability.USER,
            Capability.SIGNALS,
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
        # Not REPLAY, although every create has its key: from a guardian that knows the labels only, a
        # replay would be another request under the same key, which is refused; and where nothing was
        # made it would make something. A look-up by metadata makes nothing, whoever does it.
        recovery=Recovery.BY_LABEL,
        create_window_seconds=60.0,  # the request is given up after 45 s
        max_lifetime_seconds=86_400.0,  # 24 hours; an account may have less, and says so
    )
    options_type: ClassVar[type | None] = E2BOptions

    def __init__(self, access: Access) -> None:
        self._access = access
        self._control = Control(access)
        self._boxes = Boxes()
        self._fresh: dict[str, SandboxInfo] = {}

    # Connection

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        access = Access.resolve(environ, options)
        if importlib.util.find_spec("e2b") is None:
            raise hosted.missing_dependency("e2b", "E2B's SDK")
        return cls(access)

    @property
    def account(self) -> str:
        return self._access.account

    def credentials(self) -> dict[str, str]:
        return self._access.credentials()

    async def aclose(self) -> None:
        self._boxes.clear()
        self._fresh.clear()
        from lowtide.providers.e2b import pool
        from lowtide.providers.e2b.process import all_closed

        await all_closed()
        pool.leave(self)

    def _sdk(self) -> type[AsyncSandbox]:
        """The SDK's class, imported on first use."""
        from lowtide.providers.e2b import forked, pool

        pool.join(self)
        forked.repair()
        from lowtide.providers.e2b.sdk import sandbox_class

        return sandbox_class()

    # Lifecycle

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            self._sdk()
            options = options_of(spec)
            asked = creation.arguments(spec, options, self._access.template)
        began = time.monotonic()
        try:
            made = await self._create(asked, CREATE_SECONDS)
        except errors.SandboxUnavailableError as error:
            # What the request made has our labels; if it made nothing, the same key can be used again.
            left = CREATE_SECONDS - (time.monotonic() - began)
            if isinstance(error, errors.RateLimitError) or not _was_lost(error) or left < 5:
                raise
            log.info("lease %s: the answer to create was lost; looking for what it made", spec.lease_id)
            found = await self.find(spec)
            if found is not None:
                return found
            made = await self._create(asked, left)
        now = datetime.now(UTC)
        info = SandboxInfo(
            sandbox_id=made.sandbox_id,
            state=SandboxState.RUNNING,
            labels=asked["metadata"],
            created_at=now,
            expires_at=now + timedelta(seconds=asked["timeout"]),
        )
        self._boxes.keep(made.sandbox_id, Box(made, spec.working_dir, options.user))
        self._fresh[made.sandbox_id] = info
        return info

    async def _create(self, asked: dict[str, Any], seconds: float) -> AsyncSandbox:
        sdk = self._sdk()
        keyed = creation.with_key(sdk, asked["metadata"][_LEASE])
        parameters = {**self._access.parameters(), **keyed, "request_timeout": seconds}
        with mapped():
            work = sdk.create(**asked, **parameters)
            return await within(seconds + 2.0, work, "create")

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        async for info in self.list({_LEASE: spec.lease_id}):
            return info
        return None

    async def get(self, sandbox_id: str) -> SandboxInfo:
        detail = await self._detail(sandbox_id)
        return info_of(detail)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        fresh = self._fresh.pop(sandbox_id, None)
        deadline = time.monotonic() + CALL_SECONDS
        delay = 0.05
        while True:
            box = await self._box(sandbox_id)
            with mapped(sandbox_id):
                healthy = await self._call(box.sdk.is_running(), "health", sandbox_id)
            if healthy:
                return fresh or await self.get(sandbox_id)
            info = await self._existing(sandbox_id)
            if info.state is SandboxState.PAUSED:
                return info
            if fresh is not None or time.monotonic() > deadline:
                raise failed(sandbox_id)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        sdk = self._sdk()
        from e2b import SandboxQuery
        from e2b import SandboxState as State

        query = SandboxQuery(metadata=dict(labels) or None, state=[State.RUNNING, State.PAUSED])
        with mapped():
            pages = sdk.list(query=query, limit=100, **self._access.parameters())
        while pages.has_next:
            with mapped():
                found = await self._call(pages.next_items(), "list")
            for one in found:
                matches = all(one.metadata.get(key) == value for key, value in labels.items())
                if matches and Labels.from_dict(one.metadata) is not None:
                    yield info_of(one)

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        if not _is_id(sandbox_id):
            return False
        self._boxes.drop(sandbox_id)
        self._fresh.pop(sandbox_id, None)
        self._sdk()
        with mapped(sandbox_id):
            ended = await within(KILL_SECONDS, self._control.kill(sandbox_id), "kill", sandbox_id)
        if ended:
            await self._confirm(sandbox_id)
        return ended

    async def _confirm(self, sandbox_id: str) -> None:
        """Until it is really gone: an acknowledged kill is not always one that happened."""
        deadline = time.monotonic() + CONFIRM_SECONDS
        delay = 0.05
        while True:
            try:
                with mapped(sandbox_id):
                    if not await self._call(self._control.exists(sandbox_id), "get", sandbox_id):
                        return
                    if delay >= 0.4:  # not just a moment's lag: ask again
                        await self._call(self._control.kill(sandbox_id), "kill", sandbox_id)
                wait = delay
            except errors.LowtideError as error:
                # No answer is no reason to forget that the end was acknowledged.
                wait = max(delay, getattr(error, "retry_after_seconds", None) or 0.0)
                if not error.retryable or time.monotonic() + wait > deadline:
                    raise
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(wait)
            delay = min(delay * 2, 1.0)
        raise errors.SandboxUnavailableError(
            f"E2B acknowledged the end of {sandbox_id}, but it is still there",
            provider=self.name,
            sandbox_id=sandbox_id,
        )

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        sdk = self._sdk()
        seconds = max(1, math.ceil(lifetime_seconds))
        try:
            with mapped(sandbox_id):
                setting = sdk.set_timeout(sandbox_id, timeout=seconds, **self._access.parameters())
                await self._call(setting, "set_timeout", sandbox_id)
        except errors.SandboxNotFoundError:
            if (await self.get(sandbox_id)).state is SandboxState.PAUSED:
                return None  # a paused one has no clock that could run out
            raise
        return datetime.now(UTC) + timedelta(seconds=seconds)

    async def pause(self, sandbox_id: str) -> None:
        sdk = self._sdk()
        with mapped(sandbox_id):
            pausing = sdk.pause(sandbox_id, **self._access.parameters())  # False: it already was
            await within(SNAPSHOT_SECONDS, pausing, "pause", sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        """E2B gives it a new lifetime, because a paused one has none; renewal takes over from there."""
        sdk = self._sdk()
        with mapped(sandbox_id):
            resuming = sdk.connect(sandbox_id, timeout=creation.DEFAULT_LIFETIME, **self._access.parameters())
            resumed = await within(SNAPSHOT_SECONDS, resuming, "resume", sandbox_id)
        known = self._boxes.get(sandbox_id)
        if known is not None:
            self._boxes.keep(sandbox_id, Box(resumed, known.working_dir, known.user))

    # Commands

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        from lowtide.providers.e2b.process import E2BProcess

        async def start(box: Box) -> ProcessHandle:
            return await E2BProcess.start(
                box.sdk,
                spec,
                user=box.user,
                working_dir=box.working_dir,
                explain=lambda error: self._explained(error, sandbox_id),
            )

        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            try:
                with mapped(sandbox_id):
                    started = await start(box)
            except errors.AuthenticationError:
                # envd did not take the token it was made with: it has another one since.
                with mapped(sandbox_id):
                    started = await start(await self._box(sandbox_id, anew=True))
            self._fresh.pop(sandbox_id, None)
            return started

    async def run_code(
        self, sandbox_id: str, code: str, *, language: str, context: str | None, timeout_seconds: float | None
    ) -> CodeResult:
        if importlib.util.find_spec("e2b_code_interpreter") is None:
            raise hosted.missing_dependency("e2b", "E2B's SDK")
        from lowtide.providers.e2b import code as interpreter

        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            with mapped(sandbox_id):
                return await interpreter.run(
                    box.sdk, code, language=language, context=context, timeout_seconds=timeout_seconds
                )

    # Files and ports

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        from lowtide.providers.e2b import files

        if not _is_text(path):
            async for chunk in derived.read_file(self, sandbox_id, path):
                yield chunk
            return
        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            with mapped(sandbox_id, path=path):
                async with contextlib.aclosing(files.read(box.sdk, path, user=box.user)) as chunks:  # type: ignore[type-var]
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
        from lowtide.providers.e2b import files

        if not _is_text(path):
            return await derived.write_file(self, sandbox_id, path, chunks, mode=mode)
        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            with mapped(sandbox_id, path=path):
                return await files.write(box.sdk, path, chunks, size=size, user=box.user, mode=mode)

    async def url(self, sandbox_id: str, port: int) -> Url:
        box = await self._box(sandbox_id)
        headers = {}
        if box.sdk.traffic_access_token:
            headers["E2B-Traffic-Access-Token"] = box.sdk.traffic_access_token
        if self._access.sandbox_url is not None:
            # One address for every sandbox: the headers say which one, and which port.
            headers |= {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}
            return Url(url=self._access.sandbox_url.rstrip("/"), headers=headers)
        return Url(url=f"https://{box.sdk.get_host(port)}", headers=headers)

    # Snapshots

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        sdk = self._sdk()
        with mapped(sandbox_id):
            parameters = {**self._access.parameters(), "request_timeout": SNAPSHOT_SECONDS}
            taking = sdk.create_snapshot(sandbox_id, name=name.lower(), **parameters)
            made = await within(SNAPSHOT_SECONDS + 5.0, taking, "snapshot", sandbox_id)
        return str(made.snapshot_id)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        sdk = self._sdk()
        with mapped():
            deleting = sdk.delete_snapshot(snapshot_id, **self._access.parameters())
            return bool(await self._call(deleting, "delete a snapshot"))

    async def list_snapshots(self) -> Sequence[str]:
        sdk = self._sdk()
        found: list[str] = []
        with mapped():
            pages = sdk.list_snapshots(limit=100, **self._access.parameters())
            while pages.has_next:
                items = await self._call(pages.next_items(), "list snapshots")
                found += [str(one.snapshot_id) for one in items]
        return found

    # Inside

    async def _call(self, work: Coroutine[Any, Any, T], what: str, sandbox_id: str | None = None) -> T:
        return await within(CALL_SECONDS, work, what, sandbox_id)

    async def _detail(self, sandbox_id: str) -> Any:
        """Everything E2B says about one. It changes nothing, where the SDK's ``connect`` resumes and extends."""
        self._sdk()
        from e2b.api import handle_api_exception
        from e2b.api.client.api.sandboxes import get_sandboxes_sandbox_id
        from e2b.api.client_async import get_api_client
        from e2b.connection_config import ConnectionConfig

        missing = errors.SandboxNotFoundError(
            f"no sandbox {sandbox_id} in this E2B account", provider=self.name, sandbox_id=sandbox_id
        )
        if not _is_id(sandbox_id):
            raise missing
        with mapped(sandbox_id):
            client = get_api_client(ConnectionConfig(**self._access.parameters()))
            asking = get_sandboxes_sandbox_id.asyncio_detailed(sandbox_id, client=client)
            res = await self._call(asking, "get", sandbox_id)
            if res.status_code == 404:
                raise missing
            if res.status_code >= 300 or not hasattr(res.parsed, "sandbox_id"):
                raise handle_api_exception(res)
        return res.parsed

    async def _existing(self, sandbox_id: str) -> SandboxInfo:
        """Raises SandboxGone when it is no more."""
        try:
            return await self.get(sandbox_id)
        except errors.SandboxNotFoundError as error:
            raise gone(sandbox_id) from error

    async def _box(self, sandbox_id: str, *, anew: bool = False) -> Box:
        known = self._boxes.get(sandbox_id)
        if known is not None and not anew:
            return known
        try:
            detail = await self._detail(sandbox_id)
        except errors.SandboxNotFoundError as error:
            raise gone(sandbox_id) from error
        box = Box.of(self._sdk(), detail, self._access.parameters())
        self._boxes.keep(sandbox_id, box)
        return box

    @contextlib.asynccontextmanager
    async def _inside(self, sandbox_id: str) -> AsyncIterator[None]:
        """What goes wrong on the way into a sandbox, told as what it means."""
        try:
            yield
        except (errors.SandboxGone, errors.SandboxUnavailableError, errors.SandboxNotFoundError) as error:
            meant = await self._explained(error, sandbox_id)
            if meant is error:
                raise
            raise meant from error

    async def _explained(self, error: errors.LowtideError, sandbox_id: str) -> errors.LowtideError:
        """Gone, paused, or really only unreachable: the control plane knows."""
        ambiguous = (errors.SandboxGone, errors.SandboxUnavailableError, errors.SandboxNotFoundError)
        if not isinstance(error, ambiguous) or isinstance(error, errors.RateLimitError):
            return error
        try:
            info = await self.get(sandbox_id)
        except errors.SandboxNotFoundError:
            self._boxes.drop(sandbox_id)
            return error if isinstance(error, errors.SandboxGone) else gone(sandbox_id)
        except errors.LowtideError:
            return error
        if info.state is SandboxState.PAUSED:
            return errors.SandboxUnavailableError(
                f"sandbox {sandbox_id} is paused; resume() it first",
                retryable=False,
                provider=self.name,
                sandbox_id=sandbox_id,
            )
        if isinstance(error, errors.SandboxUnavailableError):
            return error
        if sandbox_id in self._fresh:  # E2B answers a create when it runs: what does not by then, never will
            return failed(sandbox_id)
        return errors.SandboxUnavailableError(str(error), provider=self.name, sandbox_id=sandbox_id)


def _was_lost(error: errors.LowtideError) -> bool:
    """Whether the connection broke, or somebody on the way gave up: nobody knows what the request did."""
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.TransportError):
        return not isinstance(cause, httpx.ConnectError | httpx.TimeoutException)
    # The newer SDKs have sent it again by themselves, under the same key; the older ones have not.
    return status_of(cause) in (502, 504)


def _is_id(sandbox_id: str) -> bool:
    """E2B's ids are plain words. Anything else must not become part of a path."""
    return bool(sandbox_id) and sandbox_id.isascii() and sandbox_id.replace("-", "").isalnum()


def _is_text(path: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in path)
