"""One sandbox from unstarted to ended, as its handle holds it. Runs on the engine's loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lowtide import validate
from lowtide.defaults import SandboxDefaults
from lowtide.errors import (
    LowtideError,
    RequestTimeoutError,
    SandboxError,
    SandboxGone,
    SandboxNotFoundError,
    SessionClosedError,
)
from lowtide.in_background import in_background
from lowtide.lifecycle.lease import EndReport, Keep, Lease, LeaseState, Outcome
from lowtide.operation import generation
from lowtide.providers import registry
from lowtide.providers.base import Provider, SandboxInfo, SandboxSpec, SandboxState

T = TypeVar("T")

ENDED = (Outcome.DESTROYED, Outcome.STOPPED, Outcome.ALREADY_GONE)
"""After these there is nothing to run anything in."""


class HeldSandbox:
    """Starts it once, waits for it, ends it; every handle method goes through here."""

    def __init__(
        self,
        settings: SandboxDefaults,
        *,
        provider: Provider | None = None,
        info: SandboxInfo | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.settings = settings
        self.info = info
        self.lease = lease
        self.report: EndReport | None = None
        self.session: str | None = None
        self.session_closed = False
        self.kept_until = lease.kept_until if lease is not None else None
        self.working_dir: str | None = None
        """Where commands start, once somebody had to know."""
        self.asked = False
        """Somebody called start: that counts at once, though the engine may take it up a moment later."""
        self._found = info is not None
        """Made by somebody else, or by an earlier call: then it is ended only if nobody else owns it."""
        self._given = provider
        self._provider = provider
        self._is_ready = False
        self._starting: asyncio.Task[None] | None = None
        self._readying: asyncio.Task[None] | None = None
        self._generation = self._born = generation()

    @property
    def provider_name(self) -> str:
        chosen = self._provider or self.settings.provider or registry.default_name()
        return chosen if isinstance(chosen, str) else chosen.name

    @property
    def sandbox_id(self) -> str | None:
        return self.info.sandbox_id if self.info is not None else None

    @property
    def begun(self) -> bool:
        return self.asked or self._starting is not None or self.info is not None

    @property
    def is_accepted(self) -> bool:
        """Whether the provider has taken it, so that nobody has to wait for that any more."""
        return self.info is not None and self.report is None and self._generation == generation()

    @property
    def context(self) -> dict[str, Any]:
        return {"provider": self.provider_name, "sandbox_id": self.sandbox_id}

    def connect(self) -> Provider:
        """The provider, connected. In the caller's thread, because it may import an SDK."""
        if self._generation != generation():
            self._settle_in_child()
        if self._provider is None:
            chosen = self.settings.provider
            self._provider = (
                registry.provider(chosen) if chosen is None or isinstance(chosen, str) else chosen
            )
        return self._provider

    @property
    def inherited(self) -> bool:
        """Whether this process has it from its parent, through a fork: then it is the parent's."""
        return self._born != generation()

    @property
    def is_ready(self) -> bool:
        """Whether commands can run, as far as is known here."""
        return self._is_ready

    async def accepted(self) -> None:
        """Start it if nobody has, and wait until the provider has taken it."""
        if self._generation != generation():
            self._settle_in_child()
        self._check_open()
        if self.info is not None:
            return
        if self._starting is None:
            self._starting = in_background(self._create())
        # Shared and shielded: one caller that goes away must not take it from the others.
        await asyncio.shield(self._starting)

    async def accepted_at(self) -> tuple[Provider, str]:
        await self.accepted()
        assert self.info is not None
        return self.connect(), self.info.sandbox_id

    async def ready(self) -> tuple[Provider, str]:
        """Wait until commands can run, and say where."""
        if self._is_ready and self.report is None and self._generation == generation():
            assert self._provider is not None
            assert self.info is not None
            return self._provider, self.info.sandbox_id
        await self.accepted()
        assert self.info is not None
        provider = self.connect()
        if not self._is_ready:
            if self._readying is None or (self._readying.done() and not self._is_ready):
                self._readying = in_background(self._wait_ready(provider, self.info.sandbox_id))
            await asyncio.shield(self._readying)
        self._check_open()
        return provider, self.info.sandbox_id

    async def use(
        self, work: Callable[[Provider, str], Awaitable[T]], timeout_seconds: float | None = None
    ) -> T:
        """Do something there, once commands can run."""
        provider, sandbox_id = await self.ready()
        if timeout_seconds is None:
            return await work(provider, sandbox_id)
        try:
            return await asyncio.wait_for(work(provider, sandbox_id), timeout_seconds)
        except TimeoutError as error:
            if isinstance(error, LowtideError):
                raise
            raise RequestTimeoutError(f"not done after {timeout_seconds} seconds", **self.context) from error

    async def refresh(self) -> SandboxState:
        """Ask the provider what it is now."""
        if self.report is not None and self.report.outcome in ENDED:
            return SandboxState.GONE
        await self.accepted()
        assert self.info is not None
        try:
            self.info = await self.connect().get(self.info.sandbox_id)
        except (SandboxNotFoundError, SandboxGone):
            return SandboxState.GONE
        return self.info.state

    async def end(
        self,
        *,
        grace_seconds: float = 10.0,
        failed: bool = False,
        snapshot_on_stop: bool = False,
        force: bool = False,
        keep_it: bool = False,
    ) -> EndReport:
        """End it, also while it is still being created. Never raises for gone; FAILED says why and may be tried again.

        What another process owns is left: the report says whose it is.
        """
        from lowtide.lifecycle.claim import Claim
        from lowtide.lifecycle.leases import lifecycle

        if self.inherited:
            return self.left_to_parent()
        if not self.begun:
            return self._ended("it was never started")
        if self.lease is None and self._starting is not None:
            await asyncio.sleep(0)  # the create that was asked for a moment ago takes its first step
        if keep_it and self._starting is not None and not self._starting.done():
            await asyncio.wait(
                {self._starting}
            )  # what is half made is ended, and there would be nothing to keep
        provider = self.connect()
        if self.lease is None:
            if self.info is None:
                return self._ended("it could not be created")
            return await self._destroy(provider, self.info.sandbox_id, snapshot_on_stop)
        while True:
            report = await lifecycle().end(
                provider,
                self.lease.lease_id,
                grace_seconds=grace_seconds,
                failed=failed,
                snapshot_on_stop=snapshot_on_stop,
                force=force or (self._found and self.lease.state is LeaseState.KEPT),
                keep_it=keep_it,
                claim=Claim.UNOWNED if self._found else Claim.OWN,
            )
            starting = self._starting
            if starting is None or starting.done():
                break
            # It was ended in the instant before its lease was written down: see the create through.
            await asyncio.wait({starting})
        if starting is not None and not starting.cancelled():
            starting.exception()  # seen: that it was ended while it was being created is our own doing
        if report.outcome in (Outcome.KEPT, Outcome.STOPPED) and report.sandbox_id is not None:
            kept = await lifecycle().lease_for(provider, report.sandbox_id)
            self.kept_until = kept.kept_until if kept is not None else None
        self._remember(report)
        return report

    def left_to_parent(self) -> EndReport:
        """What a forked child's end of its parent's sandbox comes to: nothing. Needs no loop and no lock."""
        return self._left("it belongs to the process that this one was forked from")

    def left_to_exit(self) -> EndReport:
        """What an end comes to that is asked for at the interpreter's very end, when no thread runs any more."""
        return self._left("this Python has ended: its exit hook has ended the sandbox, or the guardian does")

    def _left(self, why: str) -> EndReport:
        return EndReport(
            outcome=Outcome.LEFT,
            sandbox_id=self.sandbox_id,
            provider=self.provider_name,
            seconds=0.0,
            why=why,
        )

    async def adopt(self, *, session: str, take: bool) -> None:
        """Make this process its owner. SandboxOwnedError unless nobody else is, or `take`."""
        from lowtide.lifecycle.leases import lifecycle

        provider, sandbox_id = await self.accepted_at()
        self.lease = await lifecycle().adopt(provider, sandbox_id, session=session, take=take)
        self._born, self.report, self.kept_until = generation(), None, None

    async def _create(self) -> None:
        from lowtide.lifecycle.leases import lifecycle

        if self.session_closed:
            raise SessionClosedError("the session has ended and takes no new work")
        settings, provider, life = self.settings, self.connect(), lifecycle()
        self.lease = life.new_lease(
            provider,
            tags=settings.tags,
            session=self.session,
            keep=Keep(settings.keep or Keep.NEVER),
            keep_for_seconds=settings.keep_for_seconds or 86_400.0,
            max_lifetime_seconds=settings.max_lifetime_seconds,
        )
        self.info = await life.create(provider, self.lease, specification(settings, provider, self.lease))
        self._is_ready = self.info.state is SandboxState.RUNNING

    async def _wait_ready(self, provider: Provider, sandbox_id: str) -> None:
        self.info = await provider.wait_ready(sandbox_id)
        self._is_ready = True

    async def _destroy(self, provider: Provider, sandbox_id: str, snapshot_on_stop: bool) -> EndReport:
        """One that is in no ledger here: somebody named it, so it may be ended."""
        from lowtide.lifecycle.leases import lifecycle

        began = asyncio.get_running_loop().time()
        snapshot_id = None
        outcome, error = Outcome.FAILED, None
        try:
            if snapshot_on_stop:
                from lowtide.lifecycle.lease import new_lease_id

                snapshot_id = await provider.snapshot(sandbox_id, f"snap-{new_lease_id()}")  # type: ignore[attr-defined]
            destroyed = await lifecycle().destroy(provider, sandbox_id)
            outcome = Outcome.DESTROYED if destroyed else Outcome.ALREADY_GONE
        except LowtideError as problem:
            error = problem
        report = EndReport(
            outcome=outcome,
            sandbox_id=sandbox_id,
            provider=provider.name,
            seconds=asyncio.get_running_loop().time() - began,
            why="ended on request",
            snapshot_id=snapshot_id,
            error=error,
        )
        self._remember(report)
        return report

    def _remember(self, report: EndReport) -> None:
        """The first report that says it is over; what comes after only says that it was."""
        over = self.report is not None and self.report.outcome in ENDED
        if report.outcome is not Outcome.FAILED and not over:
            self.report = report

    def _ended(self, why: str) -> EndReport:
        self.report = EndReport(
            outcome=Outcome.ALREADY_GONE, sandbox_id=None, provider=self.provider_name, seconds=0.0, why=why
        )
        return self.report

    def _check_open(self) -> None:
        if self.report is not None and self.report.outcome in ENDED:
            raise SandboxGone(
                f"sandbox {self.sandbox_id or '(never started)'} has ended: {self.report.why or 'stopped'}",
                reason="stopped",
                **self.context,
            )

    def _settle_in_child(self) -> None:
        """After a fork: the sandbox is still there, but the parent's tasks and connections are not ours."""
        if self.begun and self.info is None:
            raise SandboxError(
                "this sandbox was still being created when the process forked; it belongs to the parent",
                **self.context,
            )
        self._starting = self._readying = None
        self._provider = (
            self._given if self._given is not None and self._given.name not in registry.known() else None
        )
        if self._provider is None and self._given is not None:
            self.settings = self.settings.with_overrides(provider=self._given.name)
        self._generation = generation()


def specification(settings: SandboxDefaults, provider: Provider, lease: Lease) -> SandboxSpec:
    """The create call these settings ask for."""
    from lowtide.providers.base import Limits

    resources, network = settings.resources, settings.network
    return SandboxSpec(
        labels=lease.labels,
        image=_path(settings.container_image),
        snapshot=settings.snapshot,
        command=settings.argv,
        working_dir=_path(settings.working_dir),
        environment=dict(settings.environment_variables),
        limits=validate.resources("resources", resources) if resources is not None else Limits(),
        network=validate.network("network", network) if network is not None else None,
        isolation=validate.isolation("isolation", settings.isolation)
        if settings.isolation is not None
        else None,
        ports=tuple(settings.ports or ()),
        lifetime_seconds=settings.max_lifetime_seconds,
        options=validate.provider_options(type(provider), settings.provider_options),
    )


def _path(value: str | os.PathLike[str] | None) -> str | None:
    return None if value is None else os.fspath(value)
