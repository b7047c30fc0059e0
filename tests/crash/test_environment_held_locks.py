"""An owner that is told to leave while it holds a lock, or cannot run Python any more: it leaves all the same.

The bound is the exit deadline and the overtime after it; then the kernel ends the process and the guardian takes over.
"""

from __future__ import annotations

import signal

import pytest

from tests.crash.world import FACTOR, World

EXIT_SECONDS = 2.0
OVERTIME_SECONDS = 5.0
"""What docs/what-if-my-process-dies.md promises: a process is gone this long after its exit deadline at the latest."""
BOUND_SECONDS = (EXIT_SECONDS + OVERTIME_SECONDS) * FACTOR
ENVIRON = {"LOWTIDE_EXIT_SECONDS": f"{EXIT_SECONDS:g}"}

LOGGING = """
    import logging
    logging.basicConfig(level=logging.DEBUG)
    boxes = make()
    handler = logging.getLogger().handlers[0]
    handler.acquire()  # as in the middle of a line
    wait_to_be_struck()
"""
LOGGERS_TABLE = """
    import logging
    logging.basicConfig(level=logging.DEBUG)
    boxes = make()
    logging._lock.acquire()
    wait_to_be_struck()
"""
LEDGER = """
    import sqlite3
    boxes = make()
    db = sqlite3.connect(os.environ["LOWTIDE_HOME"] + "/ledger.db", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    wait_to_be_struck()
"""
EVERY_LOCK = """
    import gc, _thread
    import lowtide.engine, lowtide.logger
    boxes = make()
    kinds = (_thread.LockType, _thread.RLock)
    for names in [vars(module) for module in list(sys.modules.values()) if module] + [
        thing for thing in gc.get_objects() if isinstance(thing, dict)
    ]:
        for value in list(names.values()):
            if isinstance(value, kinds):
                value.acquire(blocking=False)
    os.write(1, b"READY\\n")
    while True:
        time.sleep(0.2)
"""
"""Whatever lock of the standard library, of a dependency or of ours the interrupted code may have had."""
STOPPED_INTERPRETER = """
    import ctypes
    from lowtide.lifecycle import signals

    boxes = make()

    async def end_everything(**how):
        ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock meanwhile: no thread runs Python

    signals._end_everything = end_everything
"""
"""An extension module that never comes back, in the middle of the clean-up."""

HELD = {"handler": LOGGING, "loggers": LOGGERS_TABLE, "ledger": LEDGER, "every": EVERY_LOCK}


@pytest.mark.parametrize("lock", HELD)
def test_a_signal_while_a_lock_is_held(world: World, lock: str) -> None:
    actor = world.start_program(HELD[lock], **ENVIRON)
    actor.until("READY")
    actor.process.terminate()
    assert actor.wait(BOUND_SECONDS) == -signal.SIGTERM
    world.wait_until_clean()


def test_a_signal_while_the_interpreter_stands_still(world: World) -> None:
    actor = world.start_program(STOPPED_INTERPRETER + "    wait_to_be_struck()\n", **ENVIRON)
    actor.until("READY")
    actor.process.terminate()
    assert actor.wait(BOUND_SECONDS) == -signal.SIGTERM
    world.wait_until_clean()


def test_an_exit_while_the_interpreter_stands_still(world: World) -> None:
    actor = world.start_program(STOPPED_INTERPRETER, **ENVIRON)
    assert actor.wait(BOUND_SECONDS + 30) == 1
    world.wait_until_clean()


@pytest.mark.parametrize("lock", ["handler", "ledger"])
def test_an_exit_while_a_lock_is_held_keeps_its_status(world: World, lock: str) -> None:
    text = (
        HELD[lock]
        .replace("wait_to_be_struck()", "sys.exit(3)")
        .replace("handler.acquire()", "threading.Thread(target=handler.acquire).start(); time.sleep(0.2)")
    )
    actor = world.start_program(text, **ENVIRON)
    assert actor.wait(BOUND_SECONDS + 30) == 3
    world.wait_until_clean()


@pytest.mark.everywhere
def test_a_signal_while_a_log_handlers_lock_is_held_everywhere(world: World) -> None:
    actor = world.start_program(LOGGING, 2, LOWTIDE_EXIT_SECONDS="20")
    actor.until("READY", 180)
    actor.process.terminate()
    assert actor.wait((20.0 + OVERTIME_SECONDS) * FACTOR) == -signal.SIGTERM
    world.wait_until_clean()
