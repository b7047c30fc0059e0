"""Daytona as a provider: one hosted sandbox each, made and ended through Daytona's async SDK."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import re
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
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
)
from lowtide.providers.daytona import creation, states
from lowtide.providers.daytona.access import Access, missing_dependency
from lowtide.providers.daytona.client import Client
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import mapped, status_of, was_cut
from lowtide.providers.daytona.options import DaytonaOptions

if TYPE_CHECKING:
    from daytona import AsyncSandbox

    from lowtide.providers.daytona.sessions import Sessions

log = logging.getLogger("lowtide.daytona")

T = TypeVar("T")

CREATE_SECONDS = 60.0
CALL_SECONDS = 30.0
STATE_SECONDS = 300.0
"""How long a change of state (start, stop, pause, snapshot) may take."""
_KNOWN_BOXES = 2048
_PAGE = 100
_LEASE = LABEL_PREFIX + "lease"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_PREVIEW_HEADERS = {"X-Daytona-Skip-Preview-Warning": "true"}


@dataclass(slots=True)
class Box:
    """What commands in one sandbox need: the SDK's object, its sessions, and where commands start."""

    sdk: AsyncSandbox
    sessions: Sessions
    working_dir: str | None = None


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
        self._boxes: OrderedDict[str, Box] = OrderedDict()
        self._fresh: dict[str, SandboxInfo] = {}

    # Connection

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        access = Access.resolve(environ, options)
        if importlib.util.find_spec("daytona") is None:
            raise missing_dependency()
        return cls(access)

    @property
    def account(self) -> str:
        return self._access.account

    def credentials(self) -> dict[str, str]:
        return self._access.credentials()

    async def aclose(self) -> None:
        for box in self._boxes.values():
            box.sessions.forget()
        self._boxes.clear()
        self._fresh.clear()
        await self._client.aclose()

    # Lifecycle

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
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
        self._remember(made, spec.working_dir)
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
        return states.info(await self._detail(sandbox_id))

    async def attach(self, *, labels: Mapping[str, str]) -> SandboxInfo:
        """The one sandbox with these labels, confirmed by its id. Missing is an error, and so is more than one."""
        found = {info.sandbox_id: info async for info in self._listed(labels)}
        there = []
        for sandbox_id in found:
            with contextlib.suppress(errors.SandboxNotFoundError):
                there.append(await self.get(sandbox_id))
        if len(there) == 1:
            return there[0]
        shown = ", ".join(f"{key}={value}" for key, value in labels.items())
        if there:
            raise errors.ValidationError(
                f"{len(there)} sandboxes have the labels {shown}: "
                + ", ".join(info.sandbox_id for info in there),
                argument="labels",
                provider=self.name,
            )
        raise errors.SandboxNotFoundError(f"no sandbox has the labels {shown}", provider=self.name)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        fresh = self._fresh.pop(sandbox_id, None)
        if fresh is not None and fresh.state is SandboxState.RUNNING:
            return fresh
        delay = 0.05
        while True:
            try:
                info = await self.get(sandbox_id)
            except errors.SandboxNotFoundError as error:
                raise _gone(sandbox_id) from error
            if info.state is SandboxState.ENDING:
                raise _gone(sandbox_id)
            if info.state is SandboxState.FAILED:
                raise errors.SandboxFailedError(
                    f"sandbox {sandbox_id} could not be started: {info.reason or 'error'}",
                    reason=info.reason or "error",
                    provider=self.name,
                    sandbox_id=sandbox_id,
                )
            if info.state is not SandboxState.PENDING:
                return info
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 1.0)

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        async for info in self._listed(labels):
            yield info

    async def _listed(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        """Below the SDK's own list, which fails for all when one foreign sandbox has an unknown language."""
        api: Any = (await self._client.sdk())._sandbox_api
        cursor: str | None = None
        while True:
            with mapped():
                asking = api.list_sandboxes(
                    labels=json.dumps(dict(labels)) if labels else None, cursor=cursor, limit=_PAGE
                )
                page = await self._call(asking, "list")
            for one in page.items:
                info = states.info(one)
                matches = all(info.labels.get(key) == value for key, value in labels.items())
                if matches and info.state is not SandboxState.GONE:
                    yield info
            cursor = page.next_cursor
            if not cursor:
                return

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        from lowtide.providers.daytona import endings

        if not _is_name(sandbox_id):
            return False
        self._forget(sandbox_id)
        return await endings.delete(await self._client.sdk(), sandbox_id)

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        box = await self._box(sandbox_id, missing=errors.SandboxNotFoundError)
        lives = creation.minutes(lifetime_seconds)
        with mapped(sandbox_id):
            await self._call(box.sdk.set_ttl(lives), "set_ttl", sandbox_id)
            stops = int(box.sdk.auto_stop_interval or 0)
            if 0 < stops < lives:  # left alone for that long, as one that is kept, it would be stopped first
                await self._call(box.sdk.set_autostop_interval(lives), "set_autostop_interval", sandbox_id)
        with contextlib.suppress(errors.SandboxUnavailableError, errors.ValidationError), mapped(sandbox_id):
            await self._call(box.sdk.refresh_activity(), "refresh_activity", sandbox_id)
        return datetime.now(UTC) + timedelta(minutes=lives)

    # Stopping without deleting

    async def stop_only(self, sandbox_id: str, *, delete_after_seconds: float) -> None:
        """Stopped, and deleted by Daytona itself after that time: both clocks are set before it stops."""
        box = await self._box(sandbox_id, missing=errors.SandboxNotFoundError)
        after = creation.minutes(delete_after_seconds)
        with mapped(sandbox_id):
            await self._call(box.sdk.set_auto_delete_interval(after), "set_auto_delete_interval", sandbox_id)
            await self._call(box.sdk.set_ttl(after), "set_ttl", sandbox_id)
        await self.stop(sandbox_id)

    async def stop(self, sandbox_id: str) -> None:
        """Silent when it does not run."""
        info = await self.get(sandbox_id)
        if info.state is not SandboxState.STOPPED:
            box = await self._box(sandbox_id, missing=errors.SandboxNotFoundError)
            with mapped(sandbox_id):
                await within(STATE_SECONDS, box.sdk.stop(timeout=0), "stop", sandbox_id)
        self._forget(sandbox_id)

    async def start(self, sandbox_id: str) -> None:
        """From stopped, archived or paused; silent when it runs."""
        box = await self._box(sandbox_id, missing=errors.SandboxNotFoundError, anew=True)
        if states.info(box.sdk).state is not SandboxState.RUNNING:
            with mapped(sandbox_id):
                await within(STATE_SECONDS, box.sdk.start(timeout=0), "start", sandbox_id)

    async def archive(self, sandbox_id: str) -> None:
        """Its files go to object storage. It is stopped first; `start` brings it back."""
        await self.stop(sandbox_id)
        box = await self._box(sandbox_id, missing=errors.SandboxNotFoundError)
        with mapped(sandbox_id):
            await self._call(box.sdk.archive(), "archive", sandbox_id)
        await self._until(sandbox_id, "archived")
        self._forget(sandbox_id)

    async def pause(self, sandbox_id: str) -> None:
        box = await self._box(sandbox_id, missing=errors.SandboxNotFoundError)
        try:
            with mapped(sandbox_id):
                await within(STATE_SECONDS, box.sdk.pause(timeout=0), "pause", sandbox_id)
        except errors.ValidationError as error:
            raise errors.UnsupportedError(
                f"Daytona does not pause this sandbox: {error}",
                feature="pause",
                alternative="a snapshot whose class can be paused",
                provider=self.name,
                sandbox_id=sandbox_id,
            ) from error
        self._forget(sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        await self.start(sandbox_id)

    # Commands

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        from lowtide.providers.daytona.process import DaytonaProcess
        from lowtide.providers.daytona.terminal import DaytonaTerminal

        async def explain(error: errors.LowtideError) -> errors.LowtideError:
            return await self._explained(error, sandbox_id)

        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
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

        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
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
        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            async with contextlib.aclosing(files.read(box.sdk, path)) as chunks:  # type: ignore[type-var]
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
        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            return await files.write(self, box.sdk, path, chunks, mode=mode)

    async def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        async for chunk in derived.DerivedTrees(self).read_tree(sandbox_id, path):
            yield chunk

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        from lowtide.providers.daytona import files

        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            await files.write_tree(self, box.sdk, path, chunks)

    async def url(self, sandbox_id: str, port: int) -> Url:
        async with self._inside(sandbox_id):
            box = await self._box(sandbox_id)
            with mapped(sandbox_id):
                link = await self._call(box.sdk.get_preview_link(port), "preview link", sandbox_id)
        headers = dict(_PREVIEW_HEADERS)
        if link.token:
            headers["X-Daytona-Preview-Token"] = link.token
        return Url(url=str(link.url).rstrip("/"), headers=headers)

    # Snapshots

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        box = await self._box(sandbox_id)
        sdk = await self._client.sdk()
        with mapped(sandbox_id):
            taking = box.sdk.create_snapshot(name, timeout=0)
            await within(STATE_SECONDS, taking, "snapshot", sandbox_id)
            deadline = time.monotonic() + STATE_SECONDS
            while str(
                getattr((await self._call(sdk.snapshot.get(name), "snapshot")).state, "value", "")
            ) not in ("active", "inactive"):
                if time.monotonic() > deadline:
                    raise errors.RequestTimeoutError(
                        f"snapshot {name} did not become active", provider=self.name, sandbox_id=sandbox_id
                    )
                await asyncio.sleep(0.2)
        return name

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        sdk = await self._client.sdk()
        try:
            with mapped():
                await self._call(sdk.snapshot.delete(snapshot_id), "delete a snapshot")
        except errors.SandboxNotFoundError:
            return False
        return True

    async def list_snapshots(self) -> Sequence[str]:
        """The account's own, not those that Daytona offers to everybody."""
        sdk = await self._client.sdk()
        found: list[str] = []
        page = 1
        while True:
            with mapped():
                listed = await self._call(sdk.snapshot.list(page=page, limit=_PAGE), "list snapshots")
            found += [
                str(one.name)
                for one in listed.items
                if not one.general and str(getattr(one.state, "value", one.state)) != "removing"
            ]
            if page >= int(listed.total_pages or 1):
                return found
            page += 1

    # Inside

    async def _call(self, work: Coroutine[Any, Any, T], what: str, sandbox_id: str | None = None) -> T:
        return await within(CALL_SECONDS, work, what, sandbox_id)

    async def _detail(self, sandbox_id: str) -> Any:
        missing = errors.SandboxNotFoundError(
            f"no sandbox {sandbox_id} in this Daytona account", provider=self.name, sandbox_id=sandbox_id
        )
        if not _is_name(sandbox_id):
            raise missing
        api: Any = (await self._client.sdk())._sandbox_api
        try:
            with mapped(sandbox_id):
                detail = await self._call(api.get_sandbox(sandbox_id), "get", sandbox_id)
        except (errors.SandboxNotFoundError, errors.SandboxGone) as error:
            raise missing from error
        if states.word(detail) == "destroyed":
            raise missing
        return detail

    async def _until(self, sandbox_id: str, word: str) -> None:
        deadline = time.monotonic() + STATE_SECONDS
        delay = 0.05
        while (found := states.word(await self._detail(sandbox_id))) != word:
            if found in ("error", "build_failed") or time.monotonic() > deadline:
                raise errors.SandboxUnavailableError(
                    f"sandbox {sandbox_id} is {found}, not {word}", provider=self.name, sandbox_id=sandbox_id
                )
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 1.0)

    async def _box(
        self, sandbox_id: str, *, anew: bool = False, missing: type[errors.SandboxError] | None = None
    ) -> Box:
        known = self._boxes.get(sandbox_id)
        if known is not None and not anew:
            return known
        sdk = await self._client.sdk()
        try:
            if not _is_name(sandbox_id):
                raise errors.SandboxNotFoundError(f"no sandbox {sandbox_id}", provider=self.name)
            with mapped(sandbox_id):
                found = await self._call(sdk.get(sandbox_id), "get", sandbox_id)
        except errors.SandboxNotFoundError as error:
            if missing is errors.SandboxNotFoundError:
                raise
            raise _gone(sandbox_id) from error
        return self._remember(found, (found.labels or {}).get(creation.WORKING_DIR))

    def _remember(self, found: AsyncSandbox, working_dir: str | None) -> Box:
        from lowtide.providers.daytona.sessions import Sessions

        box = self._boxes[found.id] = Box(found, Sessions(found), working_dir)
        while len(self._boxes) > _KNOWN_BOXES:
            self._boxes.popitem(last=False)
        return box

    def _forget(self, sandbox_id: str) -> None:
        self._fresh.pop(sandbox_id, None)
        box = self._boxes.pop(sandbox_id, None)
        if box is not None:
            box.sessions.forget()

    @contextlib.asynccontextmanager
    async def _inside(self, sandbox_id: str) -> AsyncIterator[None]:
        """What goes wrong on the way into a sandbox, told as what it means."""
        try:
            yield
        except errors.LowtideError as error:
            meant = await self._explained(error, sandbox_id)
            if meant is error:
                raise
            raise meant from error

    async def _explained(self, error: errors.LowtideError, sandbox_id: str) -> errors.LowtideError:
        """Gone, stopped, or really only unreachable: the control plane knows."""
        clear = (errors.SandboxFileError, errors.RateLimitError, errors.UnsupportedError)
        ambiguous = (errors.SandboxError, errors.ValidationError, errors.AuthenticationError)
        if isinstance(error, clear) or not isinstance(error, ambiguous):
            return error
        context: dict[str, Any] = {"provider": self.name, "sandbox_id": sandbox_id}
        try:
            info = await self.get(sandbox_id)
        except errors.SandboxNotFoundError:
            self._forget(sandbox_id)
            return error if isinstance(error, errors.SandboxGone) else _gone(sandbox_id)
        except errors.LowtideError:
            return error
        if info.state in (SandboxState.ENDING, SandboxState.GONE):
            return _gone(sandbox_id)
        if info.state in (SandboxState.STOPPED, SandboxState.PAUSED):
            self._forget(sandbox_id)
            return errors.SandboxUnavailableError(
                f"sandbox {sandbox_id} is {info.state.value}; start it first", retryable=False, **context
            )
        if isinstance(error, errors.SandboxGone | errors.SandboxNotFoundError):
            # It is there: what was not found is something in it, or the way to it lags behind.
            return errors.SandboxUnavailableError(str(error), **context)
        return error


def _gone(sandbox_id: str) -> errors.SandboxGone:
    return errors.SandboxGone(
        f"sandbox {sandbox_id} has ended", reason="ended", provider="daytona", sandbox_id=sandbox_id
    )


def _is_name(sandbox_id: str) -> bool:
    """Ids and names are plain words. Anything else must not become part of a path."""
    return _NAME.fullmatch(sandbox_id) is not None


def _is_plain(path: str) -> bool:
    """Whether the transfer carries this name: it goes through a header, which takes printable ASCII only."""
    return path.isascii() and path.isprintable()
