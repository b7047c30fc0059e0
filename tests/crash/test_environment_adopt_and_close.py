"""What another process has adopted, or what is kept, is not the first owner's any more."""

from __future__ import annotations

import signal
import time

import pytest

from tests.crash.world import Actor, World

FIRST = """
    session = Session({"provider": PROVIDER, "tags": ("crash",)})
    box = session.sandbox()
    box.start().result()
    say("MADE", box.sandbox_id)
    sys.stdin.readline()
    END
"""
SECOND = """
    session = Session({"provider": PROVIDER})
    found = Sandbox.from_id(os.environ["ACTOR_SANDBOX"], provider=PROVIDER).result()
    try:
        session.adopt(found)
    except Exception as error:
        say("REFUSED", type(error).__name__)
    session.adopt(found, take=True)
    say("ADOPTED")
    sys.stdin.readline()
    say("ALIVE", found.exec(["true"]).result(timeout=60).returncode)
    say("CLOSED", *(report.outcome for report in session.close().result()))
"""
ENDS = {
    "stop": 'say("FIRST", box.stop().result().outcome, box.stop().result().outcome)',
    "close": 'say("FIRST", *(report.outcome for report in session.close().result()))',
    "stop-and-close": 'box.stop().result(); say("FIRST", *(report.outcome for report in session.close().result()))',
    "exit": 'say("FIRST")',
    "terminated": 'say("FIRST"); time.sleep(60)',
    "killed": 'say("FIRST"); time.sleep(60)',
}


def go_on(actor: Actor) -> None:
    assert actor.process.stdin is not None
    actor.process.stdin.write(b"\n")
    actor.process.stdin.flush()


@pytest.mark.parametrize("end", ENDS)
def test_the_first_owner_does_not_end_what_another_has_adopted(world: World, end: str) -> None:
    first = world.start_program(FIRST.replace("END", ENDS[end]))
    sandbox_id = first.until("MADE").split()[1]
    second = world.start_program(SECOND, ACTOR_SANDBOX=sandbox_id)
    second.until("ADOPTED")
    assert "REFUSED SandboxOwnedError" in second.lines  # its owner lived
    go_on(first)
    said = first.until("FIRST").split()[1:]
    assert set(said) <= {"left"}
    if end == "terminated":
        first.signal(signal.SIGTERM)
        assert first.wait() == -signal.SIGTERM
    elif end == "killed":
        first.kill()
    else:
        assert first.wait() == 0
    go_on(second)
    assert second.until("ALIVE") == "ALIVE 0"
    assert second.until("CLOSED") == "CLOSED destroyed"
    assert second.wait() == 0
    world.wait_until_clean()


@pytest.mark.parametrize("end", ["session.close().result()", "box.stop().result()", "pass"])
def test_what_was_announced_as_kept_outlives_its_session(world: World, end: str) -> None:
    actor = world.start_program(
        f"""
        session = Session(provider=PROVIDER, tags=["crash"], keep="on-failure", keep_for_seconds=600)
        try:
            with session.sandbox() as box:
                say("MADE", box.sandbox_id)
                raise RuntimeError("look at this")
        except RuntimeError:
            pass
        {end}
        """
    )
    sandbox_id = actor.until("MADE").split()[1]
    assert actor.wait() == 0
    assert "lowtide kept sandbox" in actor.errors.read_text()
    assert world.existing() == {sandbox_id}
    deleter = world.start_program(f"Sandbox.delete({sandbox_id!r}, provider=PROVIDER).result()")
    assert deleter.wait() == 0
    world.wait_until_clean()


def test_a_kept_one_is_adopted_without_more_words(world: World) -> None:
    actor = world.start_program(
        """
        import subprocess
        maker = (
            "from lowtide import Sandbox; import os\\n"
            "with Sandbox.run(provider=os.environ['P'], tags=['crash'], keep='on-failure') as box:\\n"
            "    print(box.sandbox_id, flush=True); raise SystemExit(1)"
        )
        made = subprocess.run(
            [sys.executable, "-c", maker], env={**os.environ, "P": PROVIDER}, capture_output=True, text=True
        )
        session = Session(provider=PROVIDER, tags=["crash"])
        (box,) = session.list(adopt=True).result()
        say("ADOPTED", box.sandbox_id == made.stdout.split()[-1], box.owner.pid == os.getpid(), box.kept_until)
        say("CLOSED", *(report.outcome for report in session.close().result()))
        """
    )
    assert actor.until("ADOPTED") == "ADOPTED True True None"
    assert actor.until("CLOSED") == "CLOSED destroyed"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.faulty  # has a lifetime that is renewed
def test_the_old_owner_is_told_and_renews_no_more(world: World) -> None:
    first = world.start_program(
        FIRST.replace("END", "time.sleep(60)"), LOWTIDE_LEASE_SECONDS="2", LOWTIDE_SIGNALS="off"
    )
    sandbox_id = first.until("MADE").split()[1]
    second = world.start_program(SECOND, ACTOR_SANDBOX=sandbox_id, LOWTIDE_LEASE_SECONDS="2")
    second.until("ADOPTED")
    for _ in range(200):
        if "belongs to process" in first.errors.read_text():
            break
        time.sleep(0.1)
    assert f"sandbox {sandbox_id} (faulty) belongs to process {second.pid()}" in first.errors.read_text()
    first.kill()
    go_on(second)
    assert second.until("CLOSED") == "CLOSED destroyed"
    assert second.wait() == 0
    world.wait_until_clean()
