"""Every attempt to get out of a sandbox, on local and on the engines that are there, as root and as an ordinary user."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest
from tests.container_engine import needs_docker
from tests.escape.attempt import GVISOR, Attempt, LeftOut, Target, everything
from tests.kubernetes_node import IMAGE, needs_node
from tests.ordinary_user import ROOT, OrdinaryUser, why_not

MARKS = {
    "local": [],
    "docker": needs_docker,
    "kubernetes": needs_node,
    GVISOR: [pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed")],
}


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    made = {name: Target(name, None if name in ("local", GVISOR) else IMAGE) for name in MARKS}
    yield made
    for target in made.values():
        target.__exit__()


@pytest.mark.parametrize(
    ("provider", "one"),
    [
        pytest.param(provider, one, id=f"{provider}-{one.name}", marks=MARKS[provider])
        for provider in MARKS
        for one in everything()
        if one.applies(provider)
    ],
)
def test_it_holds(targets: dict[str, Target], provider: str, one: Attempt) -> None:
    try:
        assert one.work(targets[provider]) is None
    except LeftOut as reason:
        pytest.skip(str(reason))


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.slow
def test_it_holds_for_an_ordinary_user() -> None:
    with OrdinaryUser() as user:
        tried = user.command("-m", "tests.escape", "--provider", "local")
        done = subprocess.run(tried, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("GOT OUT")] == [], done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    assert len([line for line in lines if line.startswith("held")]) > 60


def test_there_are_at_least_sixty() -> None:
    assert len(everything()) >= 60
    assert len({one.name for one in everything()}) == len(everything())
