"""`lowtide forget`: a lease whose account cannot be asked any more is settled, on a person's yes alone."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)

from lowtide.testing import FaultyService

HOLD = """
import time
from lowtide import Sandbox
print(Sandbox.run(provider="faulty").sandbox_id, flush=True)
time.sleep(300)
"""


@dataclass
class Left:
    """A sandbox that a killed process left, and the key that only that process had."""

    sandbox_id: str
    service: FaultyService
    key: dict[str, str]
    process: subprocess.Popen[bytes]


@pytest.fixture
def held(cli: Cli, tmp_path: Path) -> Iterator[Left]:  # noqa: F811
    with FaultyService(tmp_path / "service") as service:
        cli.environ["LOWTIDE_FAULTY_DIR"] = str(service.directory)
        key = {"LOWTIDE_FAULTY_KEY": "lost"}
        cli.environ |= key
        process = cli.python(HOLD, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        sandbox_id = process.stdout.readline().decode().strip()
        del cli.environ["LOWTIDE_FAULTY_KEY"]
        yield Left(sandbox_id, service, key, process)
        process.kill()
        process.communicate()
        service.exchange_key("lost")
        cli("rm", "--missing-ok", sandbox_id, "--provider", "faulty", **key)


@pytest.fixture
def left(held: Left) -> Left:
    held.service.exchange_key("exchanged")  # from now on nobody has one
    held.process.kill()
    held.process.wait()
    return held


def test_nothing_is_forgotten_without_a_yes(cli: Cli, left: Left) -> None:  # noqa: F811
    for answer in (None, "n\n"):
        done = cli("forget", left.sandbox_id, input=answer)
        assert done.returncode == 1
        said = done.stdout.decode()
        assert "may still be running" in said
        assert "provider's console" in said
        assert "not confirmed" in done.stderr.decode()
    assert cli.ids() == [left.sandbox_id]
    done = cli("forget", left.sandbox_id, "--json")
    assert done.returncode == 1
    assert [one["forgotten"] for one in json.loads(done.stdout)] == [False]


@pytest.mark.parametrize("how", ["typed", "--yes"])
def test_a_lease_whose_account_cannot_be_asked_is_settled(cli: Cli, left: Left, how: str) -> None:  # noqa: F811
    typed = {"input": "y\n"} if how == "typed" else {}
    done = cli("forget", left.sandbox_id, *(() if typed else ("--yes",)), **typed)
    assert done.returncode == 0, done.stderr
    assert cli.ids() == []
    (row,) = cli.json("ls", "--all")
    assert (row["id"], row["state"]) == (
        left.sandbox_id,
        "released",
    )  # no end is claimed that nobody has seen
    last = cli.json("history", left.sandbox_id)[-1]
    assert "forgotten by hand, it may still be running" in last["why"]
    assert left.service.sandboxes() == [left.sandbox_id]
    deadline = time.monotonic() + 60  # the guardian has nothing left to try
    while cli.json("guardian", "status")["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    left.service.exchange_key("lost")
    assert cli("rm", left.sandbox_id, **left.key).returncode == 0  # with the key it can be destroyed yet
    assert left.service.sandboxes() == []


def test_what_can_be_asked_for_is_refused(cli: Cli, left: Left) -> None:  # noqa: F811
    done = cli("forget", left.sandbox_id, "--yes", LOWTIDE_FAULTY_KEY="exchanged")
    assert done.returncode == 1
    assert f"lowtide rm {left.sandbox_id}" in one_line(done)
    assert cli.ids() == [left.sandbox_id]


def test_what_a_living_process_owns_is_refused(cli: Cli, held: Left) -> None:  # noqa: F811
    done = cli("forget", held.sandbox_id, "--yes")
    assert done.returncode == 1
    assert f"process {held.process.pid}, is alive" in one_line(done)
    assert cli.ids() == [held.sandbox_id]


def test_what_is_not_in_the_ledger_is_an_error(cli: Cli) -> None:  # noqa: F811
    done = cli("forget", "01zzzzzzzzzzzzzzzzzzzzzzzz", "--yes")
    assert done.returncode == 1
    assert "lowtide ls" in one_line(done)
