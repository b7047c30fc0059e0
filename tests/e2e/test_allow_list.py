"""A sandbox with an allow-list reaches what is on it and nothing else, made by root and by an ordinary user."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from tests.allow_list.attempts import everything
from tests.allow_list.world import run_on_the_machine
from tests.container_engine import needs_docker
from tests.ordinary_user import OrdinaryUser, why_not

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces: needs root and ip"
    ),
    pytest.mark.slow,
    pytest.mark.xdist_group("allow-list"),
]


@pytest.fixture(
    scope="module",
    params=["local as root", "local as an ordinary user", pytest.param("docker", marks=needs_docker)],
)
def lines(request: pytest.FixtureRequest) -> dict[str, str]:
    """What became of each attempt."""
    arguments = ("-m", "tests.allow_list.attempts", "{log}", request.param.split()[0])
    if request.param != "local as an ordinary user":
        done = run_on_the_machine([sys.executable, *arguments], 280)
    elif why_not() is not None:
        pytest.skip(why_not() or "")
    else:
        with OrdinaryUser() as user:
            done = run_on_the_machine(user.command(*arguments), 280)
    found = {
        line.split()[2 if line.startswith("GOT") else 1]: line for line in done.stdout.splitlines() if line
    }
    assert found, done.stderr[-4000:]
    return found


@pytest.mark.parametrize("name", everything())
def test_it_holds(lines: dict[str, str], name: str) -> None:
    assert lines.get(name, "not tried").split()[0] in ("works", "held"), lines.get(name)
