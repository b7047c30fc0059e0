"""`lowtide snapshot`: find what outlives its sandbox, start from it, remove it."""

from __future__ import annotations

import sys

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def test_a_snapshot_is_listed_used_and_removed(cli: Cli) -> None:  # noqa: F811
    assert b"no snapshots" in cli("snapshot", "ls").stdout
    cli("run", "--keep", "always", "--", "sh", "-c", "echo kept >/root/f")
    (box,) = cli.json("ls")
    assert cli("stop", "--snapshot", box["id"]).returncode == 0
    (snapshot,) = cli.json("snapshot", "ls")
    assert snapshot["id"] in cli("snapshot", "ls").stdout.decode()
    assert cli("run", "--snapshot", snapshot["id"], "--", "cat", "/root/f").stdout == b"kept\n"
    assert cli("snapshot", "rm", snapshot["id"]).returncode == 0
    assert cli.json("snapshot", "ls") == []
    done = cli("snapshot", "rm", snapshot["id"])
    assert done.returncode == 1
    assert "lowtide snapshot ls" in one_line(done)
    assert cli("snapshot", "rm", "--missing-ok", snapshot["id"]).returncode == 0


def test_one_in_use_stays_and_keeps_no_other(cli: Cli) -> None:  # noqa: F811
    cli("run", "--keep", "always", "--", "true")
    (box,) = cli.json("ls")
    cli("stop", "--snapshot", box["id"])
    (snapshot,) = cli.json("snapshot", "ls")
    cli("run", "--snapshot", snapshot["id"], "--keep", "always", "--", "true")
    done = cli("snapshot", "rm", "no-such", snapshot["id"])
    assert done.returncode == 1
    assert [one["id"] for one in cli.json("snapshot", "ls")] == [snapshot["id"]]
    (user,) = cli.json("ls")
    assert cli("rm", user["id"]).returncode == 0
    assert cli("snapshot", "rm", snapshot["id"]).returncode == 0
