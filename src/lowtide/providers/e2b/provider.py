"""E2B as a provider: one microVM per sandbox, made and ended through E2B's async SDK."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from lowtide import errors
from lowtide.providers import derived
from lowtide.providers.base import (
    LABEL_PREFIX,
    Capability,
    CodeResult,
    Labels,
    NetworkMode,
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
)
from lowtide.providers.e2b.access import Access, missing_dependency
from lowtide.providers.e2b.deadline import within
from lowtide.providers.e2b.failures import mapped
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
_DEFAULT_LIFETIME = 300
_KNOWN_BOXES = 2048
_LEASE = LABEL_PREFIX + "lease"
_WORKING_DIR = LABEL_PREFIX + "cwd"
_USER = LABEL_PREFIX + "user"
_ANYWHERE = "0.0.0.0/0"


@dataclass(slots=True)
class Box:
    """What commands in one sandbox need: the SDK's object, and what its metadata says about them."""

    sdk: AsyncSandbox
    working_dir: str | None = None
    user: str | None = None


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
        self._boxes: OrderedDict[str, Box] = OrderedDict()
        self._fresh: dict[str, SandboxInfo] = {}

    # Connection

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        access = Access.resolve(environ, options)
        if importlib.util.find_spec("e2b") is None:
            raise missing_dependency()
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

        pool.leave(self)

    def _sdk(self) -> type[AsyncSandbox]:
        """The SDK's class, imported on first use."""
        from lowtide.providers.e2b import forked, pool

        pool.join(self)
        forked.repair()
        from e2b import AsyncSandbox

        found: type[AsyncSandbox] = AsyncSandbox
        return found

    # Lifecycle

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        options = _options(spec)
        asked = _create_arguments(spec, options, self._access.template)
        began = time.monotonic()
        try:
            made = await self._create(asked, CREATE_SECONDS)
        except errors.SandboxUnavailableError as error:
            # The connection broke with the request on its way. What it made has our labels; if it made
            # nothing, the same key can be used again.
            left = CREATE_SECONDS - (time.monotonic() - began)
            if isinstance(error, errors.RateLimitError) or not _was_cut(error) or left < 5:
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
        self._remember(made.sandbox_id, Box(made, spec.working_dir, options.user))
        self._fresh[made.sandbox_id] = info
        return info

    async def _create(self, asked: dict[str, Any], seconds: float) -> AsyncSandbox:
        sdk = self._sdk()
        keyed = _with_key(sdk, asked["metadata"][_LEASE])
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
        return _info(detail)

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
                raise _failed(sandbox_id)
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
                    yield _info(one)

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        if not _is_id(sandbox_id):
            return False
        self._boxes.pop(sandbox_id, None)
        self._fresh.pop(sandbox_id, None)
        sdk = self._sdk()
        with mapped(sandbox_id):
            # Its own retries would hide a hanging or failing kill from the caller's deadline.
            parameters = {**self._access.parameters(), **_without_retries(sdk)}
            killing = sdk.kill(sandbox_id, request_timeout=KILL_SECONDS, **parameters)
            ended = await within(KILL_SECONDS + 1.0, killing, "kill", sandbox_id)
            if ended:
                await self._confirm(sandbox_id)
        return bool(ended)

    async def _confirm(self, sandbox_id: str) -> None:
        """Until it is really gone: an acknowledged kill is not always one that happened."""
        deadline = time.monotonic() + CONFIRM_SECONDS
        delay = 0.05
        while True:
            try:
                await self._detail(sandbox_id)
            except errors.SandboxNotFoundError:
                return
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)
            if delay >= 0.4:  # not just a moment's lag: ask again
                sdk = self._sdk()
                await self._call(sdk.kill(sandbox_id, **self._access.parameters()), "kill", sandbox_id)
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
            resuming = sdk.connect(sandbox_id, timeout=_DEFAULT_LIFETIME, **self._access.parameters())
            resumed = await within(SNAPSHOT_SECONDS, resuming, "resume", sandbox_id)
        known = self._boxes.get(sandbox_id)
        if known is not None:
            self._remember(sandbox_id, Box(resumed, known.working_dir, known.user))

    # Commands

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        from lowtide.providers.e2b.process import START_SECONDS, E2BProcess

        async def start(box: Box) -> ProcessHandle:
            return await within(
                START_SECONDS + 10.0,
                E2BProcess.start(
                    box.sdk,
                    spec,
                    user=box.user,
                    working_dir=box.working_dir,
                    explain=lambda error: self._explained(error, sandbox_id),
                ),
                "start a command",
                sandbox_id,
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
            raise missing_dependency()
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
            raise _gone(sandbox_id) from error

    async def _box(self, sandbox_id: str, *, anew: bool = False) -> Box:
        known = self._boxes.get(sandbox_id)
        if known is not None and not anew:
            return known
        try:
            detail = await self._detail(sandbox_id)
        except errors.SandboxNotFoundError as error:
            raise _gone(sandbox_id) from error
        box = _box_of(self._sdk(), detail, self._access.parameters())
        self._remember(sandbox_id, box)
        return box

    def _remember(self, sandbox_id: str, box: Box) -> None:
        self._boxes[sandbox_id] = box
        while len(self._boxes) > _KNOWN_BOXES:
            self._boxes.popitem(last=False)

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
            self._boxes.pop(sandbox_id, None)
            return error if isinstance(error, errors.SandboxGone) else _gone(sandbox_id)
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
            return _failed(sandbox_id)
        return errors.SandboxUnavailableError(str(error), provider=self.name, sandbox_id=sandbox_id)


def _create_arguments(spec: SandboxSpec, options: E2BOptions, template: str | None) -> dict[str, Any]:
    """What E2B is asked for. Raises ValidationError for what it could only refuse."""
    metadata = {str(key): str(value) for key, value in options.metadata.items()}
    reserved = next((key for key in metadata if key.startswith(LABEL_PREFIX)), None)
    if reserved is not None:
        raise errors.ValidationError(
            f"metadata {reserved!r} begins with {LABEL_PREFIX!r}, which is lowtide's own",
            argument="metadata",
            provider="e2b",
        )
    if spec.snapshot is not None and options.template is not None:
        raise errors.ValidationError(
            "a sandbox starts from a snapshot or from a template", argument="template", provider="e2b"
        )
    metadata.update(spec.labels.as_dict())
    if spec.working_dir is not None:
        metadata[_WORKING_DIR] = spec.working_dir
    if options.user is not None:
        metadata[_USER] = options.user
    asked: dict[str, Any] = {
        "template": spec.snapshot or options.template or template,
        "timeout": max(1, math.ceil(spec.lifetime_seconds or _DEFAULT_LIFETIME)),
        "metadata": metadata,
        "envs": dict(spec.environment),
        **_network(spec, options),
    }
    if options.on_timeout == "pause":
        asked["lifecycle"] = {"on_timeout": "pause", "auto_resume": options.auto_resume}
    elif options.auto_resume:
        raise errors.ValidationError(
            'auto_resume needs on_timeout="pause"', argument="auto_resume", provider="e2b"
        )
    if options.volumes:
        asked["volume_mounts"] = dict(options.volumes)
    if options.mcp is not None:
        asked["mcp"] = dict(options.mcp)
    return asked


def _network(spec: SandboxSpec, options: E2BOptions) -> dict[str, Any]:
    if spec.network is None:
        return {"network": dict(options.network)} if options.network is not None else {}
    if options.network is not None:
        raise errors.ValidationError(
            "network is given twice: as lowtide's and as E2B's own", argument="network", provider="e2b"
        )
    if spec.network.mode is NetworkMode.NONE:
        return {"allow_internet_access": False}
    if spec.network.mode is NetworkMode.ALLOW:
        return {"network": {"allow_out": [*spec.network.allow], "deny_out": [_ANYWHERE]}}
    return {"allow_internet_access": True}


def _options(spec: SandboxSpec) -> E2BOptions:
    if spec.options is None:
        return E2BOptions()
    if not isinstance(spec.options, E2BOptions):
        raise errors.ValidationError(
            f"options for e2b are E2BOptions, not {type(spec.options).__name__}", argument="provider_options"
        )
    return spec.options


def _with_key(sdk: type[AsyncSandbox], key: str) -> dict[str, Any]:
    """The idempotency key, as an argument or, for an SDK that has none yet, as the header it becomes."""
    if "idempotency_key" in _arguments_of(sdk.create):
        return {"idempotency_key": key}
    return {"headers": {"Idempotency-Key": key}}


def _without_retries(sdk: type[AsyncSandbox]) -> dict[str, Any]:
    return {"retries": 0} if "idempotency_key" in _arguments_of(sdk.create) else {}


def _arguments_of(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__func__", function).__code__
    return tuple(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])


def _was_cut(error: BaseException) -> bool:
    """Whether the connection broke, so that nobody knows what the request did."""
    import httpx

    return isinstance(error.__cause__, httpx.TransportError) and not isinstance(
        error.__cause__, httpx.ConnectError | httpx.TimeoutException
    )


def _box_of(sdk: type[AsyncSandbox], detail: Any, parameters: dict[str, Any]) -> Box:
    """The SDK's object for one that exists, without the side effects of its ``connect``."""
    from e2b.connection_config import ConnectionConfig
    from packaging.version import Version

    token = detail.envd_access_token if isinstance(detail.envd_access_token, str) else None
    headers = {"E2b-Sandbox-Id": detail.sandbox_id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
    if token is not None:
        headers["X-Access-Token"] = token
    metadata = _metadata(detail)
    return Box(
        sdk(
            sandbox_id=detail.sandbox_id,
            sandbox_domain=detail.domain if isinstance(detail.domain, str) else None,
            envd_version=Version(detail.envd_version),
            envd_access_token=token,
            traffic_access_token=None,
            connection_config=ConnectionConfig(extra_sandbox_headers=headers, **parameters),
        ),
        metadata.get(_WORKING_DIR),
        metadata.get(_USER),
    )


def _info(found: Any) -> SandboxInfo:
    paused = str(getattr(found.state, "value", found.state)) == "paused"
    return SandboxInfo(
        sandbox_id=found.sandbox_id,
        state=SandboxState.PAUSED if paused else SandboxState.RUNNING,
        labels=_metadata(found),
        created_at=found.started_at,
        expires_at=None if paused else found.end_at,
    )


def _metadata(found: Any) -> dict[str, str]:
    given = found.metadata
    if isinstance(given, dict):
        return dict(given)
    kept = getattr(given, "additional_properties", None)
    return dict(kept) if isinstance(kept, dict) else {}


def _failed(sandbox_id: str) -> errors.SandboxFailedError:
    return errors.SandboxFailedError(
        f"sandbox {sandbox_id} exists but does not run",
        reason="not running",
        provider="e2b",
        sandbox_id=sandbox_id,
    )


def _gone(sandbox_id: str) -> errors.SandboxGone:
    return errors.SandboxGone(
        f"sandbox {sandbox_id} has ended", reason="ended", provider="e2b", sandbox_id=sandbox_id
    )


def _is_id(sandbox_id: str) -> bool:
    """E2B's ids are plain words. Anything else must not become part of a path."""
    return bool(sandbox_id) and sandbox_id.isascii() and sandbox_id.replace("-", "").isalnum()


def _is_text(path: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in path)
