"""Each fault on demand, as Daytona's unmodified SDK sees it, and what the emulator really did."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lowtide.emulators.handle import Handle

sdk = pytest.importorskip("daytona")
Create = Callable[..., Any]


@pytest.fixture
def job(daytona_create: Create) -> str:
    return str(daytona_create.mark)  # type: ignore[attr-defined]


def made_by(daytona: Handle, job: str) -> list[str]:
    """The ids that really exist, whatever the API says."""
    found = daytona.state()["sandboxes"]["daytona"]
    return [one["sandbox_id"] for one in found if one["labels"].get("test") == job]


def test_create_committed_and_the_answer_lost(
    daytona: Handle, daytona_create: Create, daytona_client: Any, job: str
) -> None:
    daytona.faults.add("create-lost", match={"test": job})
    with pytest.raises(sdk.DaytonaTimeoutError):  # 504
        daytona_create(name=f"lost-{job}")
    assert [daytona_client.get(f"lost-{job}").id] == made_by(daytona, job)  # found again by its name


def test_create_committed_and_the_connection_dropped(
    daytona: Handle, daytona_create: Create, job: str
) -> None:
    daytona.faults.add("create-dropped", match={"test": job})
    with pytest.raises(sdk.DaytonaError):
        daytona_create()
    assert len(made_by(daytona, job)) == 1


def test_a_slow_create_outlasts_its_caller(
    daytona: Handle, daytona_create: Create, daytona_client: Any, job: str
) -> None:
    daytona.faults.add("create-slow", match={"test": job}, seconds=2)
    parameters = sdk.CreateSandboxFromSnapshotParams(labels={"test": job})
    with pytest.raises(sdk.DaytonaTimeoutError) as caught:
        daytona_client.create(parameters, timeout=1)
    assert not getattr(caught.value, "sandbox_id", None)  # nobody knows its id
    until = time.monotonic() + 30
    while not made_by(daytona, job) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(made_by(daytona, job)) == 1


def test_create_fails_and_makes_nothing(daytona: Handle, daytona_create: Create, job: str) -> None:
    daytona.faults.add("create-fails", match={"test": job}, status=500)
    with pytest.raises(sdk.DaytonaInternalServerError):
        daytona_create()
    assert made_by(daytona, job) == []


def test_a_sandbox_in_error_state_exists_but_runs_nothing(
    daytona: Handle, daytona_create: Create, daytona_client: Any, job: str
) -> None:
    daytona.faults.add("create-error-state", match={"test": job})
    with pytest.raises(sdk.DaytonaError, match="error"):
        daytona_create(name=f"broken-{job}")
    box = daytona_client.get(f"broken-{job}")
    assert box.state == sdk.SandboxState.ERROR
    with pytest.raises(sdk.DaytonaError):
        box.process.exec("true")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(409, "DaytonaConflictError"), (403, "DaytonaForbiddenError"), (500, "DaytonaInternalServerError")],
)
def test_delete_is_refused_n_times(
    daytona: Handle, daytona_create: Create, job: str, status: int, kind: str
) -> None:
    box = daytona_create()
    daytona.faults.add("kill-fails", match={"test": job}, count=2, status=status)
    for _ in range(2):
        with pytest.raises(getattr(sdk, kind)):
            box.delete(timeout=0)
    assert made_by(daytona, job) == [box.id]
    box.delete(timeout=0, wait=True)
    assert made_by(daytona, job) == []


def test_delete_hangs(daytona: Handle, daytona_create: Create, job: str) -> None:
    box = daytona_create()
    daytona.faults.add("kill-hangs", match={"test": job}, seconds=5)
    with pytest.raises(sdk.DaytonaTimeoutError):
        box.delete(timeout=1)
    assert made_by(daytona, job) == [box.id]


def test_delete_is_acknowledged_but_the_sandbox_stays(
    daytona: Handle, daytona_create: Create, daytona_client: Any, job: str
) -> None:
    box = daytona_create()
    daytona.faults.add("kill-ignored", match={"test": job})
    box.delete(timeout=0)
    assert daytona_client.get(box.id).state == sdk.SandboxState.STARTED
    listed = daytona_client.list(sdk.ListSandboxesQuery(labels={"test": job}))
    assert [one.id for one in listed] == [box.id]


def test_lists_lag_behind(daytona: Handle, daytona_create: Create, daytona_client: Any, job: str) -> None:
    def listed() -> list[tuple[str, str]]:
        query = sdk.ListSandboxesQuery(labels={"test": job})
        return [(one.id, one.state.value) for one in daytona_client.list(query)]

    daytona.faults.add("list-lags", count=None, seconds=600)
    box = daytona_create()
    assert listed() == []
    assert daytona_client.get(box.id).id == box.id  # by id is the truth
    box.delete(timeout=0, wait=True)
    assert listed() == [(box.id, "started")]
    with pytest.raises(sdk.DaytonaNotFoundError):
        daytona_client.get(box.id)
    daytona.faults.clear()
    assert listed() == []


def test_too_many_requests(daytona: Handle, daytona_create: Create, job: str) -> None:
    daytona.faults.add("rate-limit", match={"operation": "create"}, seconds=1)
    with pytest.raises(sdk.DaytonaRateLimitError) as caught:
        daytona_create()
    assert caught.value.headers["Retry-After"] == "1"
    assert made_by(daytona, job) == []


def test_the_service_is_unavailable(daytona: Handle, daytona_create: Create, job: str) -> None:
    daytona.faults.add("unavailable", match={"operation": "create"})
    with pytest.raises(sdk.DaytonaServiceUnavailableError):
        daytona_create()
    assert made_by(daytona, job) == []


def test_a_good_key_is_refused_once(daytona: Handle, daytona_create: Create, job: str) -> None:
    box = daytona_create()
    daytona.faults.add("stale-token", match={"sandbox_id": box.id, "operation": "execute"})
    with pytest.raises(sdk.DaytonaAuthenticationError):
        box.process.exec("true")
    box.process.exec("true")


def test_the_connection_drops_after_the_command_started_and_the_sdk_runs_it_again(
    daytona: Handle, daytona_create: Create, job: str
) -> None:
    """What the SDK gets wrong: a plain exec whose connection is closed is sent once more."""
    box = daytona_create()
    fault = daytona.faults.add("exec-dropped", match={"test": job, "operation": "execute"}, seconds=0.3)
    box.process.exec("echo x >> count")
    assert daytona.faults.hits(fault) == 1
    assert box.process.exec("wc -l < count").result.strip() == "2"


def test_a_command_goes_on_when_its_connection_is_gone(
    daytona: Handle, daytona_create: Create, job: str
) -> None:
    box = daytona_create()
    daytona.faults.add("exec-dropped", match={"test": job}, count=None)
    with pytest.raises(sdk.DaytonaError):
        box.process.exec("sleep 1; echo x >> count")
    daytona.faults.clear()
    until = time.monotonic() + 30
    while box.process.exec("cat count 2>/dev/null | wc -l").result.strip() == "0":
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_session_command_is_found_after_its_connection_is_gone(
    daytona: Handle, daytona_create: Create, job: str
) -> None:
    box = daytona_create()
    box.process.create_session("s")
    daytona.faults.add("exec-dropped", match={"test": job, "operation": "session-exec"}, count=None)
    with pytest.raises(sdk.DaytonaError):
        box.process.execute_session_command(
            "s", sdk.SessionExecuteRequest(command="echo x >> count", run_async=True)
        )
    commands = box.process.get_session("s").commands
    assert {command.command for command in commands} == {"echo x >> count"}


def test_the_sandbox_is_gone_in_the_middle_of_a_command(
    daytona: Handle, daytona_create: Create, job: str
) -> None:
    box = daytona_create()
    daytona.faults.add("gone-mid-command", match={"test": job}, seconds=0.5)
    with pytest.raises(sdk.DaytonaError):
        box.process.exec("sleep 300")
    until = time.monotonic() + 30
    while made_by(daytona, job) and time.monotonic() < until:
        time.sleep(0.05)
    assert made_by(daytona, job) == []
