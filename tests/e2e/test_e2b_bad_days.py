"""E2B on a bad day: each fault the emulator has, through the real SDK, and nothing left after it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2b_emulator import needs_emulator, serving

from lowtide import Sandbox
from lowtide.engine import engine
from lowtide.errors import (
    RateLimitError,
    RequestTimeoutError,
    SandboxFailedError,
    SandboxGone,
    SandboxUnavailableError,
)
from lowtide.lifecycle.lease import Outcome, new_lease_id
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.e2b import E2BProvider
from lowtide.providers.e2b import channel as channel_module
from lowtide.providers.e2b import create as create_module
from lowtide.providers.e2b import destroy as destroy_module

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def serving_emulator() -> Iterator[Any]:
    yield from serving()


@pytest.fixture
def emulator(serving_emulator: Any) -> Iterator[Any]:
    """Nothing exists before, nothing after."""
    assert serving_emulator.state()["sandboxes"]["e2b"] == []
    yield serving_emulator
    serving_emulator.faults.clear()
    deadline = time.monotonic() + 90
    while left := serving_emulator.state()["sandboxes"]["e2b"]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


@pytest.fixture
def provider(emulator: Any) -> Iterator[E2BProvider]:
    connected = E2BProvider.connect(os.environ)
    yield connected
    engine().run(connected.aclose(), SECONDS)


def spec() -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="ledger", owner="owner")
    return SandboxSpec(labels=labels, lifetime_seconds=300.0)


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_an_answer_lost_after_the_commit_makes_exactly_one(emulator: Any, fault: str) -> None:
    emulator.faults.add(fault)
    with Sandbox.run(provider="e2b") as box:
        assert box.exec(["echo", "here"]).result(SECONDS).stdout == "here\n"
        known = emulator.state()["sandboxes"]["e2b"]
        assert [one["sandbox_id"] for one in known] == [box.sandbox_id]


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_every_answer_lost_leaves_nothing(emulator: Any, fault: str) -> None:
    emulator.faults.add(fault, count=None)
    with contextlib.suppress(SandboxUnavailableError, RequestTimeoutError):
        Sandbox.run(provider="e2b").stop().result(SECONDS)
    assert emulator.calls("create")


def test_what_a_lost_create_made_is_found_by_its_labels_alone(
    emulator: Any, provider: E2BProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create_module, "CREATE_SECONDS", 1.0)
    emulator.faults.add("create-slow", seconds=3.0)
    asked = spec()
    with pytest.raises(RequestTimeoutError):
        engine().run(provider.create(asked), SECONDS)
    bare = SandboxSpec(labels=asked.labels)  # all that a guardian's worker knows
    assert engine().run(provider.find(bare), SECONDS) is None
    deadline = time.monotonic() + 30
    while (found := engine().run(provider.find(bare), SECONDS)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert engine().run(provider.destroy(found.sandbox_id), SECONDS) is True


def test_a_refused_create_says_why_and_makes_nothing(emulator: Any, provider: E2BProvider) -> None:
    emulator.faults.add("create-fails", status=500)
    with pytest.raises(SandboxUnavailableError, match="Failed to place"):
        engine().run(provider.create(spec()), SECONDS)
    assert emulator.state()["sandboxes"]["e2b"] == []


def test_a_sandbox_that_never_runs_fails_at_once(emulator: Any) -> None:
    emulator.faults.add("create-error-state")
    box = Sandbox.run(provider="e2b")
    began = time.monotonic()
    with pytest.raises(SandboxFailedError):
        box.exec(["true"]).result(SECONDS)
    assert time.monotonic() - began < 60
    box.stop().result(SECONDS)


def test_a_kill_that_fails_is_tried_again(emulator: Any) -> None:
    box = Sandbox.run(provider="e2b")
    emulator.faults.add("kill-fails", count=3)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED


def test_a_kill_that_is_only_acknowledged_is_noticed(emulator: Any) -> None:
    box = Sandbox.run(provider="e2b")
    emulator.faults.add("kill-ignored", count=2)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED
    assert emulator.state()["sandboxes"]["e2b"] == []


def test_a_kill_that_hangs_has_an_outer_deadline(
    emulator: Any, provider: E2BProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destroy_module, "KILL_SECONDS", 1.0)
    made = engine().run(provider.create(spec()), SECONDS)
    emulator.faults.add("kill-hangs", seconds=30.0)
    with pytest.raises(RequestTimeoutError) as caught:
        engine().run(provider.destroy(made.sandbox_id), SECONDS)
    assert caught.value.retryable
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is True


def test_a_rate_limit_carries_how_long_to_wait(emulator: Any, provider: E2BProvider) -> None:
    made = engine().run(provider.create(spec()), SECONDS)
    emulator.faults.add("rate-limit", seconds=7, count=1)
    with pytest.raises(RateLimitError) as caught:
        engine().run(provider.destroy(made.sandbox_id), SECONDS)
    assert caught.value.retry_after_seconds == 7
    assert caught.value.retryable
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is True


def test_an_end_waits_out_a_rate_limit(emulator: Any) -> None:
    box = Sandbox.run(provider="e2b")
    emulator.faults.add("rate-limit", seconds=1, count=2)
    assert box.stop().result(SECONDS).outcome is Outcome.DESTROYED


def test_a_list_that_lags_does_not_stop_an_end(emulator: Any, provider: E2BProvider) -> None:
    asked = spec()
    made = engine().run(provider.create(asked), SECONDS)
    emulator.faults.add("list-lags", seconds=30, count=1)
    assert engine().run(provider.find(asked), SECONDS) is None  # why an empty list is no proof
    assert engine().run(provider.get(made.sandbox_id), SECONDS).sandbox_id == made.sandbox_id
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is True


def test_gone_in_the_middle_of_a_command(emulator: Any) -> None:
    box = Sandbox.run(provider="e2b")
    box.wait(SECONDS)
    emulator.faults.add("gone-mid-command", seconds=0.5)
    with pytest.raises(SandboxGone):
        box.exec(["sleep", "1000"]).result(SECONDS)
    assert box.stop().result(SECONDS).outcome is Outcome.ALREADY_GONE


_COUNTED = """
import hashlib, sys
digest = hashlib.sha256()
for number in range(800):
    data = hashlib.sha256(str(number).encode()).digest() * 2048
    digest.update(data)
    sys.stdout.buffer.write(data)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
"""


def test_fifty_megabytes_across_ten_drops_and_the_command_runs_once(emulator: Any) -> None:
    with Sandbox.run(provider="e2b") as box:
        box.exec(["true"]).result(SECONDS)
        match = {"sandbox_id": str(box.sandbox_id), "user": "user"}
        fault = emulator.faults.add("exec-dropped", match=match, seconds=0.05, count=9)
        [first] = [one for one in channel_module._channels if one._sandbox.sandbox_id == box.sandbox_id]
        script = 'echo ran >>/tmp/counter; exec python3 -c "$1"'
        running = box.exec(["sh", "-c", script, "sh", _COUNTED])
        engine().loop.call_soon_threadsafe(first.close)  # the tenth: what is there already breaks, too
        result = running.result(SECONDS)
        assert emulator.faults.hits(fault) == 9
        assert len(result.stdout_bytes) == 800 * 65536
        assert hashlib.sha256(result.stdout_bytes).hexdigest() == result.stderr
        assert box.read_file("/tmp/counter").result(SECONDS) == b"ran\n"
        box.exec(["sh", "-c", "while ls -A /tmp | grep -q lowtide; do sleep 0.05; done"]).result(SECONDS)


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["before the program answers", "in the middle"])
def test_a_command_whose_stream_drops_runs_once_and_keeps_its_result(emulator: Any, seconds: float) -> None:
    with Sandbox.run(provider="e2b") as box:
        box.wait(SECONDS)
        fault = emulator.faults.add(
            "exec-dropped", seconds=seconds, match={"sandbox_id": str(box.sandbox_id)}
        )
        script = "echo x >>/tmp/counter; sleep 0.5; wc -l </tmp/counter; exit 3"
        result = box.exec(["sh", "-c", script]).result(SECONDS)
        assert (result.stdout.strip(), result.returncode) == ("1", 3)
        assert emulator.faults.hits(fault) == 1


def test_a_stale_token_is_fetched_anew(emulator: Any) -> None:
    box = Sandbox.run(provider="e2b")
    box.wait(SECONDS)
    emulator.faults.add("stale-token", match={"sandbox_id": str(box.sandbox_id)})
    assert box.exec(["echo", "again"]).result(SECONDS).stdout == "again\n"
    box.stop().result(SECONDS)


def test_its_lifetime_ends_it_without_us(emulator: Any, provider: E2BProvider) -> None:
    made = engine().run(provider.create(spec()), SECONDS)
    emulator.clock.advance(301)
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is False
    with pytest.raises(SandboxGone):
        engine().run(provider.wait_ready(made.sandbox_id), SECONDS)
