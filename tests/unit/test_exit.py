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
