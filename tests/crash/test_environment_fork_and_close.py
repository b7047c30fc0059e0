"""A forked child ends nothing of its parent's, whatever it calls, and says so at once."""

from __future__ import annotations

import pytest

from tests.crash.world import World

CHILD = """
    import multiprocessing
    session = Session({"provider": PROVIDER, "tags": ("crash",)})
    boxes = [session.sandbox() for _ in range(COUNT)]
    for box in boxes:
        box.start().result()
        say("MADE", box.sandbox_id)

    def in_child():
        began = time.monotonic()
        CALLS
        say("CHILD", *reports, "within", round(time.monotonic() - began, 1))

    def leave_block():
        with session, boxes[0]:
            return []

    HOW
    alive = sum(box.exec(["true"]).result(timeout=60).returncode == 0 for box in boxes)
    say("ALIVE", alive)
    session.close().result()
"""
CALLS = {
    "close": "reports = [report.outcome for report in session.close().result()]",
    "stop": "reports = [box.stop().result().outcome for box in boxes]",
    "leave-blocks": "reports = leave_block()",
    "stop-after-use": "boxes[0].exec(['true']).result(); reports = [box.stop().result().outcome for box in boxes]",
}
HOW = {
    "fork": """
    child = os.fork()
    if child == 0:
        in_child()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0""",
    "multiprocessing": """
    worker = multiprocessing.get_context("fork").Process(target=in_child)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0, worker.exitcode""",
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("call", CALLS)
def test_a_child_that_ends_things_leaves_its_parents_alone(world: World, call: str, how: str) -> None:
    text = CHILD.replace("CALLS", CALLS[call]).replace("\n    HOW", HOW[how])
    actor = world.start_program(text, 2)
    said = actor.until("CHILD").split()[1:]
    assert said[:-2] == ([] if call == "leave-blocks" else ["left", "left"])
    if call != "stop-after-use":  # which starts an engine of its own; the others need nothing
        assert float(said[-1]) < 1.0
    assert actor.until("ALIVE") == "ALIVE 2"
    assert actor.wait() == 0
    world.wait_until_clean()


def test_a_child_ends_its_own_through_an_inherited_session(world: World) -> None:
    actor = world.start_program(
        """
        session = Session({"provider": PROVIDER, "tags": ("crash",)})
        box = session.sandbox()
        box.start().result()
        child = os.fork()
        if child == 0:
            own = session.sandbox()
            own.start().result()
            say("OWN", own.sandbox_id)
            say("CHILD", *sorted(report.outcome for report in session.close().result()))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        say("ALIVE", box.exec(["true"]).result(timeout=60).returncode)
        """
    )
    assert actor.until("CHILD") == "CHILD destroyed left"
    assert actor.until("ALIVE") == "ALIVE 0"
    assert actor.wait() == 0
    world.wait_until_clean()


def test_a_child_forked_while_another_thread_is_in_the_session_does_not_hang(world: World) -> None:
    actor = world.start_program(
        """
        session = Session({"provider": PROVIDER, "tags": ("crash",)})
        box = session.sandbox()
        box.start().result()
        session._lock.acquire()  # as a thread does for an instant in every call
        child = os.fork()
        if child == 0:
            say("CHILD", *(report.outcome for report in session.close().result()))
            os._exit(0)
        session._lock.release()
        assert os.waitpid(child, 0)[1] == 0
        say("ALIVE", box.exec(["true"]).result(timeout=60).returncode)
        """
    )
    assert actor.until("CHILD", 20) == "CHILD left"
    assert actor.until("ALIVE") == "ALIVE 0"
    assert actor.wait() == 0
    world.wait_until_clean()
