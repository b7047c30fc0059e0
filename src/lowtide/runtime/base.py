"""Runtime: the agent-facing layer: `connect()`, `run(action) -> observation`, `close()`.

The same on every provider; a provider's own module says only what differs there. Each call returns an
`Operation`: ``await`` it in async code, ask it for ``.result()`` in sync code.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lowtide import block_exit, logger, validate
from lowtide.actionserver.models import (
    DEFAULT_SESSION,
    Action,
    InvalidAction,
    Observation,
)
from lowtide.errors import (
    LowtideError,
    SandboxError,
    SandboxNotFoundError,
    SandboxTimeoutError,
    ValidationError,
)
from lowtide.operation import Operation, generation
from lowtide.providers.base import Capability, SandboxState, Url
from lowtide.runtime import keys
from lowtide.runtime.action_calls import ActionCalls
from lowtide.runtime.backend import Backend
from lowtide.runtime.config import RuntimeConfig
from lowtide.runtime.events import Step, Transcript, read_transcript, sink
from lowtide.sandbox import Sandbox

if TYPE_CHECKING:
    from types import TracebackType

    from lowtide.lifecycle.lease import EndReport, Keep

log = logger.get("lowtide.runtime")

PORTS = (4444, 4445)
_INSIDE_SECONDS = 5.0
_CLOSE_SECONDS = 120.0


class Runtime(ActionCalls):
    """One agent's sandbox. `sid` finds it again; `attach_to_existing` takes one that is there, and leaves it."""

    provider: ClassVar[str]
    honours_rm_all_containers: ClassVar[bool] = False

    def __init__(
        self,
        sid: str | None = None,
        config: RuntimeConfig | Mapping[str, Any] | None = None,
        event_stream: Any = None,
        attach_to_existing: bool = False,
        keep: str | Keep | None = None,
        *,
        sandbox_id: str | None = None,
        rm_all_containers: bool = True,
        transcript: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = RuntimeConfig.of(config)
        self.sid = sid or new_sid()
        self.attach_to_existing = attach_to_existing or sandbox_id is not None
        self.rm_all_containers = rm_all_containers
        self._keep = keep
        self._wanted_id = sandbox_id
        self._tag = session_tag(self.sid)
        self._sink = sink(event_stream)
        self._transcript = Transcript(transcript) if transcript is not None else None
        self._sandbox: Sandbox | None = None
        self._backend: Backend | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[EndReport | None] | None = None
        self._closed = False
        self._born = generation()
        if not rm_all_containers:
            self._warn_about_removal()
        if self.config.workspace_mount is not None:
            log.warning(
                "mounting a workspace is not supported by the %s runtime; %s is not mounted: upload() it",
                self.provider,
                self.config.workspace_mount,
            )

    # Begin and end.

    def connect(self) -> Operation[Self]:
        """Create or attach, start the action server, and wait until actions can run.

        One deadline for all of it (`connect_timeout_seconds`). When it fails at any step, what it made is
        ended before the error comes. SandboxNotFoundError when there is nothing to attach to.
        """
        return Operation.start(self._connect())

    def close(self, *, rm_all_containers: bool | None = None) -> EndReport | None:
        """`aclose`, waited for. None when there was nothing to end."""
        return self.aclose(rm_all_containers=rm_all_containers).result()

    def aclose(self, *, rm_all_containers: bool | None = None) -> Operation[EndReport | None]:
        """Check what is to be preserved, stop what runs inside, destroy, let go of what this end holds.

        Any number of times. Silent when the sandbox is already gone. An attached one is left as it is.
        """
        ending = self._close(failed=False, rm_all_containers=rm_all_containers)
        return Operation.start(ending, shielded=True)

    def __enter__(self) -> Self:
        connecting = self.connect()
        try:
            return connecting.result()
        except BaseException:  # __exit__ will not be called
            if not connecting._has_failed():  # interrupted by Ctrl+C, or by what a signal handler raised
                self.aclose()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._born == generation():
            ending = self._close(failed=block_exit.is_failure(error), rm_all_containers=None)
            block_exit.leave(Operation.start(ending, shielded=True), error)

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except Exception:
            raise
        except BaseException:  # cancelled: __aexit__ will not be called
            self.aclose()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._born == generation():
            ending = self._close(failed=block_exit.is_failure(error), rm_all_containers=None)
            await block_exit.leave_async(Operation.start(ending, shielded=True), error)

    # What it is.

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox below, for what an agent's view does not have."""
        if self._sandbox is None:
            raise SandboxError("the runtime is not connected; connect() first")
        return self._sandbox

    @property
    def sandbox_id(self) -> str | None:
        return self._sandbox.sandbox_id if self._sandbox is not None else None

    @property
    def connected(self) -> bool:
        return self._backend is not None and not self._closed

    def server_url(self) -> Operation[Url]:
        """The action server's address, where the provider gives it one, and the headers it needs besides the key."""
        return Operation.start(self._open_backend().url())

    def editor_url(self) -> Operation[str | None]:
        """The editor in the browser, or None where the image has none."""
        return Operation.start(self._open_backend().editor_url())

    def cancel(self, session: str = DEFAULT_SESSION, *, grace_seconds: float = 2.0) -> Operation[bool]:
        """End the session's running command: Ctrl+C, then TERM, then KILL. False when none runs."""
        return Operation.start(self._open_backend().cancel(session, grace_seconds))

    def replay(self, path: str | os.PathLike[str]) -> Operation[list[tuple[Step, Observation]]]:
        """Run the actions of a transcript again, in order: each step as it was, and what came of it now."""
        return Operation.start(self._replay(path))

    # Below, on the engine's loop.

    def _new_backend(self, sandbox: Sandbox) -> Backend:
        from lowtide.runtime.served import Served

        identity = sandbox.lease_id or sandbox.sandbox_id or ""
        return Served(
            sandbox,
            keys.key_for(identity),
            transport=self.config.transport,
            working_dir=self.config.working_dir,
        )

    def _sandbox_options(self) -> dict[str, Any]:
        """What the sandbox is created with."""
        from lowtide.providers import registry

        config = self.config
        options: dict[str, Any] = dict(config.sandbox)
        options["tags"] = (*options.get("tags", ()), self._tag)
        options.setdefault("provider", self.provider)
        if config.container_image is not None:
            options["container_image"] = config.container_image
        if config.environment_variables:
            options["environment_variables"] = dict(config.environment_variables)
        if config.provider_options is not None:
            options["provider_options"] = config.provider_options
        if self._keep is not None:
            options["keep"] = self._keep
        if Capability.PORTS in registry.provider_class(self.provider).capabilities:
            options.setdefault("ports", PORTS)
        return options

    async def _connect(self) -> Self:
        if self._closed:
            raise SandboxError("the runtime is closed; make a new one")
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect_once())
        # One caller that goes away must not take it from the others, nor from close.
        await asyncio.shield(self._connecting)
        return self

    async def _connect_once(self) -> None:
        backend: Backend | None = None
        try:
            async with asyncio.timeout(self.config.connect_timeout_seconds):
                self._sandbox = await self._found() if self.attach_to_existing else self._created()
                await self._sandbox._life.ready()
                backend = self._new_backend(self._sandbox)
                await backend.open(attach=self.attach_to_existing)
                self._backend = backend
        except BaseException as error:
            self._connecting = None
            said = await backend.last_log() if backend is not None else ""
            if backend is not None:
                await _quietly(backend.aclose())
            await self._drop(error)
            if isinstance(error, TimeoutError) and not isinstance(error, LowtideError):
                raise SandboxTimeoutError(
                    f"not connected within {self.config.connect_timeout_seconds:g} seconds{said}",
                    provider=self.provider,
                ) from error
            raise

    def _created(self) -> Sandbox:
        return Sandbox(**self._sandbox_options())

    async def _found(self) -> Sandbox:
        if self._wanted_id is not None:
            sandbox = await Sandbox.from_id(self._wanted_id, provider=self.provider)
        else:
            there = await Sandbox.list(tags=[self._tag], provider=self.provider)
            if len(there) != 1:
                ids = ", ".join(str(one.sandbox_id) for one in there)
                what = f"{len(there)} sandboxes ({ids}); name one with sandbox_id" if there else "no sandbox"
                raise SandboxNotFoundError(
                    f"there is {what} of session {self.sid!r} on provider {self.provider!r} to attach to",
                    provider=self.provider,
                )
            sandbox = there[0]
        if sandbox.status is not None and sandbox.status.terminal:
            raise SandboxNotFoundError(
                f"sandbox {sandbox.sandbox_id} has ended: {sandbox.status.value}",
                provider=self.provider,
                sandbox_id=sandbox.sandbox_id,
            )
        if sandbox.status in (SandboxState.PAUSED, SandboxState.STOPPED):
            await sandbox.resume()
        return sandbox

    async def _drop(self, error: BaseException) -> None:
        """Nothing that a failed connect made stays. Its own error is the one that counts."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None and not self.attach_to_existing:
            try:
                await asyncio.shield(sandbox._end(failed=True))
            except Exception as problem:  # its lease stays in the ledger and is tried again
                error.add_note(f"lowtide: and its sandbox could not be ended: {problem}")

    def _open_backend(self) -> Backend:
        if self._closed:
            raise SandboxError("the runtime is closed")
        if self._backend is None:
            raise SandboxError("the runtime is not connected; connect() first")
        return self._backend

    async def _run(self, action: Action, on_output: Callable[[str], None] | None) -> Observation:
        backend = self._open_backend()
        try:
            action.check()
        except InvalidAction as error:
            raise ValidationError(str(error), argument=action.kind) from None
        cause = await self._tell(action)
        observation = await backend.execute(action, on_output)
        await self._tell(observation, cause)
        return observation

    async def _tell(self, event: Action | Observation, cause: int | None = None) -> int | None:
        number = self._transcript.add(event, cause) if self._transcript is not None else None
        if self._sink is not None:
            # Somebody else's code may block: not on the loop that all of lowtide runs on.
            await asyncio.to_thread(self._sink, event)
        return number

    async def _replay(self, path: str | os.PathLike[str]) -> list[tuple[Step, Observation]]:
        return [(step, await self._run(step.action, None)) for step in read_transcript(path)]

    async def _close(self, *, failed: bool, rm_all_containers: bool | None) -> EndReport | None:
        if self._closing is None or (self._closing.done() and not self._closed):
            ending = self._close_once(failed, rm_all_containers)
            self._closing = asyncio.get_running_loop().create_task(ending)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                return await asyncio.shield(self._closing)
        except TimeoutError as error:
            if isinstance(error, LowtideError):
                raise
            raise SandboxTimeoutError(
                f"not closed within {_CLOSE_SECONDS:g} seconds; it goes on, and the ledger keeps the sandbox",
                provider=self.provider,
                sandbox_id=self.sandbox_id,
            ) from None

    async def _close_once(self, failed: bool, rm_all_containers: bool | None) -> EndReport | None:
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        sandbox, backend = self._sandbox, self._backend
        report = None
        try:
            if sandbox is not None and not self._preserved(sandbox, rm_all_containers):
                if backend is not None and self._will_be_destroyed(sandbox, failed):
                    await _quietly(backend.stop_inside(_INSIDE_SECONDS), _INSIDE_SECONDS)
                report = await sandbox._end(failed=failed)
            elif sandbox is not None and not self.attach_to_existing:
                await self._let_live(sandbox)
        finally:
            if backend is not None:
                await _quietly(backend.aclose())
            self._backend = None
        self._closed = True
        return report

    def _preserved(self, sandbox: Sandbox, rm_all_containers: bool | None) -> bool:
        """Whether this close leaves the sandbox alone. What an attached one was made by ends it."""
        if self.attach_to_existing:
            return True
        if rm_all_containers is False and self.rm_all_containers:
            self._warn_about_removal()
        remove = self.rm_all_containers if rm_all_containers is None else rm_all_containers
        return self.honours_rm_all_containers and not remove

    def _warn_about_removal(self) -> None:
        if not self.honours_rm_all_containers:
            log.warning(
                "rm_all_containers=False means nothing to the %s runtime: its sandbox ends with close(); keep='always' "
                "keeps it",
                self.provider,
            )

    def _will_be_destroyed(self, sandbox: Sandbox, failed: bool) -> bool:
        """By the keep policy and the provider's switches, as they are now."""
        from lowtide.lifecycle.keep import Fate, decide

        lease = sandbox._life.lease
        return lease is None or decide(lease, failed=failed).fate is Fate.DESTROY

    async def _let_live(self, sandbox: Sandbox) -> None:
        from lowtide.lifecycle.leases import lifecycle

        if sandbox.lease_id is not None:
            await lifecycle().release(sandbox.lease_id)


def new_sid() -> str:
    from lowtide.lifecycle.lease import new_lease_id

    return new_lease_id()


def session_tag(sid: str) -> str:
    """The label that a session's sandbox is found by. Every sid has one, also those no label may hold."""
    tag = f"sid-{sid}"
    try:
        return validate.tags("sid", [tag])[0]
    except ValidationError:
        return f"sid-{hashlib.sha256(sid.encode()).hexdigest()[:40]}"


async def _quietly(work: Any, seconds: float = 30.0) -> None:
    """What goes wrong here is second to the end of the sandbox, which covers it."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except Exception as error:
        log.info("while closing: %s: %s", type(error).__name__, error)
