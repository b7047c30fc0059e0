"""A program whose log handlers raise, block, or write to a stream that is closed: calls work, and nothing is left."""

from __future__ import annotations

import signal

import pytest

from tests.crash.world import World

RAISES = """
    import logging

    class Raises(logging.Handler):
        def emit(self, record):
            raise RuntimeError("the log server is gone")

    logging.basicConfig(level=logging.DEBUG, handlers=[Raises()])
"""
LEAVES = """
    import logging

    class Leaves(logging.Handler):
        def emit(self, record):
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit(5)

    logging.basicConfig(level=logging.DEBUG, handlers=[Leaves()])
"""
CLOSED = """
    import logging
    logging.basicConfig(level=logging.DEBUG)
    sys.stderr.close()
"""
BLOCKS = """
    import logging

    class Blocks(logging.Handler):
        def emit(self, record):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(600)

    logging.basicConfig(level=logging.DEBUG, handlers=[Blocks()])
"""
HANDLERS = {"raises": RAISES, "leaves": LEAVES, "closed": CLOSED, "blocks": BLOCKS}
WORK = """
    boxes = make()
    say("DONE", sum(box.exec(["true"]).result(timeout=60).returncode == 0 for box in boxes))
    boxes[0].stop().result(timeout=60)
"""
HOLD = WORK + "    wait_to_be_struck()\n"


@pytest.mark.parametrize("handler", HANDLERS)
def test_calls_work_and_a_signal_ends_everything(world: World, handler: str) -> None:
    actor = world.start_program(HANDLERS[handler] + HOLD)
    actor.until("READY")
    assert "DONE 2" in actor.lines
    assert world.existing() == {line.split()[1] for line in actor.lines if line.startswith("MADE ")} - {
        next(line.split()[1] for line in actor.lines if line.startswith("MADE "))
    }
    actor.process.terminate()
    assert actor.wait() == -signal.SIGTERM
    world.wait_until_clean()


@pytest.mark.parametrize("handler", HANDLERS)
def test_leaving_keeps_the_status(world: World, handler: str) -> None:
    actor = world.start_program(HANDLERS[handler] + WORK + "    sys.exit(3)\n")
    assert actor.wait() == 3
    world.wait_until_clean()


@pytest.mark.everywhere
def test_a_handler_that_raises_everywhere(world: World) -> None:
    actor = world.start_program(RAISES + HOLD)
    actor.until("READY", 180)
    actor.process.terminate()
    assert actor.wait(120) == -signal.SIGTERM
    world.wait_until_clean()
