"""A lease that this process holds, and what is under way with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lowtide.lifecycle.lease import EndReport, Lease, Outcome
from lowtide.providers.base import Provider, SandboxInfo, SandboxSpec


@dataclass(slots=True)
class HeldLease:
    """One lease, in memory. Lives on the engine's loop."""

    provider: Provider
    lease: Lease
    spec: SandboxSpec | None = None
    """The create call, where this process made it."""
    creating: asyncio.Task[SandboxInfo] | None = None
    ending: asyncio.Task[EndReport] | None = None
    report: EndReport | None = None
    failures: int = 0
    """How many attempts to end it have failed here."""
    settled: bool = True
    """False when it was ended without its row: that is still to be written."""
    refused: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its create was refused and nothing of it shows: what is left is to wait for the create window."""

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do: neither at the provider nor in the ledger."""
        return self.report is not None and self.report.outcome is not Outcome.FAILED and self.settled
