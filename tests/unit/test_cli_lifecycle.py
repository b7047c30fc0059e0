"""`ls`, `stop`, `rm`, `adopt`, `history`, `sweep`, `guardian`, `doctor`: what exists and how it ends."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)

HOLD = """
import sys, time
from lowtide import Sandbox
boxes = [Sandbox.run(tags=[tag]) for tag in sys.argv[1:]]
print(*[box.sandbox_id for box in boxes], flush=True)
time.sleep(300)
"""


class Owner:
    """A program that holds sandboxes until it is told to leave."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        self.ids = process.stdout.readline().decode().split()


@pytest.fixture
def owner(cli: Cli) -> Iterator[Owner]:  # noqa: F811
    process = cli.python(HOLD, "first", "second", stderr=subprocess.DEVNULL)
    yield Owner(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def test_ls_filters_by_tag_and_prints_ids_alone_on_request(cli: Cli, owner: Owner) -> None:  # noqa: F811
    assert set(cli.ids()) == set(owner.ids)
    assert cli("ls", "-q", "--tag", "second").stdout.decode().split() == owner.ids[1:]
    table = cli("ls").stdout.decode()
    assert table.splitlines()[0].split() == ["ID", "PROVIDER", "STATE", "OWNER", "AGE", "ENDS", "TAGS"]
    assert str(owner.process.pid) in table
    assert b"no sandboxes" in cli("ls", "--tag", "third").stdout


def test_stop_and_rm_end_what_another_process_owns(cli: Cli, owner: Owner) -> None:  # noqa: F811
    first, second = owner.ids
    (report,) = cli.json("stop", first)
    assert (report["id"], report["outcome"], report["error"]) == (first, "destroyed", None)
    assert cli("stop", first).stdout.decode().strip() == f"{first} already gone"
    assert cli("rm", second).stdout.decode().strip() == f"{second} destroyed"
    done = cli("rm", second)
    assert done.returncode == 1
    assert "lowtide ls" in one_line(done)
    assert cli.ids() == []


def test_rm_by_tag_takes_only_what_has_the_tag(cli: Cli, owner: Owner) -> None:  # noqa: F811
    assert cli("rm", "--tag", "first").returncode == 0
    assert cli.ids() == owner.ids[1:]


def test_an_id_that_could_be_two_is_refused(cli: Cli, owner: Owner) -> None:  # noqa: F811
    done = cli("rm", owner.ids[0][:4])
    assert done.returncode == 2
    assert "say more of the id" in one_line(done)
    assert len(cli.ids()) == 2


def test_history_is_the_story_of_one_lease_also_after_its_end(cli: Cli, owner: Owner) -> None:  # noqa: F811
    first = owner.ids[0]
    cli("rm", first)
    states = [line["after"] for line in cli.json("history", first)]
    assert states == ["intended", "live", "ending", "gone"]
    assert "gone" in cli("history", first).stdout.decode()


def test_history_shows_what_the_network_refused_also_after_the_end(cli: Cli) -> None:  # noqa: F811
    code = "import socket; socket.create_connection(('10.9.8.7', 5432), 5).recv(1)"
    done = cli("run", "--network", "allowed.invalid", "--", "python3", "-c", code)
    assert done.returncode == 1
    (hint,) = [line for line in done.stderr.splitlines() if line.startswith(b"lowtide:")]
    assert b"10.9.8.7:5432/tcp" in hint
    (row,) = cli.json("ls", "--all")
    lines = cli.json("history", row["id"])
    assert [line["after"] for line in lines if "after" in line] == ["intended", "live", "ending", "gone"]
    (refused,) = [line for line in lines if "refused" in line]
    assert (refused["refused"], refused["port"], refused["protocol"]) == ("10.9.8.7", 5432, "tcp")
    (shown,) = [line for line in cli("history", row["id"]).stdout.decode().splitlines() if "10.9.8.7" in line]
    assert "not on the allow-list" in shown


def test_a_sweep_leaves_what_a_living_owner_holds_and_says_so(cli: Cli, owner: Owner) -> None:  # noqa: F811
    findings = cli.json("sweep")
    assert {one["id"] for one in findings} == set(owner.ids)
    assert {one["action"] for one in findings} == {"left"}
    assert all(str(owner.process.pid) in one["why"] for one in findings)
    assert "is alive" in cli("sweep", "--dry-run", "--older-than", "0s").stdout.decode()
    assert len(cli.ids()) == 2


def test_an_adopted_sandbox_survives_its_owner(cli: Cli, owner: Owner) -> None:  # noqa: F811
    first = owner.ids[0]
    refused = cli("adopt", first)
    assert refused.returncode != 0
    assert b"--take" in refused.stderr
    (kept,) = cli.json("adopt", "--take", "--keep-for", "1h", first)
    assert kept["id"] == first
    owner.process.send_signal(signal.SIGINT)
    owner.process.wait(60)
    (row,) = cli.json("ls")
    assert (row["id"], row["state"]) == (first, "kept")
    assert cli("exec", first, "--", "echo", "still here").stdout == b"still here\n"
    (finding,) = cli.json("sweep")
    assert (finding["action"], finding["id"]) == ("left", first)
    assert cli("stop", first).stdout.decode().strip() == f"{first} destroyed"


def test_the_guardian_watches_a_living_owner(cli: Cli, owner: Owner) -> None:  # noqa: F811
    status = cli.json("guardian", "status")
    assert status["running"]
    assert owner.process.pid in status["owners"]


def test_stop_with_a_snapshot_prints_an_id_a_new_sandbox_starts_from(cli: Cli, owner: Owner) -> None:  # noqa: F811
    first = owner.ids[0]
    assert cli("exec", first, "--", "sh", "-c", "echo kept >/root/state").returncode == 0
    (report,) = cli.json("stop", "--snapshot", first)
    snapshot = report["snapshot_id"]
    assert cli("run", "--snapshot", snapshot, "--", "cat", "/root/state").stdout == b"kept\n"


def test_doctor_really_tries_the_default_provider(cli: Cli) -> None:  # noqa: F811
    findings = cli.json("doctor")
    works = [one for one in findings if one["about"] == "local" and one["check"] == "works"]
    assert works[0]["ok"], works
    assert all(one["why"] for one in findings)
    text = cli("doctor", "--provider", "local").stdout.decode()
    assert "made, used and ended" in text


def test_doctor_fails_when_the_provider_that_was_asked_for_does_not_work(cli: Cli) -> None:  # noqa: F811
    done = cli("doctor", "--provider", "docker", DOCKER_HOST="tcp://127.0.0.1:9")
    assert done.returncode == 1
