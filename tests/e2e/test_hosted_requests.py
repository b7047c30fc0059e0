"""What a sandbox's life costs on a hosted service: its requests, counted by the emulator. No clock is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests import coreweave_emulator, modal_emulator, runloop_emulator

from lowtide import Sandbox
from lowtide.lifecycle.lease import Outcome
from lowtide.testing.conformance.base import eventually

pytestmark = pytest.mark.timeout(300)

SECONDS = 120.0

LIVES = {
    "modal": [
        "sandbox-create",
        "sandbox-tags-get",  # its answer to a create does not say whose sandbox it is
        "task-exec-start",
        "task-exec-stdio-read",
        "sandbox-terminate",
        "sandbox-wait",
    ],
    "runloop": ["create", "wait-for-status", "execute-async", "send-std-in", "stream", "shutdown"],
    "coreweave": ["create-sandbox", "get-sandbox", "stream-exec", "exec", "delete-sandbox", "get-sandbox"],
}
"""A life with one command and the default grace. What is asked again until it is so stands here once."""
_EMULATORS: dict[str, Any] = {
    "modal": modal_emulator,
    "runloop": runloop_emulator,
    "coreweave": coreweave_emulator,
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=module.needs_emulator) for name, module in _EMULATORS.items()],
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    for handle in _EMULATORS[request.param].serving():
        yield request.param, handle


def _guardian_has_asked(handle: Any, box: Sandbox) -> bool:
    """Whether the guardian's worker for the account has tried it out: it asks for a sandbox that nobody has."""
    calls = handle.calls()
    if sum(call["operation"] == "app-get-or-create" for call in calls) > 1:  # Modal: all that this needs
        return True
    return any(call["sandbox_id"] not in ("", box.sandbox_id) for call in calls)


def test_a_life_makes_no_request_that_it_does_not_need(served: tuple[str, Any]) -> None:
    """The program and the first command come in with what has to be sent anyway, and an end says no goodbyes."""
    name, handle = served
    with Sandbox.run(provider=name) as warm:  # looks the account up, once
        warm.exec(["true"]).result(SECONDS)
        eventually(lambda: _guardian_has_asked(handle, warm), what="the guardian's own first request")
    before = len(handle.calls())
    with Sandbox.run(provider=name) as box:
        assert box.exec(["echo", "hi"]).result(SECONDS).stdout == "hi\n"
    after = [call for call in handle.calls()[before:] if call["sandbox_id"] in ("", box.sandbox_id)]
    assert sorted(_once(call["operation"] for call in after)) == sorted(LIVES[name])  # some go at once


def test_a_second_command_goes_on_where_the_first_was_one_answer(served: tuple[str, Any]) -> None:
    name, _ = served
    with Sandbox.run(provider=name) as box:
        first = box.exec(
            ["sh", "-c", "(sleep 0.5; echo late > /tmp/late) & echo up; sleep 0.4; echo done; exit 3"]
        )
        assert (first.result(SECONDS).stdout, first.result(SECONDS).returncode) == ("up\ndone\n", 3)
        assert box.exec(["cat"], stdin="given").result(SECONDS).stdout == "given"
        assert (
            box.exec(["sh", "-c", "head -c 3000000 /dev/zero | wc -c"]).result(SECONDS).stdout == "3000000\n"
        )
        large = box.exec(["head", "-c", "3000000", "/dev/zero"]).result(SECONDS)
        assert len(large.stdout) == 3_000_000


def test_a_first_command_with_much_output_loses_none_of_it(served: tuple[str, Any]) -> None:
    name, _ = served
    with Sandbox.run(provider=name) as box:
        said = box.exec(["sh", "-c", "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done"])
        lines = said.result(SECONDS).stdout.splitlines()
        assert lines == [f"line {n}" for n in range(20_000)]


def test_commands_are_told_to_end_before_the_sandbox_does(served: tuple[str, Any]) -> None:
    """Where a sandbox's end leaves them time: on Runloop it does not."""
    name, _ = served
    if name != "modal":
        pytest.skip("the service's own end has a grace, or has none")
    box = Sandbox.run(provider=name)
    told = box.exec(["sh", "-c", "trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.05; done"])
    seen = iter(told.stdout)
    assert next(seen) == "up\n"
    assert box.stop(graceful_shutdown_seconds=30.0).result(SECONDS).outcome is Outcome.DESTROYED
    assert next(seen) == "told\n"


def _once(operations: Iterator[str]) -> list[str]:
    found: list[str] = []
    for one in operations:
        if one not in found[-1:]:
            found.append(one)
    return found
