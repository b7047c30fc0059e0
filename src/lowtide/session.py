"""Session: a group of sandboxes with shared defaults and one end."""

from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, TypeVar

from lowtide import block_exit, logger, threads, validate
from lowtide.defaults import SandboxDefaults, SandboxOptions, explicit, resolve, shows_options
from lowtide.errors import (
    CleanupError,
    LowtideError,
    SandboxError,
    SandboxOwnedError,
    SessionClosedError,
    ValidationError,
)
from lowtide.lifecycle.lease import EndReport, new_lease_id
from lowtide.operation import Operation, generation
from lowtide.sandbox import Sandbox, in_event_loop

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from lowtide.function import RemoteFunction
    from lowtide.lookup import StateName
    from lowtide.providers.base import Provider, SandboxState

P = ParamSpec("P")
R = TypeVar("R")

log = logger.get("lowtide")


class Session:
    """Makes sandboxes with the same defaults, and ends all of them when it is closed.

    Keywords go on top of `defaults`. A sandbox that cannot be ended stays in the session, so that
    `close` can be tried again.
    """

    @shows_options
    def __init__(
        self,
        defaults: SandboxDefaults | Mapping[str, Any] | None = None,
        /,
        **options: Unpack[SandboxOptions],
    ) -> None:
        named = options.pop("defaults", None)
        self.defaults = SandboxDefaults()
        for layer in (defaults, named):
            if layer is not None:
                self.defaults = self.defaults.merged(explicit(layer))
        self.defaults = self.defaults.merged(options)
        self.session_id = new_lease_id()
        self._members: dict[int, Sandbox] = {}
        self._closed = False
        self._lock = threads.Lock()
        self._born = generation()
        self._parents: builtins.list[Sandbox] = []

    @property
    def sandbox_count(self) -> int:
        """How many sandboxes end with this session."""
        self._settle_in_child()
        return len(self._members)

    @property
    def closed(self) -> bool:
        """Whether it has ended and takes no new work."""
        return self._closed

    @shows_options
    def sandbox(self, **options: Unpack[SandboxOptions]) -> Sandbox:
        """A sandbox of this session, unstarted: it starts on ``with``, ``await``, `start` or its first use."""
        self._check_open()
        sandbox = Sandbox.__new__(Sandbox)
        sandbox._begin(resolve(self.defaults, options))
        self._register(sandbox)
        return sandbox

    def function(
        self,
        *,
        temp_dir: str = "/tmp",  # noqa: S108 - in the sandbox
        timeout_seconds: float | None = None,
        **options: Unpack[SandboxOptions],
    ) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]:
        """A decorator: the function's ``.remote()`` and ``.map()`` run it in a new sandbox of this session."""
        from lowtide import validate
        from lowtide.function import RemoteFunction

        self._check_open()
        validate.absolute_path("temp_dir", temp_dir)
        validate.seconds_or_none("timeout_seconds", timeout_seconds)
        resolve(self.defaults, options)  # refused here, and not at the first call

        def made(function: Callable[P, R]) -> RemoteFunction[P, R]:
            return RemoteFunction(self, function, options, temp_dir=temp_dir, timeout_seconds=timeout_seconds)

        return made

    def list(
        self,
        *,
        tags: Sequence[str] | None = None,
        provider: str | Provider | None = None,
        status: StateName | SandboxState | None = None,
        show_terminated: bool = False,
        adopt: bool = False,
        take: bool = False,
    ) -> Operation[builtins.list[Sandbox]]:
        """`Sandbox.list` with this session's tags added.

        With `adopt`: of these, what is orphaned, kept or released; it ends with this session from now
        on. What another living process owns is left out and named in a warning, unless `take`.
        """
        validate.flag("take", take)
        if validate.flag("adopt", adopt):
            self._check_open()
        finding = Sandbox.list(
            tags=self.defaults.merge_tags(tags),
            provider=provider if provider is not None else self.defaults.provider,
            status=status,
            show_terminated=show_terminated,
        )
        return Operation.start(self._found(finding, adopt, take))

    def from_id(
        self,
        sandbox_id: str,
        *,
        adopt: bool = True,
        take: bool = False,
        provider: str | Provider | None = None,
    ) -> Operation[Sandbox]:
        """`Sandbox.from_id`; unless `adopt` is false, it ends with this session. Raises as `adopt` does."""
        validate.flag("take", take)
        if validate.flag("adopt", adopt):
            self._check_open()
        chosen = provider if provider is not None else self.defaults.provider
        return Operation.start(self._found_one(Sandbox.from_id(sandbox_id, provider=chosen), adopt, take))

    def adopt(self, sandbox: Sandbox, *, take: bool = False) -> Operation[None]:
        """Its end is now this session's end: in the ledger, ownership moves here in one step.

        For what is orphaned, kept, released or this process's own. SandboxOwnedError for what another
        process owns that lives or cannot be seen from here; with `take` it is taken, and that process
        lets go: it neither renews nor ends it any more. Blocks in sync code. SandboxNotFoundError when
        it is gone.
        """
        self._check_open()
        if not isinstance(sandbox, Sandbox):
            raise ValidationError(
                f"sandbox must be a Sandbox, not {type(sandbox).__name__}", argument="sandbox"
            )
        validate.flag("take", take)
        if not sandbox._life.begun:
            raise ValidationError(
                "an unstarted sandbox cannot be adopted; start() it first", argument="sandbox"
            )
        return _now(self._adopt(sandbox, take))

    def release(self, sandbox: Sandbox) -> Operation[None]:
        """It leaves this session and goes on living: nobody here ends it. Blocks in sync code."""
        self._settle_in_child()
        if id(sandbox) not in self._members:
            raise ValidationError("that sandbox does not belong to this session", argument="sandbox")
        return _now(self._release(sandbox))

    def close(self, *, graceful_shutdown_seconds: float = 10.0) -> Operation[builtins.list[EndReport]]:
        """End every sandbox of the session, in parallel, those still being created too.

        From now on it takes no new work. CleanupError names all that could not be ended; they stay
        here and in the ledger, and `close` may be called again. What another process owns by now is left,
        and so is, in a forked child, all that is its parent's; the reports say so.
        """
        validate.grace("graceful_shutdown_seconds", graceful_shutdown_seconds)
        return self._begin_close(failed=False, grace_seconds=graceful_shutdown_seconds)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block_exit.leave(self._begin_close(failed=block_exit.is_failure(error)), error)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await block_exit.leave_async(self._begin_close(failed=block_exit.is_failure(error)), error)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session cannot be pickled: pass the sandbox_id of each, and Session.from_id() there"
        )

    def __repr__(self) -> str:
        return f"<Session {self.session_id} {'closed' if self._closed else 'open'} sandboxes={self.sandbox_count}>"

    def _settle_in_child(self) -> None:
        """After a fork: the sandboxes are the parent's; what is made from here on is this process's."""
        if self._born == generation():
            return
        self._born = generation()
        self._lock = threads.Lock()  # the parent's may have been held in the instant of the fork
        self._parents = list(self._members.values())
        self._members = {}

    def _begin_close(self, **how: Any) -> Operation[builtins.list[EndReport]]:
        self._settle_in_child()
        if self._parents and not self._members:
            self._closed = True
            return Operation.over([sandbox._life.left_to_parent() for sandbox in self._parents])
        if sys.is_finalizing():
            self._closed = True
            return Operation.over([sandbox._life.left_to_exit() for sandbox in self._members.values()])
        return Operation.start(self._close(**how), shielded=True)

    def _check_open(self) -> None:
        self._settle_in_child()
        if self._closed:
            raise SessionClosedError("the session has ended and takes no new work")

    def _register(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._check_open()
            self._members[id(sandbox)] = sandbox
            sandbox._life.session = self.session_id

    def _forget(self, sandbox: Sandbox) -> None:
        with self._lock:
            self._members.pop(id(sandbox), None)

    async def _close(self, **how: Any) -> builtins.list[EndReport]:
        with self._lock:
            self._closed = True
            for key in [key for key, sandbox in self._members.items() if not self._has(sandbox)]:
                del self._members[key]
            members = list(self._members.values())
            for sandbox in members:
                sandbox._life.session_closed = True
        ended = await asyncio.gather(
            *(self._end(sandbox, how) for sandbox in members), return_exceptions=True
        )
        reports = [outcome for outcome in ended if isinstance(outcome, EndReport)]
        reports += [sandbox._life.left_to_parent() for sandbox in self._parents]
        failures = [outcome for outcome in ended if isinstance(outcome, BaseException)]
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure
        problems = [_as_ours(failure) for failure in failures]
        if problems:
            raise CleanupError(
                f"{len(problems)} of {len(members)} sandboxes could not be ended; they stay in the ledger "
                "and are tried again, close() may be called again",
                problems,
            )
        return reports

    async def _end(self, sandbox: Sandbox, how: Mapping[str, Any]) -> EndReport:
        report = await sandbox._end(**how)
        self._forget(sandbox)
        return report

    def _has(self, sandbox: Sandbox) -> bool:
        """False once another session of this process has adopted it."""
        return sandbox._life.session == self.session_id

    async def _adopt(self, sandbox: Sandbox, take: bool) -> None:
        # Registered first: a close that comes in between ends it, and does not miss it.
        before = sandbox._life.session
        self._register(sandbox)
        try:
            await sandbox._life.adopt(session=self.session_id, take=take)
        except BaseException:
            self._forget(sandbox)
            sandbox._life.session = before
            raise

    async def _release(self, sandbox: Sandbox) -> None:
        from lowtide.lifecycle.leases import lifecycle

        if sandbox._life.begun:
            await sandbox._life.accepted_at()
            if sandbox._life.lease is not None:
                await lifecycle().release(sandbox._life.lease.lease_id)
        self._forget(sandbox)
        sandbox._life.session = None

    async def _found(
        self, finding: Operation[builtins.list[Sandbox]], adopt: bool, take: bool
    ) -> builtins.list[Sandbox]:
        sandboxes = await finding
        if not adopt:
            return sandboxes
        adopted = await asyncio.gather(*(self._adopt_if_unowned(sandbox, take) for sandbox in sandboxes))
        return [sandbox for sandbox, is_ours in zip(sandboxes, adopted, strict=True) if is_ours]

    async def _adopt_if_unowned(self, sandbox: Sandbox, take: bool) -> bool:
        try:
            await self._adopt(sandbox, take)
        except SandboxOwnedError as error:
            log.warning("not adopted: %s", error)
            return False
        return True

    async def _found_one(self, finding: Operation[Sandbox], adopt: bool, take: bool) -> Sandbox:
        sandbox = await finding
        if adopt:
            await self._adopt(sandbox, take)
        return sandbox


def _now(work: Any) -> Operation[None]:
    """Started; in sync code also done, so that a bare call has happened when it returns."""
    operation: Operation[None] = Operation.start(work)
    if not in_event_loop():
        operation.result()
    return operation


def _as_ours(error: BaseException) -> LowtideError:
    if isinstance(error, LowtideError):
        return error
    ours = SandboxError(f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours
