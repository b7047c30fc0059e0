"""A sandbox with network="internet" reaches the public internet and nothing else, as root and as an ordinary user."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from tests.allow_list.internet import everything
from tests.allow_list.world import NOT_PUBLIC, run_on_the_machine
from tests.ordinary_user import OrdinaryUser, why_not

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces: needs root and ip"
    ),
    pytest.mark.slow,
]

OF_THE_MACHINE = (
    "the_machines_own_address",
    "the_machines_second_address",
    "a_range_that_is_the_machines",
    "a_range_that_is_the_machines_v6",
)
PROGRAM = ("-m", "tests.allow_list.internet")


@pytest.mark.parametrize("word", ["internet", "full"])
@pytest.mark.parametrize("who", ["root", "an ordinary user"])
def test_the_internet_is_reached_and_nothing_inside(who: str, word: str) -> None:
    """Every attempt in one test: making the world around it takes longer than an attempt."""
    only = (
        ()
        if word == "internet"
        else ("a_name_by_http", "connect_metadata", "connect_the_machines_second_address")
    )
    if who == "root":
        done = run_on_the_machine([sys.executable, *PROGRAM, word, *only], 280)
    elif why_not() is not None:
        pytest.skip(why_not() or "")
    else:
        with OrdinaryUser() as user:
            done = run_on_the_machine(user.command(*PROGRAM, word, *only), 280)
    became = {
        line.split()[2 if line.startswith("GOT") else 1]: line for line in done.stdout.splitlines() if line
    }
    assert became, done.stderr[-4000:]
    wrong = {
        name: became.get(name, "not tried")
        for name in only or everything()
        if became.get(name, "not tried").split()[0] not in ("works", "held")
    }
    assert wrong == {}


def test_the_attempts_would_reach_what_is_inside_with_the_network_of_the_machine() -> None:
    """The world answers on every address that the attempts try: what holds them back is the sandbox's network."""
    names = [f"connect_{name}" for name in NOT_PUBLIC] + ["connect_loopback", "abstract_socket", "datagrams"]
    names += [f"connect_{name}" for name in OF_THE_MACHINE]
    done = run_on_the_machine([sys.executable, *PROGRAM, "host", *names], 280)
    reached = {line.split()[2] for line in done.stdout.splitlines() if line.startswith("GOT OUT")}
    assert reached == set(names), done.stdout + done.stderr[-4000:]
