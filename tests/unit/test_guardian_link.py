"""The owner's line to its guardian, when that dies in an unlucky moment."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from lowtide.lifecycle import guardian_link
from lowtide.lifecycle.guardian_link import GuardianLink
from lowtide.lifecycle.leases import Lifecycle
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers import registry
from lowtide.providers.base import SandboxSpec


async def test_a_guardian_that_dies_as_it_is_told_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    dead, gone = socket.socketpair()
    gone.close()
    answers: list[socket.socket | None] = [dead, None, ours]
    launches = []
    monkeypatch.setattr(guardian_link, "connect", lambda path: answers.pop(0))
    monkeypatch.setattr(guardian_link, "launch", launches.append)
    link = GuardianLink(tmp_path)
    link.wanted(registry.provider("faulty", directory=str(tmp_path / "service")))
    theirs.settimeout(10)
    said = await asyncio.to_thread(theirs.recv, 65536)
    assert b'"name": "faulty"' in said
    assert launches == [tmp_path]
    assert dead.fileno() == -1
    link.forget()
    theirs.close()


async def test_a_machine_that_had_no_process_to_spare_is_asked_again_while_sandboxes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever made its sandboxes in such a moment would have no guardian for weeks."""
    answers = iter([BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 1 << 30])
    launched = asyncio.Event()

    def launch(path: Path) -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        launched.set()
        return answer  # of no process: it is gone by the next look

    monkeypatch.setattr(guardian_link, "launch", launch)
    monkeypatch.setattr(guardian_link, "AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("LOWTIDE_LEASE_SECONDS", "1")
    monkeypatch.setenv("LOWTIDE_SIGNALS", "off")
    provider = registry.provider("faulty", directory=str(tmp_path / "service"))
    link = GuardianLink(tmp_path)
    life = Lifecycle(ledger=SqliteLedger(tmp_path / "ledger.db"), path=tmp_path, guardian=link)
    lease = life.new_lease(provider)
    await life.create(provider, lease, SandboxSpec(labels=lease.labels))
    assert not launched.is_set()
    async with asyncio.timeout(10):
        await launched.wait()
    await life.end(provider, lease.lease_id)
    assert link._linking is not None
    link._linking.cancel()


async def test_a_home_that_its_program_has_deleted_is_no_reason_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = GuardianLink(tmp_path / "deleted")
    link.wanted(registry.provider("faulty", directory=str(tmp_path / "service")))
    assert link._linking is None
    assert not caplog.records
