"""When nothing of a pod runs any more, by the states that a real node (1.20) has reported."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.providers.kubernetes import status


def pod(phase: str, *states: str) -> dict[str, Any]:
    return {"status": {"phase": phase, "containerStatuses": [{"state": {state: {}}} for state in states]}}


@pytest.mark.parametrize(
    ("seen", "has_run", "ended"),
    [
        (pod("Running", "running"), True, False),
        (pod("Succeeded", "terminated"), True, True),
        (pod("Running", "terminated", "running"), True, False),
        # Ended and removed before the node looked: it calls that waiting, and the pod failed.
        (pod("Failed", "waiting"), True, True),
        (pod("Failed"), True, True),
        # Past its deadline, or evicted: the phase comes first, the end of the containers later.
        (pod("Failed", "running"), True, False),
        # Past its deadline while a container is being made, which may start yet.
        (pod("Failed", "waiting"), False, False),
        (pod("Failed"), False, False),
        (pod("Pending", "waiting"), False, False),
        ({}, False, False),
    ],
)
def test_all_terminated(seen: dict[str, Any], has_run: bool, ended: bool) -> None:
    assert status.all_terminated(seen, has_run=has_run) is ended


def test_has_run() -> None:
    assert status.has_run(pod("Running", "waiting", "running"))
    assert status.has_run(pod("Succeeded", "terminated"))
    assert not status.has_run(pod("Failed", "waiting"))
    assert not status.has_run({})
