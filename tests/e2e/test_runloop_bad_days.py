"""Runloop on a bad day: each fault the emulator has, through the real SDK, and nothing left after it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.runloop_emulator import needs_emulator, serving

from lowtide import Sandbox
from lowtide.engine import engine
from lowtide.errors import (
    AuthenticationError,
    RateLimitError,
    RequestTimeoutError,
    SandboxFailedError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
)
from lowtide.lifecycle.lease import Outcome, new_lease_id
from lowtide.providers.base import Labels, ProcessSpec, SandboxSpec, SandboxState
from lowtide.providers.runloop import RunloopProvider, create, destroy, lookup

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def serving_emulator() -> Iterator[Any]:
    yield from serving()


@pytest.fixture
def emulator(serving_emulator: Any) -> Iterator[Any]:
    """Nothing exists before, nothing after."""
    assert serving_emulator.state()["sandboxes"]["runloop"] == []
    yield serving_emulator
    serving_emulator.faults.clear()
    deadline = time.monotonic() + 90
    while left := serving_emulator.state()["sandboxes"]["runloop"]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


@pytest.fixture
def provider(emulator: Any) -> Iterator[RunloopProvider]:
    connected = RunloopProvider.connect(os.environ)
    yield connected
    engine().run(connected.aclose(), SECONDS)


def spec(lifetime: float = 300.0) -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="ledger", owner="owner")
    return SandboxSpec(labels=labels, lifetime_seconds=lifetime)


def run(work: Any) -> Any:
    return engine().run(work, SECONDS)


# Creating


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_an_answer_lost_after_the_commit_makes_exactly_one(emulator: Any, fault: str) -> None:
    emulator.faults.add(fault)
    with Sandbox.run(provider="runloop") as box:
        assert box.exec(["echo", "here"]).result(SECONDS).stdout == "here\n"
        known = emulator.state()["sandboxes"]["runloop"]
        assert [one["sandbox_id"] for one in known] == [box.sandbox_id]


def test_a_create_that_times_out_is_found_again_and_ended(
    emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "CREATE_SECONDS", 1.0)
    slow = emulator.faults.add("create-slow", seconds=3.0)
    with pytest.raises(RequestTimeoutError):
        Sandbox.run(provider="runloop").wait(SECONDS)
    assert emulator.faults.hits(slow) == 1  # and the fixture waits until what it made is gone


def test_what_a_lost_create_made_is_found_by_its_labels_alone(
    emulator: Any, provider: RunloopProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "CREATE_SECONDS", 1.0)
    emulator.faults.add("create-slow", seconds=3.0)
    asked = spec()
    with pytest.raises(RequestTimeoutError):
        run(provider.create(asked))
    bare = SandboxSpec(labels=asked.labels)  # all that a guardian's worker knows
    deadline = time.monotonic() + 30
    while (found := run(provider.find(bare))) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert run(provider.destroy(found.sandbox_id)) is True


def test_a_refused_create_says_why_is_sent_once_and_makes_nothing(
    emulator: Any, provider: RunloopProvider
) -> None:
    refusing = emulator.faults.add("create-fails", status=500, count=None)
    with pytest.raises(SandboxUnavailableError, match="Failed to create"):
        run(provider.create(spec()))
    assert emulator.faults.hits(refusing) == 1


def test_a_blueprint_that_is_not_there_is_refused_and_nothing_is_made(emulator: Any) -> None:
    with pytest.raises(SandboxFailedError, match="no-such"):
        Sandbox.run(provider="runloop", provider_options={"blueprint": "no-such"}).wait(SECONDS)


def test_a_devbox_that_never_runs_fails_with_its_reason(emulator: Any) -> None:
    emulator.faults.add("create-error-state")
    box = Sandbox.run(provider="runloop")
    with pytest.raises(SandboxFailedError) as caught:
        box.exec(["true"]).result(SECONDS)
    assert caught.value.reason == "health_check_failed"
    box.stop().result(SECONDS)


def test_a_launch_command_that_fails_fails_the_sandbox(emulator: Any) -> None:
    box = Sandbox.run(provider="runloop", provider_options={"launch_commands": ["exit 7"]})
    with pytest.raises(SandboxFailedError):
        box.exec(["true"]).result(SECONDS)
    box.stop().result(SECONDS)


def test_a_refused_connection_is_reported_within_three_seconds(emulator: Any) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        nowhere = RunloopProvider.connect({"RUNLOOP_API_KEY": "key", "RUNLOOP_BASE_URL": url})
        for call in (lambda: nowhere.create(spec()), lambda: nowhere.get("dbx_1")):
            began = time.monotonic()
            with pytest.raises(SandboxUnavailableError):
                run(call())
            assert time.monotonic() - began < 3.0 * 3  # a busy machine
        run(nowhere.aclose())


def test_a_wrong_key_is_an_authentication_error(emulator: Any) -> None:
    wrong = RunloopProvider.connect({**os.environ, "RUNLOOP_API_KEY": "ak_wrong"})
    with pytest.raises(AuthenticationError, match="RUNLOOP_API_KEY") as caught:
        run(wrong.create(spec()))
    assert "ak_wrong" not in str(caught.value)
    run(wrong.aclose())


# Looking


def test_a_list_pages_through_everything_and_matches_here(
    emulator: Any, provider: RunloopProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_PAGE", 2)
    specs = [spec() for _ in range(5)]
    made = [run(provider.create(one)) for one in specs]

    async def ids(labels: dict[str, str]) -> set[str]:
        return {info.sandbox_id async for info in provider.list(labels)}

    assert run(ids({})) == {one.sandbox_id for one in made}
    assert run(ids({"lowtide-lease": specs[0].lease_id})) == {made[0].sandbox_id}
    for one in made:
        assert run(provider.destroy(one.sandbox_id)) is True
    assert run(ids({})) == set()  # what has ended stays in the service's own list


def test_an_outage_shorter_than_two_seconds_is_not_noticed(emulator: Any, provider: RunloopProvider) -> None:
    made = run(provider.create(spec()))
    emulator.faults.add("unavailable", count=2, match={"operation": "retrieve"})
    assert run(provider.get(made.sandbox_id)).sandbox_id == made.sandbox_id
    run(provider.destroy(made.sandbox_id))


# Ending


def test_a_shutdown_that_fails_is_tried_again(emulator: Any) -> None:
    box = Sandbox.run(provider="runloop")
    box.wait(SECONDS)
    emulator.faults.add("kill-fails", count=3)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED


def test_a_shutdown_that_is_only_acknowledged_is_noticed(emulator: Any) -> None:
    box = Sandbox.run(provider="runloop")
    box.wait(SECONDS)
    emulator.faults.add("kill-ignored", count=2)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED
    assert emulator.state()["sandboxes"]["runloop"] == []


def test_a_shutdown_that_hangs_has_an_outer_deadline(
    emulator: Any, provider: RunloopProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destroy, "SHUTDOWN_SECONDS", 1.0)
    made = run(provider.create(spec()))
    emulator.faults.add("kill-hangs", seconds=30.0)
    with pytest.raises(RequestTimeoutError) as caught:
        run(provider.destroy(made.sandbox_id))
    assert caught.value.retryable
    monkeypatch.undo()
    assert run(provider.destroy(made.sandbox_id)) is True


def test_a_rate_limit_carries_how_long_to_wait(emulator: Any, provider: RunloopProvider) -> None:
    made = run(provider.create(spec()))
    emulator.faults.add("rate-limit", seconds=7, count=1)
    with pytest.raises(RateLimitError) as caught:
        run(provider.destroy(made.sandbox_id))
    assert caught.value.retry_after_seconds == 7
    assert run(provider.destroy(made.sandbox_id)) is True


def test_its_lifetime_ends_it_without_us_and_a_renewal_starts_it_again(
    emulator: Any, provider: RunloopProvider
) -> None:
    made = run(provider.create(spec()))
    run(provider.wait_ready(made.sandbox_id))
    emulator.clock.advance(200)
    until = run(provider.renew(made.sandbox_id, 3000.0))
    assert 250 < until.timestamp() - time.time() <= 300  # Runloop has no longer one than the create's
    emulator.clock.advance(200)
    assert run(provider.get(made.sandbox_id)).state is SandboxState.RUNNING
    emulator.clock.advance(101)
    assert run(provider.destroy(made.sandbox_id)) is False
    with pytest.raises(SandboxGone):
        run(provider.wait_ready(made.sandbox_id))
    with pytest.raises(SandboxNotFoundError):
        run(provider.renew(made.sandbox_id, 300.0))


# The channel


def test_streams_that_drop_lose_and_repeat_nothing(emulator: Any) -> None:
    drops = emulator.faults.add("exec-dropped", count=6, seconds=0.05, match={"operation": "stream"})
    with Sandbox.run(provider="runloop") as box:
        script = "for i in $(seq 1 300); do echo line $i; sleep 0.005; done; echo end >&2"
        ran = box.exec(["bash", "-c", script]).result(SECONDS)
        assert ran.stdout == "".join(f"line {i}\n" for i in range(1, 301))
        assert (ran.stderr, ran.returncode) == ("end\n", 0)
    assert emulator.faults.hits(drops) == 6


def test_input_whose_answers_are_lost_arrives_once(emulator: Any) -> None:
    data = os.urandom(700_000)
    with Sandbox.run(provider="runloop") as box:
        box.exec(["true"]).result(SECONDS)
        lost = emulator.faults.add("exec-dropped", count=3, match={"operation": "send-std-in"})
        box.write_file("/tmp/data", data).result(SECONDS)
        seen = box.exec(["sha256sum", "/tmp/data"]).result(SECONDS).stdout.split()[0]
        assert seen == hashlib.sha256(data).hexdigest()
        assert box.exec(["sh", "-c", "echo x >> /tmp/count; cat /tmp/count"]).result(SECONDS).stdout == "x\n"
    assert emulator.faults.hits(lost) == 3


def test_a_lost_answer_to_the_start_of_the_program_is_an_error_that_may_be_tried_again(emulator: Any) -> None:
    with Sandbox.run(provider="runloop") as box:
        box.wait(SECONDS)
        emulator.faults.add("exec-dropped", match={"operation": "execute-async"})
        with contextlib.suppress(SandboxUnavailableError, RequestTimeoutError):
            box.exec(["true"]).result(SECONDS)
        assert box.exec(["echo", "again"]).result(SECONDS).stdout == "again\n"


def test_gone_in_the_middle_of_a_command(emulator: Any) -> None:
    box = Sandbox.run(provider="runloop")
    box.wait(SECONDS)
    emulator.faults.add("gone-mid-command", seconds=0.5)
    with pytest.raises(SandboxGone):
        box.exec(["sleep", "1000"]).result(SECONDS)
    assert box.stop().result(SECONDS).outcome is Outcome.ALREADY_GONE


def test_the_key_is_on_no_command_line_and_nothing_of_ours_stays_after_a_close(
    emulator: Any, provider: RunloopProvider
) -> None:
    import runloop_api_client

    made = run(provider.create(spec()))
    run(provider.wait_ready(made.sandbox_id))

    async def words(argv: tuple[str, ...]) -> bytes:
        from lowtide.providers.base import ProcessSpec

        process = await provider.start_process(made.sandbox_id, ProcessSpec(argv=argv))
        return b"".join([data async for _, data in process.output()])

    show = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' '"
    seen = run(words(("sh", "-c", show)))
    assert b" serve " in seen
    key = provider._keys[made.sandbox_id]
    assert key not in seen
    assert key.hex().encode() not in seen
    assert run(words(("sh", "-c", "ls -a /tmp | grep lowtide || true"))) == b""  # the file it came in is gone
    run(provider.aclose())
    with runloop_api_client.Runloop() as sdk:
        deadline = time.monotonic() + 60  # the server inside leaves after ten seconds alone
        count = "pgrep -fc '[.]lowtide-' || true"
        while sdk.devboxes.execute_and_await_completion(made.sandbox_id, command=count).stdout != "0\n":
            assert time.monotonic() < deadline
            time.sleep(0.5)
    assert run(provider.destroy(made.sandbox_id)) is True


def test_a_command_under_way_hears_of_a_pause_and_the_next_one_runs(emulator: Any) -> None:
    with Sandbox.run(provider="runloop") as box:
        running = box.exec(["sh", "-c", "echo begun; sleep 600"])
        assert next(iter(running.stdout)) == "begun\n"
        box.pause().result(SECONDS)
        with pytest.raises(SandboxUnavailableError, match="paused") as caught:
            running.result(SECONDS)
        assert not caught.value.retryable
        box.resume().result(SECONDS)
        assert box.exec(["echo", "again"]).result(SECONDS).stdout == "again\n"


def test_what_a_way_in_left_that_was_cut_off_is_in_no_later_ones_way(
    emulator: Any, provider: RunloopProvider
) -> None:
    made = run(provider.create(spec()))
    run(provider.wait_ready(made.sandbox_id))
    place = f"/tmp/.lowtide-{provider._doors[made.sandbox_id].name}-"
    # A pause may come between the file and its first run; after the resume a shell may have the same pid.
    left = f"for i in $(seq 1 400); do : >{place}$i; chmod 111 {place}$i; done"

    async def said(*argv: str) -> bytes:
        process = await provider.start_process(made.sandbox_id, ProcessSpec(argv=argv))
        return b"".join([data async for _, data in process.output()])

    assert run(said("sh", "-c", left)) == b""
    run(provider.pause(made.sandbox_id))
    run(provider.resume(made.sandbox_id))
    assert run(said("echo", "again")) == b"again\n"
    run(provider.destroy(made.sandbox_id))
