"""A sandbox with an allow-list reaches what is on it and nothing else, made by root and by an ordinary user."""

from __future__ import annotations

import json
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
]


@pytest.mark.parametrize(
    "who", ["local as root", "local as an ordinary user", pytest.param("docker", marks=needs_docker)]
)
def test_every_attempt_holds(who: str) -> None:
    """In one: the world around it is made once, and takes a minute."""
    arguments = ("-m", "tests.allow_list.attempts", "{log}", who.split()[0])
    if who != "local as an ordinary user":
        done = run_on_the_machine([sys.executable, *arguments], 280)
    elif why_not() is not None:
        pytest.skip(why_not() or "")
    else:
        with OrdinaryUser() as user:
            done = run_on_the_machine(user.command(*arguments), 280)
    became = {
        line.split()[2 if line.startswith("GOT") else 1]: line for line in done.stdout.splitlines() if line
    }
    assert became, done.stderr[-4000:]
    wrong = {
        name: became.get(name, "not tried")
        for name in everything()
        if became.get(name, "not tried").split()[0] not in ("works", "held")
    }
    assert wrong == {}


@pytest.mark.parametrize("cpu", ["0.2", "-"])
def test_a_client_that_sends_byte_by_byte_costs_the_proxy_little(cpu: str) -> None:
    """In processor time, not in time that passes. Parsing from the first byte again took 35 times the clients' share."""
    done = run_on_the_machine([sys.executable, "-m", "tests.allow_list.dribble", cpu, "4"], 100)
    assert done.returncode == 0, done.stderr[-4000:]
    spent = json.loads(done.stdout)
    assert spent["proxy"] < 5 * spent["clients"] + 0.3, spent
    if cpu != "-":  # both together have the sandbox's share; half as much again for a coarse clock
        assert spent["proxy"] + spent["clients"] < 1.5 * float(cpu) * spent["passed"], spent
