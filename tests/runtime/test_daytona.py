"""The agent's view on Daytona: its real SDK against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.providers.base import SandboxState
from lowtide.runtime import DaytonaRuntime
from lowtide.runtime.base import session_tag
from tests.daytona_emulator import needs_emulator, serving
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture

pytestmark = [*needs_emulator, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture(scope="module", params=["inside", "url"])
def runtime(emulator: Handle, request: pytest.FixtureRequest) -> Iterator[DaytonaRuntime]:
    with DaytonaRuntime(config={"transport": request.param}) as made:
        yield made


def there(sid: str) -> list[Sandbox]:
    return Sandbox.list(tags=[session_tag(sid)], provider="daytona").result(SECONDS)


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass


class TestServed(cases.ServedCases):
    kind = DaytonaRuntime


def test_kept_for_debugging(emulator: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = DaytonaRuntime()
    runtime.connect().result(SECONDS)
    runtime.run_command("mark=kept").result(SECONDS)
    monkeypatch.setenv("DAYTONA_KEEP_SANDBOX", "1")  # read at close time
    runtime.close()
    (kept,) = there(runtime.sid)
    assert kept.status is SandboxState.RUNNING
    monkeypatch.delenv("DAYTONA_KEEP_SANDBOX")
    with DaytonaRuntime(sid=runtime.sid, attach_to_existing=True) as again:
        assert again.run_command("echo $mark").result(SECONDS).content == "kept\n"
    assert len(there(runtime.sid)) == 1
    Sandbox.delete(str(runtime.sandbox_id), provider="daytona").result(SECONDS)


def test_stopped_and_not_deleted_when_asked(emulator: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = DaytonaRuntime()
    runtime.connect().result(SECONDS)
    monkeypatch.setenv("DAYTONA_DELETE_ON_CLOSE", "false")
    runtime.close()
    (kept,) = there(runtime.sid)
    assert kept.get_status() is SandboxState.STOPPED
    Sandbox.delete(str(runtime.sandbox_id), provider="daytona").result(SECONDS)
