"""`lowtide run` and `lowtide exec`: streams, exit codes, Ctrl+C, and a sandbox that is gone afterwards."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)

from lowtide.cli import exit_codes

HOLD = """
import sys, time
from lowtide import Sandbox
with Sandbox.run(tags=sys.argv[1:]) as sb:
    print(sb.sandbox_id, flush=True)
    time.sleep(300)
"""


def _ready(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def _finish(process: subprocess.Popen[bytes], seconds: float = 60) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err or b""


def test_output_and_exit_code_are_the_commands_and_the_sandbox_is_gone(cli: Cli) -> None:  # noqa: F811
    done = cli("run", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    (row,) = cli.json("ls", "--all")
    assert row["state"] == "terminated"


def test_options_of_the_command_are_not_ours_with_or_without_dashes(cli: Cli) -> None:  # noqa: F811
    assert cli("run", "echo", "--help", "-t").stdout == b"--help -t\n"
    assert cli("run", "--", "echo", "--tag", "--", "x").stdout == b"--tag -- x\n"


def test_bytes_pass_through_unchanged_both_ways(cli: Cli) -> None:  # noqa: F811
    data = bytes(range(256)) * 20_000
    done = cli("run", "--stdin", "--", "cat", input=data)
    assert done.returncode == 0, done.stderr
    assert hashlib.sha256(done.stdout).hexdigest() == hashlib.sha256(data).hexdigest()


def test_without_stdin_the_command_sees_an_empty_input(cli: Cli) -> None:  # noqa: F811
    assert cli("run", "--no-stdin", "--", "wc", "-c", input="ours").stdout.strip() == b"0"


def test_fifty_megabytes_of_output(cli: Cli) -> None:  # noqa: F811
    done = cli("run", "--", "head", "-c", "50000000", "/dev/zero")
    assert len(done.stdout) == 50_000_000


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["no-such-program"], exit_codes.NOT_FOUND),
        (["/etc/passwd"], exit_codes.NOT_EXECUTABLE),
        (["sh", "-c", "kill -9 $$"], 128 + 9),
        (["false"], 1),
    ],
)
def test_exit_codes_as_a_shell_gives_them(cli: Cli, command: list[str], code: int) -> None:  # noqa: F811
    assert cli("run", "--", *command).returncode == code


def test_a_timeout_ends_the_whole_tree_and_keeps_the_output(cli: Cli) -> None:  # noqa: F811
    done = cli("run", "--timeout", "1s", "--", "sh", "-c", "echo begun; sleep 300 & sleep 300")
    assert done.returncode == exit_codes.TIMEOUT
    assert done.stdout == b"begun\n"
    assert "--timeout" in one_line(done)


def test_settings_reach_the_sandbox(cli: Cli) -> None:  # noqa: F811
    script = 'echo "$GIVEN $PASSED"; pwd'
    options = ["--env", "GIVEN=a b", "--env", "PASSED", "--workdir", "/tmp"]
    done = cli("run", *options, "--", "sh", "-c", script, PASSED="on")
    assert done.stdout.decode().splitlines() == ["a b on", "/tmp"]


def test_ctrl_c_goes_inside_and_the_commands_answer_counts(cli: Cli) -> None:  # noqa: F811
    script = 'trap "echo caught; exit 5" INT; echo ready; while :; do sleep 0.05; done'
    process = cli.start("run", "--", "sh", "-c", script)
    assert _ready(process) == "ready"
    process.send_signal(signal.SIGINT)
    assert _finish(process) == (5, b"caught\n", b"")


def test_a_second_ctrl_c_ends_a_command_that_ignores_the_first(cli: Cli) -> None:  # noqa: F811
    process = cli.start("run", "--", "sh", "-c", 'trap "" INT; echo ready; while :; do sleep 0.05; done')
    assert _ready(process) == "ready"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert _finish(process)[0] == exit_codes.INTERRUPTED
    assert cli.ids() == []


def test_sigterm_ends_the_sandbox_and_dies_of_the_signal(cli: Cli) -> None:  # noqa: F811
    process = cli.start("run", "--", "sh", "-c", "echo ready; sleep 300")
    assert _ready(process) == "ready"
    process.terminate()
    assert _finish(process)[0] == -signal.SIGTERM
    assert cli.ids() == []


def test_kill_dash_nine_of_run_leaves_nothing(cli: Cli) -> None:  # noqa: F811
    process = cli.start("run", "--", "sh", "-c", "echo ready; sleep 300")
    assert _ready(process) == "ready"
    process.kill()
    _finish(process)
    deadline = time.monotonic() + 60
    while cli.ids() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cli.ids() == []


def test_a_reader_that_leaves_ends_an_endless_command(cli: Cli) -> None:  # noqa: F811
    process = cli.start("run", "--", "yes")
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert process.wait(60) == exit_codes.BROKEN_PIPE
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


def test_keep_on_failure_keeps_after_a_non_zero_exit_and_not_after_zero(cli: Cli) -> None:  # noqa: F811
    assert cli("run", "--keep", "on-failure", "--", "true").returncode == 0
    assert cli.ids() == []
    done = cli(
        "run",
        "--keep",
        "on-failure",
        "--keep-for",
        "2h",
        "--tag",
        "debug-me",
        "--",
        "sh",
        "-c",
        "echo x >/root/left; exit 3",
    )
    assert done.returncode == 3
    (row,) = cli.json("ls", "--tag", "debug-me")
    assert row["state"] == "kept"
    assert row["kept_until"] > row["created_at"]
    assert row["id"].encode() in done.stderr
    assert cli("exec", row["id"], "--", "cat", "/root/left").stdout == b"x\n"
    assert cli("exec", row["id"][-8:], "cat", "/root/left").stdout == b"x\n"
    assert cli("rm", row["id"]).returncode == 0


def test_exec_in_another_process_sandbox_leaves_it_to_its_owner(cli: Cli) -> None:  # noqa: F811
    owner = cli.python(HOLD, "shared")
    try:
        sandbox_id = _ready(owner)
        done = cli(
            "exec", "--workdir", "/tmp", "--env", "A=1", sandbox_id, "--", "sh", "-c", "pwd; echo $A; exit 4"
        )
        assert (done.returncode, done.stdout) == (4, b"/tmp\n1\n")
        (row,) = cli.json("ls")
        assert row == {
            "id": sandbox_id,
            "provider": "local",
            "state": "running",
            "tags": ["shared"],
            "owner": {"host": row["owner"]["host"], "pid": owner.pid, "alive": True},
            "created_at": row["created_at"],
            "expires_at": row["expires_at"],
            "kept_until": None,
        }
        (asked,) = cli.json("ls", "--provider", "local", "--tag", "shared")
        assert asked["id"] == sandbox_id
    finally:
        os.kill(owner.pid, signal.SIGINT)
        owner.communicate(timeout=60)


def test_a_failure_of_ours_is_never_an_exit_code_of_the_command(cli: Cli) -> None:  # noqa: F811
    done = cli("run", "--image", "no/such-image:ever", "--", "true")
    assert done.returncode in (exit_codes.INFRASTRUCTURE, exit_codes.USAGE)
    assert "lowtide image" in one_line(done)


@pytest.mark.parametrize("command", ["npm install left-pad", "apt-get install -y hello"])
def test_a_package_manager_without_a_network_gets_one_line_with_a_setting(cli: Cli, command: str) -> None:  # noqa: F811
    """The name is what counts: no package manager runs."""
    done = cli("run", "--", "sh", "-c", f"exit 1; {command}")
    (hint,) = [line for line in done.stderr.splitlines() if line.startswith(b"lowtide:")]
    assert b"--network internet" in hint
    assert done.returncode == 1


@pytest.mark.parametrize("network", ["internet", "full", "registry.npmjs.org", "host"])
def test_no_line_recommends_a_network_that_was_passed(cli: Cli, network: str) -> None:  # noqa: F811
    done = cli("run", "--network", network, "--", "sh", "-c", "exit 1; npm install left-pad")
    assert done.returncode == 1
    assert b"--network" not in done.stderr
