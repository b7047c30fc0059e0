"""A program that used sandboxes ends as quietly as one that did not: nothing on stderr but its own traceback.

In a fresh process per ending. What a Python takes away at its end differs from version to version (from 3.12 on
no thread can be started in an exit hook), so this runs on every Python there is: see `.ci/run`.
"""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.crash.world import ACTOR, Actor, World

F = TypeVar("F", bound=Callable[..., Any])


def on_every_python(test: F) -> F:
    """A Python that takes something else away has to show it to whoever runs `make test` on it."""
    return pytest.mark.local(pytest.mark.newcomer(test))


QUIET = {
    "return after a stop": """
        def main():
            box = Sandbox.run(**OPTIONS)
            box.exec(["true"]).result()
            box.stop().result()
        main()
    """,
    "return of a with block": """
        def main():
            for _ in range(3):  # from the second on, a local one is made ahead
                with Sandbox.run(**OPTIONS) as box:
                    box.exec(["true"]).result()
        main()
    """,
    "bare run": """
        box = Sandbox.run(**OPTIONS)
        box.exec(["true"]).result()
    """,
    "several bare runs": """
        boxes = make(3)
    """,
    "bare run with a command still running": """
        boxes = [Sandbox.run(**OPTIONS) for _ in range(3)]
        processes = [box.exec(["sleep", "600"]) for box in boxes]
        results([box.exec(["true"]) for box in boxes])
    """,
    "started and never awaited": """
        box = Sandbox(**OPTIONS)
        box.start()
    """,
    "session": """
        with Session({"provider": PROVIDER}) as session:
            boxes = [session.sandbox() for _ in range(2)]
            results([box.exec(["true"]) for box in boxes])
    """,
    "session without a close": """
        session = Session({"provider": PROVIDER})
        box = session.sandbox()
        box.exec(["true"]).result()
    """,
    "async with": """
        async def main():
            for _ in range(3):
                async with Sandbox.run(**OPTIONS) as box:
                    await box.exec(["true"])
        asyncio.run(main())
    """,
    "async and left running": """
        async def main():
            box = await Sandbox.run(**OPTIONS)
            await box.exec(["true"])
        asyncio.run(main())
    """,
    "async and a task left behind": """
        async def one():
            async with Sandbox.run(**OPTIONS) as box:
                say("MADE", box.sandbox_id)
                await asyncio.sleep(600)
        async def main():
            task = asyncio.create_task(one())
            await asyncio.sleep(0.5)
        asyncio.run(main())
    """,
    "a generator that is never finished": """
        def boxes():
            with Sandbox.run(**OPTIONS) as box:
                box.exec(["true"]).result()
                yield box
        unfinished = boxes()
        next(unfinished)
    """,
    "ends in finalizers": """
        class Agent:
            def __init__(self):
                self.session = Session({"provider": PROVIDER})
                self.box = self.session.sandbox()
                self.box.exec(["true"]).result()
                self.itself = self
            def __del__(self):
                self.box.stop().result()
                self.session.close().result()
        agent = Agent()
    """,
    "in a thread": """
        def work():
            with Sandbox.run(**OPTIONS) as box:
                box.exec(["true"]).result()
            Sandbox.run(**OPTIONS)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """,
}

WHOLE = ("return of a with block", "session", "async with", "async and left running", "bare run")

FAILING = {
    "bare": """
        make()
        raise RuntimeError("the program failed")
    """,
    "with": """
        with Sandbox.run(**OPTIONS) as box:
            raise RuntimeError("the program failed")
    """,
    "session": """
        with Session({"provider": PROVIDER}) as session:
            session.sandbox().exec(["true"]).result()
            raise RuntimeError("the program failed")
    """,
    "async": """
        async def main():
            async with Sandbox.run(**OPTIONS) as box:
                await box.exec(["true"])
                raise RuntimeError("the program failed")
        asyncio.run(main())
    """,
}


@on_every_python
@pytest.mark.parametrize("ending", QUIET)
def test_a_return_says_nothing(world: World, ending: str) -> None:
    ends_quietly(world, QUIET[ending])


@on_every_python
def test_what_has_to_be_asked_to_end_is_asked_all_at_once(world: World) -> None:
    """Twelve that take two seconds each would not fit into ten one after the other: the exit has its threads."""
    program = """
        boxes = make(12)
        stubborn = "trap '' TERM; echo ready; while :; do sleep 1; done"
        commands = [box.exec(["sh", "-c", stubborn]) for box in boxes]
        for command in commands:
            next(iter(command.stdout))
    """
    ends_quietly(world, program, LOWTIDE_EXIT_SECONDS="10")


@on_every_python
@pytest.mark.parametrize("ending", ["bare", "with"])
def test_sys_exit_says_nothing(world: World, ending: str) -> None:
    ends_quietly(
        world,
        {"bare": "make()\nsys.exit(3)", "with": "with Sandbox.run(**OPTIONS):\n    sys.exit(3)"}[ending],
        3,
    )


@on_every_python
@pytest.mark.parametrize("ending", FAILING)
def test_an_exception_shows_its_own_traceback_and_nothing_else(world: World, ending: str) -> None:
    actor = world.start_program(FAILING[ending])
    assert actor.wait(180) == 1
    assert_one_traceback(actor, "RuntimeError: the program failed")
    world.wait_until_clean()


@on_every_python
@pytest.mark.parametrize("scenario", ["hold", "with_block", "in_session"])
def test_an_interrupt_shows_its_own_traceback_and_nothing_else(world: World, scenario: str) -> None:
    actor = struck(world, scenario, signal.SIGINT)
    assert_one_traceback(actor, "KeyboardInterrupt")


@on_every_python
def test_an_interrupt_in_asyncio_shows_only_what_asyncio_shows(world: World) -> None:
    # The cancelled main task, and "during handling of the above" the interrupt: two, as for any program.
    text = struck(world, "in_asyncio", signal.SIGINT).errors.read_text()
    assert text.endswith("\nKeyboardInterrupt\n")
    assert text.count("Traceback") == 2
    assert "lowtide/" not in text.replace(str(ACTOR), "")


@on_every_python
@pytest.mark.parametrize(
    ("scenario", "number"),
    [
        *(
            (name, signal.SIGTERM)
            for name in ("hold", "with_block", "in_session", "in_asyncio", "worker_threads")
        ),
        ("hold", signal.SIGHUP),
    ],
)
def test_a_terminated_program_says_nothing(world: World, scenario: str, number: signal.Signals) -> None:
    assert struck(world, scenario, number).errors.read_text() == ""


@pytest.mark.everywhere
def test_a_whole_program_says_nothing_on_any_provider(world: World) -> None:
    """All of it in one, because a start costs most: blocks, a session, async, and one that is left to the exit."""
    ends_quietly(world, "".join(map(textwrap.dedent, (QUIET[name] for name in WHOLE))))


@pytest.mark.everywhere
def test_an_interrupted_program_shows_one_traceback_on_any_provider(world: World) -> None:
    assert_one_traceback(struck(world, "in_session", signal.SIGINT), "KeyboardInterrupt")


def ends_quietly(world: World, program: str, status: int = 0, **environ: str) -> None:
    actor = world.start_program(program, **environ)
    assert (actor.wait(180), said(actor)) == (status, "")
    world.wait_until_clean()


def struck(world: World, scenario: str, number: signal.Signals) -> Actor:
    actor = world.start(scenario, 1)
    actor.until("READY", 180)
    actor.signal(number)
    assert actor.wait(180) == -number
    world.wait_until_clean()
    return actor


def said(actor: Actor) -> str:
    """On stderr, but for the one warning that Kubernetes gives about every sandbox without a network."""
    lines = actor.errors.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("network='none' is a NetworkPolicy here"))


def assert_one_traceback(actor: Actor, last: str) -> None:
    text = said(actor)
    assert text.startswith("Traceback (most recent call last):\n"), text
    assert len(re.findall(r"^\S", text, re.MULTILINE)) == 2, text  # its first line and its last
    assert text.endswith(f"\n{last}\n"), text
