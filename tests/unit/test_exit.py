"""What a program sees of lowtide when it leaves: nothing, whatever has happened before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.testing.faulty import FaultyService


def start(program: str, home: Path, **environ: str) -> subprocess.Popen[str]:
    home.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "LOWTIDE_HOME": str(home),
            "LOWTIDE_FAULTY_DIR": str(home.parent / "service"),
            **environ,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(program: str, home: Path, **environ: str) -> tuple[int, str, str]:
    with start(program, home, **environ) as process:
        try:
            out, errors = process.communicate(timeout=90)
        finally:
            process.kill()
    return process.returncode, out, errors


@pytest.mark.parametrize("heard", ["", "operation.exception()"], ids=["unheard", "heard"])
def test_a_failed_operation_in_a_reference_cycle_prints_nothing_at_shutdown(
    tmp_path: Path, heard: str
) -> None:
    program = f"""
import gc, sys, time
from lowtide import Sandbox
gc.disable()
operation = Sandbox.delete("no-such-sandbox", provider="faulty")
while not operation.done():
    time.sleep(0.01)
{heard}
class Cycle: pass
cycle = Cycle()
cycle.self, cycle.operation = cycle, operation
sys.modules["kept"] = cycle  # collected when the interpreter is half gone
del operation, cycle
"""
    status, _, errors = run(program, tmp_path / "home")
    assert status == 0
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_repeated_interrupts_at_exit_print_no_complaint(tmp_path: Path) -> None:
    program = """
import logging, time
from lowtide import Sandbox

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.3)

logging.basicConfig(handlers=[Slow()])
box = Sandbox.run(provider="faulty")
print("MADE", flush=True)
"""
    service = FaultyService(tmp_path / "service")
    process = start(program, tmp_path / "home")
    service.fault("destroy", hold_seconds=300, times=1)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "MADE\n"
        time.sleep(0.5)  # it is in its exit hook, which waits for the service
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "Exception ignored" not in errors
    assert "Traceback" not in errors
    service.wait_until_empty()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOWTIDE_END_SECONDS", ""),
        ("LOWTIDE_END_SECONDS", "soon"),
        ("LOWTIDE_EXIT_SECONDS", "nan"),
        ("LOWTIDE_EXIT_SECONDS", "-1"),
        ("LOWTIDE_LEASE_SECONDS", "0"),
        ("LOWTIDE_CREATE_WINDOW_SECONDS", "1e400"),
        ("LOWTIDE_SIGNALS", "maybe"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_before_the_first_create(
    tmp_path: Path, name: str, value: str
) -> None:
    program = """
from lowtide import Sandbox, ValidationError
try:
    Sandbox.run(provider="faulty")
except ValidationError as error:
    print(error.argument, error)
"""
    status, said, errors = run(program, tmp_path / "home", **{name: value})
    assert status == 0, errors
    assert said.startswith(f"{name} {name} is set to {value!r}")
    assert "unset it" in said
    assert FaultyService(tmp_path / "service").sandboxes() == []


def test_a_loop_that_falls_out_is_run_again_and_calls_under_way_go_on(tmp_path: Path) -> None:
    program = """
import asyncio, logging, sys
from lowtide import Sandbox
from lowtide.engine import engine

logging.disable()
box = Sandbox.run(provider="faulty")
waiting = engine().submit(asyncio.sleep(0.5, "went on"))

def leave():
    raise SystemExit(5)

for fall_out in (leave, engine().loop.stop):
    engine().loop.call_soon_threadsafe(fall_out)
print(waiting.result(20))
print(box.stop().result(timeout=20).outcome)
"""
    status, said, errors = run(program, tmp_path / "home")
    assert (status, said) == (0, "went on\ndestroyed\n"), errors
    assert FaultyService(tmp_path / "service").sandboxes() == []


def test_a_closed_loop_fails_what_was_under_way_and_the_next_call_gets_a_new_one(tmp_path: Path) -> None:
    program = """
import asyncio
from lowtide import SandboxError
from lowtide.engine import engine

first = engine()
waiting = first.submit(asyncio.sleep(600))
first.run(asyncio.sleep(0), 20)  # it runs
run_forever = first.loop.run_forever

def run_once():
    run_forever()
    first.loop.close()

first.loop.run_forever = run_once
first.loop.call_soon_threadsafe(first.loop.stop)
first.run(asyncio.sleep(0.1), 20)  # it runs again
first.loop.call_soon_threadsafe(first.loop.stop)
try:
    waiting.result(20)
except SandboxError as error:
    print("failed")
print(engine() is first, engine().run(asyncio.sleep(0, "works"), 20))
"""
    status, said, errors = run(program, tmp_path / "home")
    assert (status, said) == (0, "failed\nFalse works\n"), errors


def test_eventlet_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("greenlet")
    program = """
import warnings
warnings.simplefilter("ignore")
import eventlet
eventlet.monkey_patch()
from lowtide import Sandbox, UnsupportedError
try:
    Sandbox.run(provider="faulty")
except UnsupportedError as error:
    print(error.feature, "eventlet.monkey_patch()" in str(error))
"""
    status, said, errors = run(program, tmp_path / "home", EVENTLET_NO_GREENDNS="yes")
    if "No module named 'eventlet'" in errors:
        pytest.skip("eventlet is not installed")
    assert (status, said) == (0, "eventlet True\n"), errors
    assert FaultyService(tmp_path / "service").sandboxes() == []


def test_a_signal_ends_a_program_whose_main_thread_is_in_c_code(tmp_path: Path) -> None:
    """Python runs handlers between two steps of the main thread, and one in a GUI toolkit's loop takes none."""
    program = """
import sqlite3, sys
sys.modules["trio"] = None  # not installed; trio wants to be the only one who hears of signals
from lowtide import Sandbox
box = Sandbox.run(provider="faulty")
print("MADE", flush=True)
endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
sqlite3.connect(":memory:").execute(endless).fetchall()
"""
    with start(program, tmp_path / "home", LOWTIDE_EXIT_SECONDS="5") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "MADE\n"
            time.sleep(0.3)
            process.terminate()
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (-signal.SIGTERM, "")
    FaultyService(tmp_path / "service").wait_until_empty()


def test_a_full_stderr_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    program = """
import logging, os, sys
from lowtide import Sandbox, logger
logging.basicConfig(level=logging.DEBUG)
log = logger.get("lowtide")
box = Sandbox.run(provider="faulty")
for _ in range(2000):  # more than a pipe takes
    log.later(logging.INFO, "%s", "x" * 100)
sys.exit(3)
"""
    with start(program, tmp_path / "home", PYTHONUNBUFFERED="") as process:  # a stream with a lock
        try:
            assert process.wait(60) == 3  # and nobody has read a line
        finally:
            process.kill()
    FaultyService(tmp_path / "service").wait_until_empty()


@pytest.mark.parametrize("how", ["box = Sandbox.run(**OPTIONS)", "with Sandbox(**OPTIONS) as box: pass"])
def test_what_a_signal_handler_raises_in_a_start_leaves_nothing(tmp_path: Path, how: str) -> None:
    """The time limit of a job queue is an ordinary exception, and the worker goes on with its next job."""
    program = f"""
import signal, sys
from lowtide import Sandbox
OPTIONS = dict(provider="faulty")

class TimeLimit(Exception):
    pass

def limit(*_):
    raise TimeLimit

Sandbox.run(**OPTIONS).stop().result()
signal.signal(signal.SIGALRM, limit)
print("READY", flush=True)
sys.stdin.readline()
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    {how}
except TimeLimit:
    print("LIMITED", flush=True)
sys.stdin.readline()
"""
    service = FaultyService(tmp_path / "service")
    with start(program, tmp_path / "home") as process:
        try:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "READY\n"
            service.fault("create", hold_seconds=1.0, times=1)
            process.stdin.write("go\n")
            process.stdin.flush()
            assert process.stdout.readline() == "LIMITED\n"
            time.sleep(1.2)  # the request has been answered
            service.wait_until_empty(seconds=20)
            assert process.poll() is None
            process.communicate("end\n", timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0


def test_a_handler_that_was_installed_in_c_is_left_alone(tmp_path: Path) -> None:
    """`signal.getsignal` does not know it: gevent's loop and `faulthandler` install theirs that way."""
    program = """
import faulthandler, os, signal, time
from lowtide import Sandbox
with open(os.devnull, "w") as nowhere:
    faulthandler.register(signal.SIGTERM, nowhere, chain=False)
    box = Sandbox.run(provider="faulty")
    time.sleep(0.1)  # the main thread would install ours here
    os.kill(os.getpid(), signal.SIGTERM)
    print("LIVES", box.exec(["true"]).result().returncode)
"""
    status, said, errors = run(program, tmp_path / "home")
    assert (status, said, errors) == (0, "LIVES 0\n", "")


def test_a_descriptor_is_closed_at_once_on_the_engine_under_gevent(tmp_path: Path) -> None:
    pytest.importorskip("gevent")
    program = """
from gevent import monkey
monkey.patch_all()
import os
from lowtide.engine import engine

async def close():
    open_before = len(os.listdir("/proc/self/fd"))
    for descriptor in os.pipe():
        os.close(descriptor)
    return len(os.listdir("/proc/self/fd")) - open_before

print([engine().run(close(), 20) for _ in range(3)])
"""
    status, said, errors = run(program, tmp_path / "home")
    assert (status, said) == (0, "[0, 0, 0]\n"), errors


def test_a_program_that_closes_every_descriptor_hears_of_it_once(tmp_path: Path) -> None:
    program = """
import os, sys, time
from lowtide import Sandbox
box = Sandbox.run(provider="faulty")
os.closerange(3, 4096)
time.sleep(0.5)
sys.exit(4)
"""
    status, _, errors = run(program, tmp_path / "home")
    assert status == 4
    assert errors.count("did the program close descriptors") == 1, errors
    assert len(errors.splitlines()) <= 2, errors
    FaultyService(tmp_path / "service").wait_until_empty(seconds=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its root directory: needs root")
def test_a_program_that_has_changed_its_root_directory_keeps_its_status(tmp_path: Path) -> None:
    program = """
import os, sys, time
from lowtide import Sandbox
from lowtide.engine import engine

class Slow:
    def __del__(self):
        time.sleep(0.5)

slow = Slow()  # the interpreter is half gone when the engine wakes
box = Sandbox.run(provider="faulty")
loop = engine().loop
def again(): loop.call_later(0.1, again)
loop.call_soon_threadsafe(again)
os.chroot(os.environ["LOWTIDE_HOME"])
sys.exit(4)
"""
    status, _, errors = run(program, tmp_path / "home")
    assert status == 4, errors
