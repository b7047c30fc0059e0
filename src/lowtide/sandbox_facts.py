"""What is known of a sandbox without asking its provider."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from lowtide.held_sandbox import HeldSandbox
    from lowtide.lifecycle.owner import Owner
    from lowtide.providers.base import SandboxState


class SandboxFacts:
    """The properties of a `Sandbox`."""

    _life: HeldSandbox

    @property
    def sandbox_id(self) -> str | None:
        """The provider's id, or None until it has been accepted."""
        return self._life.sandbox_id

    @property
    def lease_id(self) -> str | None:
        """Its row in the ledger, or None where this ledger has none."""
        return self._life.lease.lease_id if self._life.lease is not None else None

    @property
    def provider(self) -> str:
        """The provider's name."""
        return self._life.provider_name

    @property
    def tags(self) -> tuple[str, ...]:
        """What it can be found by."""
        return tuple(self._life.settings.tags)

    @property
    def status(self) -> SandboxState | None:
        """What was last heard; None for an unstarted handle. `get_status` asks."""
        from lowtide.held_sandbox import ENDED
        from lowtide.providers.base import SandboxState

        report, info = self._life.report, self._life.info
        if report is not None and report.outcome in ENDED:
            return SandboxState.GONE
        if info is not None:
            return info.state
        return SandboxState.PENDING if self._life.begun else None

    @property
    def returncode(self) -> int | None:
        """The exit code of its main process, once that has ended."""
        return self._life.info.exit_code if self._life.info is not None else None

    @property
    def created_at(self) -> datetime | None:
        """When the provider made it, or else when its lease was written."""
        info, lease = self._life.info, self._life.lease
        if info is not None and info.created_at is not None:
            return info.created_at
        return _moment(lease.created_at) if lease is not None else None

    @property
    def expires_at(self) -> datetime | None:
        """The hard end the provider was told, where there is one; it may be renewed."""
        info, lease = self._life.info, self._life.lease
        if info is not None and info.expires_at is not None:
            return info.expires_at
        return _moment(lease.expires_at) if lease is not None else None

    @property
    def unheld(self) -> tuple[str, ...]:
        """Bounds that protect the machine by default and that its machine cannot hold, each with the reason."""
        return self._life.info.unheld if self._life.info is not None else ()

    @property
    def kept_until(self) -> datetime | None:
        """Until when it is kept, for one that outlived its end."""
        return _moment(self._life.kept_until)

    @property
    def owner(self) -> Owner | None:
        """The process it ends with, where the ledger knows it. ``owner.alive()`` says whether that lives."""
        return self._life.lease.owner if self._life.lease is not None else None


def _moment(seconds: float | None) -> datetime | None:
    from datetime import UTC, datetime

    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
