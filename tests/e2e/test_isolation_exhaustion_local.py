"""Attempts to use the machine up from a local sandbox: processes, memory, disk, descriptors. The host stays healthy."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from isolation_attempts import ANSWER_SECONDS

from lowtide import Sandbox
from lowtide.errors import LowtideError, UnsupportedError

pytestmark = [
    pytest.mark.alone,  # a machine full of processes would break its neighbours' time limits
    pytest.mark.usefixtures("healthy_host"),
]

ROOT = os.geteuid() == 0
FORK_BOMB = "f() { f | f & }; f; sleep 3"


def run_with_limits(**limits: object) -> Sandbox:
    """A sandbox with limits, where this machine and user can have them; a clear refusal counts and skips."""
    try:
        return Sandbox.run(provider="local", resources={"limits": limits})
    except UnsupportedError as error:
        refusal = error
    assert refusal.provider == "local"
    assert refusal.feature
    assert not ROOT, "as root this machine can do that"
    pytest.skip(f"refused clearly: {refusal}")


def test_a_fork_bomb_without_a_limit_stays_inside() -> None:
    before, most = _processes(), 0
    with Sandbox.run(provider="local") as bystander, Sandbox.run(provider="local") as box:
        box.exec(["sh", "-c", FORK_BOMB + "; sleep 1000"])
        end = time.monotonic() + 3
        while time.monotonic() < end:
            most = max(most, _processes())
            # The other sandbox, and this machine, still have room.
            assert (
                bystander.exec(["sh", "-c", "true & wait; echo room"]).result(ANSWER_SECONDS).stdout
                == "room\n"
            )
        assert box.stop(graceful_shutdown_seconds=0.0).result(ANSWER_SECONDS).error is None
        assert bystander.exec(["echo", "alive"]).result(ANSWER_SECONDS).stdout == "alive\n"
    assert most - before < 6_000


def test_a_fork_bomb_with_a_limit_stays_within_it() -> None:
    with run_with_limits(pids=64) as box:
        box.exec(["sh", "-c", FORK_BOMB], timeout_seconds=4).exception(ANSWER_SECONDS)
        code = "import os, time\nn = 0\ntry:\n  while n < 500:\n    if os.fork() == 0: time.sleep(30); os._exit(0)\n    n += 1\nexcept OSError: pass\nprint(n, flush=True)\nos.killpg(0, 9)"
        process = box.exec(["python3", "-c", code])
        made = "".join(process.stdout)
        assert not made or int(made) < 64


def test_a_sandbox_full_of_processes_is_ended() -> None:
    with run_with_limits(pids=32) as box:
        script = "trap '' TERM INT HUP; i=0; while [ $i -lt 40 ]; do sleep 1000 & i=$((i+1)); done; wait"
        box.exec(["sh", "-c", script])
        assert box.stop(graceful_shutdown_seconds=0.2).result(ANSWER_SECONDS).error is None


def test_a_memory_bomb_dies_alone() -> None:
    with run_with_limits(memory="128Mi") as box:
        code = "x = []\nwhile True: x.append(b'x' * 10_000_000)"
        result = box.exec(["python3", "-c", code], timeout_seconds=60).result(ANSWER_SECONDS)
        assert result.returncode != 0
        assert box.exec(["echo", "alive"]).result(ANSWER_SECONDS).stdout == "alive\n"


def test_memory_is_not_had_through_dev_shm_either() -> None:
    with run_with_limits(memory="128Mi") as box:
        result = box.exec(
            ["sh", "-c", "head -c 400000000 /dev/zero > /dev/shm/fill"], timeout_seconds=60
        ).result(ANSWER_SECONDS)
        assert result.returncode != 0


def test_memory_file_systems_are_small_without_a_limit() -> None:
    with Sandbox.run(provider="local") as box:
        for path in ("/dev/shm/fill", "/dev/fill", "/dev/pts/fill", "/proc/fill"):
            box.exec(["sh", "-c", f"head -c 300000000 /dev/zero > {path}"]).result(ANSWER_SECONDS)
            size = (
                box.exec(["sh", "-c", f"stat -c %s {path} 2>/dev/null || echo 0"])
                .result(ANSWER_SECONDS)
                .stdout
            )
            assert int(size) < 150_000_000, path


def test_a_disk_fill_stops_at_its_limit() -> None:
    with run_with_limits(disk="64Mi") as box:
        before = shutil.disk_usage(os.environ["LOWTIDE_HOME"]).free
        for path in ("/opt/fill", "/usr/local/fill", "/tmp/fill", "/var/tmp/fill", "/root/fill"):
            result = box.exec(["sh", "-c", f"head -c 200000000 /dev/zero > {path}"]).result(ANSWER_SECONDS)
            assert result.returncode != 0, path
        assert before - shutil.disk_usage(os.environ["LOWTIDE_HOME"]).free < 2_000_000_000
        with pytest.raises(LowtideError):
            box.write_file("/opt/more", b"x" * 100_000_000).result(ANSWER_SECONDS)
        assert box.exec(["echo", "alive"]).result(ANSWER_SECONDS).stdout == "alive\n"


def test_a_cpu_limit_is_the_kernels() -> None:
    with run_with_limits(cpu="500m") as box:
        spin = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
        used = float(box.exec(["python3", "-c", spin]).result(ANSWER_SECONDS).stdout)
        assert used < 1.6  # of two seconds on the clock, half a processor is one


def test_all_descriptors_used_up_inside_do_not_stop_the_next_command() -> None:
    with Sandbox.run(provider="local") as box:
        code = "import os, time\nfds = []\ntry:\n  while True: fds.append(os.open('/dev/null', 0))\nexcept OSError: print('full', flush=True)\ntime.sleep(1000)"
        hogs = [box.exec(["python3", "-c", code]) for _ in range(3)]
        for hog in hogs:
            assert next(iter(hog.stdout)) == "full\n"
        assert box.exec(["echo", "alive"]).result(ANSWER_SECONDS).stdout == "alive\n"


def test_endless_output_is_cut_and_ended() -> None:
    with Sandbox.run(provider="local") as box:
        with pytest.raises(LowtideError):
            box.exec(["yes"], max_output_bytes=5_000_000).result(ANSWER_SECONDS)
        assert box.exec(["echo", "alive"]).result(ANSWER_SECONDS).stdout == "alive\n"


def _processes() -> int:
    return sum(1 for name in os.listdir("/proc") if name.isdigit())


def test_no_core_file_is_written_outside(tmp_path: Path) -> None:
    before = set(os.listdir("/")) | set(os.listdir(os.getcwd()))
    with Sandbox.run(provider="local") as box:
        box.exec(["sh", "-c", "ulimit -c unlimited; kill -SEGV $$"]).result(ANSWER_SECONDS)
    assert set(os.listdir("/")) | set(os.listdir(os.getcwd())) == before
