"""Daytona's own keep switches, at the end of a sandbox's block, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.daytona_emulator import needs_emulator, serving

from lowtide.emulators.handle import Handle
from lowtide.engine import engine
from lowtide.errors import SandboxNotFoundError
from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.sqlite_ledger import SqliteLedger
from lowtide.providers import registry
from lowtide.providers.base import SandboxInfo, SandboxState
from lowtide.providers.daytona import DaytonaProvider

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

_PROGRAM = """
import sys
import time
from lowtide import Sandbox
with Sandbox.run(provider="daytona") as box:
    box.exec(["true"]).result(60)
    print(box.sandbox_id, flush=True)
"""


@pytest.fixture(scope="module")
def emulator() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A state directory whose kept sandboxes, and so its guardian, end with the test."""
    yield tmp_path
    program = "import sys; from lowtide import Sandbox; Sandbox.delete(sys.argv[1], provider='daytona', missing_ok=True).result(60)"
    for lease in leases(tmp_path):
        if lease.state is not LeaseState.GONE and lease.sandbox_id is not None:
            environ = {**os.environ, "LOWTIDE_HOME": str(tmp_path)}
            subprocess.run(
                [sys.executable, "-c", program, lease.sandbox_id], env=environ, check=True, timeout=120
            )
    deadline = time.monotonic() + 60
    while _guarded(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)


def _guarded(home: Path) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(home).encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


@pytest.fixture
def provider(emulator: Handle) -> DaytonaProvider:
    found = registry.provider("daytona")
    assert isinstance(found, DaytonaProvider)
    return found


def ended(home: Path, **switches: str) -> tuple[str, str]:
    """A process that made one sandbox and left its block: the id, and what it said on stderr."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DAYTONA_KEEP", "DAYTONA_DELETE"))}
    environ |= {"LOWTIDE_HOME": str(home), **switches}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip(), done.stderr


def now(provider: DaytonaProvider, sandbox_id: str) -> SandboxInfo | None:
    try:
        return engine().run(provider.get(sandbox_id), 60)
    except SandboxNotFoundError:
        return None


def leases(home: Path) -> list[Lease]:
    return engine().run(SqliteLedger(home / "ledger.db").leases(states=set(LeaseState)), 60)


def row(home: Path) -> LeaseState:
    return leases(home)[0].state


@pytest.mark.parametrize(
    "switches", [{}, {"DAYTONA_DELETE_ON_CLOSE": "true"}, {"DAYTONA_DELETE_ON_CLOSE": ""}]
)
def test_by_default_it_is_deleted(home: Path, provider: DaytonaProvider, switches: dict[str, str]) -> None:
    sandbox_id, _ = ended(home, **switches)
    assert now(provider, sandbox_id) is None
    assert row(home) is LeaseState.GONE


@pytest.mark.parametrize("value", ["1", "0", "", "false"])
def test_keep_set_to_anything_leaves_it_running(
    home: Path, emulator: Handle, provider: DaytonaProvider, value: str
) -> None:
    sandbox_id, said = ended(home, DAYTONA_KEEP_SANDBOX=value, DAYTONA_DELETE_ON_CLOSE="false")
    assert f"shell {sandbox_id}" in said
    assert f"rm {sandbox_id}" in said
    assert row(home) is LeaseState.KEPT
    emulator.clock.advance(6 * 3600)  # neither its lifetime nor its idleness ends it before the day is over
    kept = now(provider, sandbox_id)
    assert kept is not None
    assert kept.state is SandboxState.RUNNING
    emulator.clock.advance(24 * 3600)
    assert now(provider, sandbox_id) is None


@pytest.mark.parametrize("value", ["false", "False"])
def test_delete_on_close_false_stops_it_with_auto_delete_armed(
    home: Path, emulator: Handle, provider: DaytonaProvider, value: str
) -> None:
    sandbox_id, said = ended(home, DAYTONA_DELETE_ON_CLOSE=value)
    assert sandbox_id in said
    stopped = now(provider, sandbox_id)
    assert stopped is not None
    assert stopped.state is SandboxState.STOPPED
    assert row(home) is LeaseState.KEPT
    engine().run(provider.start(sandbox_id), 60)
    engine().run(provider.stop(sandbox_id), 60)
    emulator.clock.advance(23 * 3600)
    assert now(provider, sandbox_id) is not None
    emulator.clock.advance(2 * 3600)
    assert now(provider, sandbox_id) is None
