"""Each fault on demand, as the unmodified SDK sees it, and what the emulator really did."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from lowtide.emulators.handle import Handle

sdk = pytest.importorskip("e2b")
httpx = pytest.importorskip("httpx")
ConnectError = pytest.importorskip("connectrpc.errors").ConnectError
Create = Callable[..., Any]


@pytest.fixture
def job(e2b: Handle, options: dict[str, Any]) -> Any:
    """A mark for one test's sandboxes; what a fault made without the SDK knowing is killed afterwards."""
    mark = uuid.uuid4().hex
    yield mark
    e2b.faults.clear()
    for sandbox_id in made_by(e2b, mark):
        sdk.Sandbox.kill(sandbox_id, **options)


def made_by(e2b: Handle, job: str) -> list[str]:
    """The ids that really exist, whatever the API says."""
    sandboxes = e2b.state()["sandboxes"]["e2b"]
    return [one["sandbox_id"] for one in sandboxes if one["metadata"].get("job") == job]


@pytest.fixture
def attempt(options: dict[str, Any], job: str) -> Create:
    def attempt(**kwargs: Any) -> Any:
        return sdk.Sandbox.create(metadata={"job": job}, **{**options, "retries": 0, **kwargs})

    return attempt


def test_create_committed_and_the_answer_lost(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("create-lost", match={"job": job})
    with pytest.raises(sdk.SandboxException, match="504"):
        attempt()
    assert len(made_by(e2b, job)) == 1


def test_create_committed_and_the_connection_dropped(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("create-dropped", match={"job": job})
    with pytest.raises(httpx.HTTPError):
        attempt()
    assert len(made_by(e2b, job)) == 1


def test_a_lost_create_is_found_again_by_its_key(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("create-dropped", match={"job": job})
    key = uuid.uuid4().hex
    with pytest.raises(httpx.HTTPError):
        attempt(idempotency_key=key)
    assert made_by(e2b, job) == [attempt(idempotency_key=key).sandbox_id]


def test_slow_create_outlasts_the_caller(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("create-slow", match={"job": job}, seconds=2)
    with pytest.raises(httpx.TimeoutException):
        attempt(request_timeout=0.5)
    until = time.monotonic() + 30
    while not made_by(e2b, job) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(made_by(e2b, job)) == 1


def test_create_fails_and_makes_nothing(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("create-fails", match={"job": job}, status=500)
    with pytest.raises(sdk.SandboxException, match="500"):
        attempt()
    assert made_by(e2b, job) == []


def test_a_sandbox_in_error_state_exists_but_runs_nothing(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("create-error-state", match={"job": job})
    sandbox = attempt()
    assert not sandbox.is_running()
    with pytest.raises(sdk.TimeoutException):
        sandbox.commands.run("true")
    assert sandbox.kill() is True


def test_kill_hangs(e2b: Handle, attempt: Create, job: str) -> None:
    sandbox = attempt()
    e2b.faults.add("kill-hangs", match={"sandbox_id": sandbox.sandbox_id}, seconds=30)
    with pytest.raises(httpx.TimeoutException):
        sandbox.kill(request_timeout=0.5)
    assert made_by(e2b, job) == [sandbox.sandbox_id]


def test_kill_fails_n_times(e2b: Handle, attempt: Create, job: str) -> None:
    sandbox = attempt()
    e2b.faults.add("kill-fails", match={"job": job}, count=2)
    for _ in range(2):
        with pytest.raises(sdk.SandboxException, match="500"):
            sandbox.kill()
    assert made_by(e2b, job) == [sandbox.sandbox_id]
    assert sandbox.kill() is True


def test_kill_is_acknowledged_but_the_sandbox_stays(
    e2b: Handle, attempt: Create, job: str, options: dict[str, Any]
) -> None:
    sandbox = attempt()
    e2b.faults.add("kill-ignored", match={"job": job})
    assert sandbox.kill() is True
    listed = sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={"job": job}), **options).next_items()
    assert [info.sandbox_id for info in listed] == [sandbox.sandbox_id]
    assert sandbox.is_running()
    assert sandbox.kill() is True


def test_lists_lag_behind(e2b: Handle, attempt: Create, job: str, options: dict[str, Any]) -> None:
    def listed() -> list[str]:
        query = sdk.SandboxQuery(metadata={"job": job})
        return [info.sandbox_id for info in sdk.Sandbox.list(query=query, **options).next_items()]

    e2b.faults.add("list-lags", count=None, seconds=600)
    sandbox = attempt()
    assert listed() == []
    assert sandbox.get_info(**options).sandbox_id == sandbox.sandbox_id  # by id is the truth
    sandbox.kill()
    assert listed() == [sandbox.sandbox_id]
    e2b.faults.clear()
    assert listed() == []


def test_too_many_requests_with_retry_after(e2b: Handle, attempt: Create, job: str) -> None:
    fault = e2b.faults.add("rate-limit", match={"operation": "create"}, seconds=1)
    with pytest.raises(sdk.RateLimitException):
        attempt()
    e2b.faults.add("rate-limit", match={"operation": "create"}, seconds=1)
    begun = time.monotonic()
    attempt(retries=1)  # the SDK waits as it was told, and tries again
    assert time.monotonic() - begun >= 0.9
    assert e2b.faults.hits(fault) == 1


def test_the_sandbox_is_gone_in_the_middle_of_a_command(e2b: Handle, attempt: Create, job: str) -> None:
    sandbox = attempt()
    e2b.faults.add("gone-mid-command", match={"job": job}, seconds=0.5)
    command = sandbox.commands.run("sleep 300", background=True)
    with pytest.raises(sdk.TimeoutException, match="killed or reached its end of life"):
        command.wait()
    assert made_by(e2b, job) == []


def test_the_stream_of_a_command_breaks_and_the_command_goes_on(
    e2b: Handle, attempt: Create, job: str
) -> None:
    sandbox = attempt()
    fault = e2b.faults.add("exec-dropped", match={"job": job, "operation": "start"}, seconds=0.2)
    command = sandbox.commands.run("sleep 1; echo x >> count; echo done", background=True)
    with pytest.raises((sdk.SandboxException, ConnectError)):
        command.wait()
    assert e2b.faults.hits(fault) == 1
    assert sandbox.commands.connect(command.pid).wait().stdout == "done\n"
    assert sandbox.files.read("count") == "x\n"


def test_a_stale_key_and_a_stale_token_are_refused_once(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("stale-token", match={"operation": "create"})
    with pytest.raises(sdk.AuthenticationException):
        attempt()
    sandbox = attempt()
    e2b.faults.add("stale-token", match={"sandbox_id": sandbox.sandbox_id})
    with pytest.raises(sdk.AuthenticationException):
        sandbox.commands.run("true")
    sandbox.commands.run("true")


def test_the_service_is_unavailable(e2b: Handle, attempt: Create, job: str) -> None:
    e2b.faults.add("unavailable", match={"operation": "create"}, status=503)
    with pytest.raises((sdk.SandboxException, sdk.ServiceBusyException)):
        attempt()
    assert made_by(e2b, job) == []


def test_the_log_says_how_often_something_was_called(e2b: Handle, attempt: Create, job: str) -> None:
    before = len(e2b.calls("create"))
    e2b.faults.add("create-lost", match={"job": job}, count=2)
    attempt(retries=3)
    assert len(e2b.calls("create")) - before == 3
    assert len(made_by(e2b, job)) == 3  # without a key every try makes another one
