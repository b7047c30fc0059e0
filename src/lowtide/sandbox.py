"""Sandbox: one isolated machine-like place, as people hold it, in sync and in async code."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Awaitable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from lowtide import block_exit, loops, validate
from lowtide.defaults import SandboxDefaults, SandboxOptions, resolve, shows_options
from lowtide.operation import Audience, Operation
from lowtide.sandbox_commands import SandboxCommands
from lowtide.sandbox_facts import SandboxFacts
from lowtide.sandbox_files import SandboxFiles

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from lowtide.lifecycle.lease import EndReport, Lease
    from lowtide.lookup import StateName
    from lowtide.providers.base import DeniedConnection, Provider, SandboxInfo, SandboxState, Url
    from lowtide.session import Session

T = TypeVar("T")


class Sandbox(SandboxFacts, SandboxCommands, SandboxFiles):
    """A place to run commands in. `Sandbox.run()` starts one; leaving its ``with`` block ends it.

    ``Sandbox(...)`` is an unstarted handle that starts on ``with``, ``await``, `start` or its first
    use. The keywords are those of `SandboxDefaults`, plus ``defaults`` for a set of them. A sandbox is
    ended when its owner ends, whether or not it was used as a context manager.
    """

    @shows_options
    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        self._begin(resolve(None, options))

    def _begin(
        self,
        settings: SandboxDefaults,
        *,
        provider: Provider | None = None,
        info: SandboxInfo | None = None,
        lease: Lease | None = None,
    ) -> None:
        from lowtide import capabilities
        from lowtide.held_sandbox import HeldSandbox

        if info is None:
            capabilities.check(settings)
        self._life = HeldSandbox(settings, provider=provider, info=info, lease=lease)
        self._audience = Audience(self._end_unheld)

    @classmethod
    def _attached(cls, provider: Provider, info: SandboxInfo, lease: Lease | None) -> Self:
        """A handle to one that exists, whoever made it."""
        from lowtide.providers.base import Labels

        labels = Labels.from_dict(info.labels)
        tags = labels.tags if labels else lease.tags if lease else ()
        sandbox = cls.__new__(cls)
        sandbox._begin(SandboxDefaults(tags=tags), provider=provider, info=info, lease=lease)
        return sandbox

    # Making and finding.

    @classmethod
    @shows_options
    def run(cls, *argv: str, **options: Unpack[SandboxOptions]) -> Self:
        """Start a sandbox; a command and its arguments, if given, become its main process.

        In sync code it returns when the provider has accepted it. Inside a running event loop it
        returns at once, and ``async with``, ``await`` or the first call waits.
        """
        if argv:
            words = validate.argv("command", argv)
            options["command"], options["args"] = words[0], words[1:]
        sandbox = cls(**options)
        starting = None
        try:
            starting = sandbox.start()
            if not in_event_loop():
                starting.result()
        except BaseException:
            sandbox._abandon(starting)
            raise
        return sandbox

    @classmethod
    def list(
        cls,
        *,
        tags: Sequence[str] | None = None,
        provider: str | Provider | None = None,
        status: StateName | SandboxState | None = None,
        show_terminated: bool = False,
    ) -> Operation[builtins.list[Self]]:
        """Every sandbox with all of these tags, whichever process made it.

        Without `provider`: the default one and those that the ledger has open leases with. Those that
        have ended are left out unless `show_terminated` or a terminal `status` asks for them.
        """
        from lowtide import lookup

        wanted = lookup.query(tags=tags, provider=provider, status=status, show_terminated=show_terminated)
        return Operation.start(lookup.find_all(wanted, cls._attached))

    @classmethod
    def from_id(cls, sandbox_id: str, *, provider: str | Provider | None = None) -> Operation[Self]:
        """A handle to the sandbox with that id. SandboxNotFoundError when there is none."""
        from lowtide import lookup

        validate.text("sandbox_id", sandbox_id)
        return Operation.start(lookup.find_one(sandbox_id, lookup.chosen(provider), cls._attached))

    @classmethod
    def delete(
        cls, sandbox_id: str, *, missing_ok: bool = False, provider: str | Provider | None = None
    ) -> Operation[None]:
        """End the sandbox with that id, whoever made it and whether or not it is kept.

        SandboxNotFoundError when there is none, unless `missing_ok`.
        """
        from lowtide import lookup

        validate.text("sandbox_id", sandbox_id)
        validate.flag("missing_ok", missing_ok)
        return Operation.start(lookup.delete(sandbox_id, lookup.chosen(provider), missing_ok), shielded=True)

    @classmethod
    @shows_options
    def session(
        cls, defaults: SandboxDefaults | Mapping[str, Any] | None = None, /, **options: Unpack[SandboxOptions]
    ) -> Session:
        """A `Session`: sandboxes with shared defaults and one end."""
        from lowtide.session import Session

        return Session(defaults, **options)

    # What it is: the facts are in `SandboxFacts`.

    def get_status(self) -> SandboxState:
        """Ask the provider. Blocks; in async code use ``await sandbox.refresh()``."""
        return self.refresh().result()

    def refresh(self) -> Operation[SandboxState]:
        """Ask the provider what it is now."""
        return Operation.start(self._life.refresh())

    # Starting, waiting, ending.

    def start(self) -> Operation[None]:
        """Start it, if it is not yet. Done when the provider has accepted it.

        Cancelling it, or the task that awaits it, ends the sandbox: nobody would be left who could.
        """
        self._life.connect()
        self._life.asked = True
        return self._starting(self._life.accepted())

    def wait(self, timeout: float | None = None) -> Self:
        """Block until commands can run. SandboxTimeoutError after `timeout` seconds; it goes on starting."""
        timeout = validate.timeout("timeout", timeout)  # first: to ask for the operation starts it
        self._operation().result(timeout)
        return self

    def wait_until_complete(
        self, timeout: float | None = None, *, raise_on_termination: bool = True
    ) -> Operation[Self]:
        """Wait until its main process, or the sandbox itself, has ended.

        SandboxGone when it was ended from outside, unless `raise_on_termination` is false.
        """
        from lowtide import lookup

        timeout = validate.timeout("timeout", timeout)
        validate.flag("raise_on_termination", raise_on_termination)
        self._life.connect()
        complete = lookup.until_complete(self._life, timeout, raise_on_termination)
        return Operation.start(_then(complete, self))

    def stop(
        self,
        *,
        snapshot_on_stop: bool = False,
        graceful_shutdown_seconds: float = 10.0,
        missing_ok: bool = False,
        failed: bool = False,
        keep: bool = False,
    ) -> Operation[EndReport]:
        """End it and everything it holds; the report says what happened.

        The sandbox is ended even if the task that awaits the stop is cancelled.

        Any number of times, from any thread. One that is already gone is no error (`missing_ok` is
        accepted for those used to it). `failed` is what ``keep="on-failure"`` looks at, as an error that leaves a
        ``with`` block is; `keep`: leave it running for its ``keep_for_seconds``, whatever policy it has. When it
        cannot be ended the error is raised, the lease stays in the ledger and is tried again; so may you. What another process owns (adopted, or the parent's
        of a forked child), was released or is kept is left, and the report says so; `delete` ends that.
        """
        if self._life.inherited:
            return Operation.over(self._life.left_to_parent())
        if sys.is_finalizing():
            return Operation.over(self._life.left_to_exit())
        validate.flag("failed", failed)
        validate.flag("keep", keep)
        if keep and snapshot_on_stop:
            raise validate.wrong(
                "keep", "leaves it running, so snapshot() it before, without snapshot_on_stop"
            )
        validate.grace("graceful_shutdown_seconds", graceful_shutdown_seconds)
        validate.flag("snapshot_on_stop", snapshot_on_stop)
        validate.flag("missing_ok", missing_ok)
        if snapshot_on_stop and self._life.begun:
            self._require("SNAPSHOT", "snapshot_on_stop")
        return self._begin_end(
            grace_seconds=graceful_shutdown_seconds,
            snapshot_on_stop=snapshot_on_stop,
            failed=failed,
            keep_it=keep,
        )

    def _begin_end(self, **how: Any) -> Operation[EndReport]:
        return Operation.start(self._end(**how), shielded=True)

    async def _end(self, **how: Any) -> EndReport:
        return block_exit.ended(await self._life.end(**how))

    # Snapshots, pause, ports.

    def snapshot(self, name: str | None = None) -> Operation[str]:
        """Save its files. The id it returns is what ``Sandbox.run(snapshot=...)`` takes."""
        from lowtide.lifecycle.lease import new_lease_id

        self._require("SNAPSHOT", "snapshot")
        label = f"snap-{new_lease_id()}" if name is None else validate.tags("name", [name])[0]
        return self._call(lambda provider, sandbox_id: provider.snapshot(sandbox_id, label))  # type: ignore[attr-defined]

    def pause(self) -> Operation[None]:
        """Nothing in it runs until `resume`; its files stay."""
        self._require("PAUSE", "pause")
        return self._call(lambda provider, sandbox_id: provider.pause(sandbox_id))  # type: ignore[attr-defined]

    def resume(self) -> Operation[None]:
        """Go on after `pause`."""
        self._require("PAUSE", "resume")
        return self._call(lambda provider, sandbox_id: provider.resume(sandbox_id))  # type: ignore[attr-defined]

    def url(self, port: int) -> Operation[Url]:
        """An address, and the headers it needs, under which `port` of the sandbox is reached from here."""
        validate.port("port", port)
        self._require("PORTS", "url")
        return self._call(lambda provider, sandbox_id: provider.url(sandbox_id, port))  # type: ignore[attr-defined]

    def denied_connections(self) -> Operation[builtins.list[DeniedConnection]]:
        """What its network setting has refused so far, oldest first; also after its end.

        Each target is listed once, with the time of its first refusal, and at most 1,000 of them. A provider
        that does not tell raises UnsupportedError.
        """
        self._require("DENIED_CONNECTIONS", "denied_connections")
        return Operation.start(self._denied_connections())

    async def _denied_connections(self) -> builtins.list[DeniedConnection]:
        if self._life.info is None:
            await self._life.accepted()
        assert self._life.info is not None
        found: builtins.list[DeniedConnection] = await self._life.connect().denied_connections(  # type: ignore[attr-defined]
            self._life.info.sandbox_id
        )
        return found

    # Both kinds of ``with``.

    def __enter__(self) -> Self:
        starting = None
        try:
            if not self._life.is_accepted:
                starting = self.start()
                starting.result()
        except BaseException:  # __exit__ will not be called
            self._abandon(starting)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life.inherited:
            return  # a forked child leaves its parent's block; the sandbox is the parent's
        if sys.is_finalizing():
            return  # a generator that nobody has finished: the exit hook has ended it
        block_exit.leave(self._begin_end(failed=block_exit.is_failure(error)), error)

    async def __aenter__(self) -> Self:
        starting = None
        try:
            if not self._life.is_accepted:
                starting = self.start()
                await starting
        except BaseException:  # __aexit__ will not be called
            self._abandon(starting)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life.inherited:
            return
        await block_exit.leave_async(self._begin_end(failed=block_exit.is_failure(error)), error)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until commands can run. Cancelling that before they can ends the sandbox."""
        return _then(self._operation(), self).__await__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Sandbox cannot be pickled: pass its sandbox_id and provider, and call Sandbox.from_id() there"
        )

    def __repr__(self) -> str:
        status = self.status
        return f"<Sandbox {self.sandbox_id or 'unstarted'} provider={self.provider} status={status and status.value}>"

    # Plumbing.

    def _operation(self) -> Operation[Any]:
        self._life.connect()
        return self._starting(self._life.ready())

    def _starting(self, work: Coroutine[Any, Any, Any]) -> Operation[Any]:
        """Whoever waits for it to start and gives up before anybody has got it leaves nobody to end it."""
        return Operation.start(work, audience=None if self._life.is_ready else self._audience)

    def _abandon(self, starting: Operation[None] | None) -> None:
        """End the sandbox when an exception keeps its handle from the caller: Ctrl+C, a cancellation, or whatever a signal
        handler raises, such as a job queue's time limit. A create that failed by itself has ended what it made."""
        if self._life.asked and (starting is None or not starting._has_failed()):
            with contextlib.suppress(Exception):  # the caller gets the first exception
                self.stop()

    def _end_unheld(self) -> None:
        Operation.start(self._life.end(grace_seconds=0.0, force=True), shielded=True)


def in_event_loop() -> bool:
    """Whether the caller must not be blocked."""
    asyncio = sys.modules.get("asyncio")
    return (asyncio is not None and asyncio._get_running_loop() is not None) or loops.in_trio()


async def _then(work: Awaitable[Any], value: T) -> T:
    await work
    return value
