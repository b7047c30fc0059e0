"""A process that makes sandboxes and is about to die. Run in a fresh interpreter: actor.py PROVIDER SCENARIO COUNT.

Prints ``MADE id`` for each sandbox it holds, ``READY`` when the tests may strike, and goes on until it
is struck. Scenarios are functions of this module, or files with a program in its words.
"""

from __future__ import annotations

# A process whose standard library gevent has replaced is one from the first line on, as gevent's documentation asks.
if "ACTOR_GEVENT" in __import__("os").environ:
    with __import__("contextlib").suppress(ImportError):
        import trio  # noqa: F401 - starts a process when it is loaded, which gevent allows on the main thread only
    __import__("gevent.monkey").monkey.patch_all()

import asyncio
import faulthandler
import os
import random
import signal
import sys
import threading
import time

from lowtide import Sandbox, Session, results

PROVIDER, SCENARIO, COUNT = sys.argv[1], sys.argv[2], int(sys.argv[3])
OPTIONS = {"provider": PROVIDER, "tags": ["crash"]}
if "ACTOR_ISOLATION" in os.environ:
    OPTIONS["isolation"] = os.environ["ACTOR_ISOLATION"]

faulthandler.register(signal.SIGUSR1)  # a test that waits in vain asks where everybody is

# Ignored, if the suite was started by a shell in the background or with nohup: then they are ignored with us, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def make(count: int = COUNT) -> list[Sandbox]:
    boxes = []
    for _ in range(count):
        boxes.append(Sandbox.run(**OPTIONS))
        say("MADE", boxes[-1].sandbox_id)
    return boxes


def wait_to_be_struck() -> None:
    say("READY")
    while True:
        # Short: a signal that Python has noted just before it goes to sleep is handled only after the sleep.
        time.sleep(0.2)


def say_ready_when_asleep() -> None:
    """For a main thread that waits without end: Python does not hear a signal it has noted just before that."""

    def look() -> None:
        asleep = 0
        while asleep < 3:
            time.sleep(0.02)
            with open(f"/proc/self/task/{os.getpid()}/stat") as file:
                asleep = asleep + 1 if file.read().rpartition(")")[2].split()[0] == "S" else 0
        say("READY")

    threading.Thread(target=look, daemon=True).start()


def hold() -> None:
    boxes = make()  # noqa: F841
    wait_to_be_struck()


def peer() -> None:
    """A live neighbour: holds its sandboxes until told to end, and says whether they still work."""
    boxes = make()
    say("READY")
    sys.stdin.readline()
    alive = 0
    for box in boxes:
        try:
            alive += box.exec(["true"]).result(timeout=60).returncode == 0
        except Exception as error:
            say("LOST", box.sandbox_id, type(error).__name__, error)
    results([box.stop() for box in boxes])
    say("ALIVE", alive)


def with_block() -> None:
    with Sandbox.run(**OPTIONS) as box:
        say("MADE", box.sandbox_id)
        wait_to_be_struck()


def in_session() -> None:
    with Session({"provider": PROVIDER, "tags": ("crash",)}) as session:
        boxes = [session.sandbox() for _ in range(COUNT)]
        for box in boxes:
            box.start().result()
            say("MADE", box.sandbox_id)
        wait_to_be_struck()


def session_close() -> None:
    session = Session({"provider": PROVIDER, "tags": ("crash",)})
    for _ in range(COUNT):
        box = session.sandbox()
        box.start().result()
        say("MADE", box.sandbox_id)
    say("READY")
    session.close().result()
    say("CLOSED")


def stop_all() -> None:
    boxes = make()
    say("READY")
    results([box.stop(graceful_shutdown_seconds=0) for box in boxes])
    say("STOPPED")


def normal_exit() -> None:
    make()
    say("READY")


def unhandled_exception() -> None:
    make()
    say("READY")
    raise RuntimeError("the program failed")


def os_exit() -> None:
    make()
    say("READY")
    os._exit(7)


def sys_exit_in_thread() -> None:
    def work() -> None:
        make()
        say("READY")
        sys.exit(3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def worker_threads() -> None:
    """The main thread never calls lowtide and sits in a join, as in many servers."""

    def work() -> None:
        make(1)
        barrier.wait()
        time.sleep(600)

    barrier = threading.Barrier(COUNT + 1)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(COUNT)]
    for thread in threads:
        thread.start()
    barrier.wait()
    say_ready_when_asleep()
    threads[0].join()


def in_asyncio() -> None:
    async def main() -> None:
        boxes = [Sandbox.run(**OPTIONS) for _ in range(COUNT)]
        for box in boxes:
            await box
            say("MADE", box.sandbox_id)
        say("READY")
        await asyncio.sleep(600)

    asyncio.run(main())


def task_cancelled_while_creating() -> None:
    async def one() -> None:
        async with Sandbox.run(**OPTIONS) as box:
            say("MADE", box.sandbox_id)
            await asyncio.sleep(600)

    async def main() -> None:
        for number in range(COUNT):
            task = asyncio.create_task(one())
            await asyncio.sleep(0.02 * number / COUNT)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    say("READY")


def swallowed_interrupt() -> None:
    """A notebook or REPL: the first Ctrl+C is caught, work goes on, the program ends normally."""
    make()
    try:
        say_ready_when_asleep()
        time.sleep(600)
    except KeyboardInterrupt:
        say("SWALLOWED")
    make()


def own_handler_before() -> None:
    def handler(number: int, frame: object) -> None:
        say("HANDLER", number)
        sys.exit(9)

    signal.signal(signal.SIGTERM, handler)
    hold()


def own_handler_after() -> None:
    boxes = make()  # noqa: F841

    def handler(number: int, frame: object) -> None:
        say("HANDLER", number)
        sys.exit(9)

    signal.signal(signal.SIGTERM, handler)
    wait_to_be_struck()


def handler_that_goes_on() -> None:
    """A program that only takes note of SIGTERM: its sandboxes must live on until it ends."""
    noted: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    boxes = make()
    say("READY")
    while not noted:
        time.sleep(0.02)
    works = all(box.exec(["true"]).result().returncode == 0 for box in boxes)
    say("STILL", works)


def fork_child_exits() -> None:
    boxes = make()
    child = os.fork()
    if child == 0:
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    works = all(box.exec(["true"]).result().returncode == 0 for box in boxes)
    say("CHILD", os.waitstatus_to_exitcode(status), works)
    say("READY")


def fork_child_uses_its_own() -> None:
    boxes = make()
    child = os.fork()
    if child == 0:
        with Sandbox.run(**OPTIONS) as box:
            box.exec(["true"]).result(timeout=60)
        make(1)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    works = all(box.exec(["true"]).result().returncode == 0 for box in boxes)
    say("CHILD", os.waitstatus_to_exitcode(status), works)
    say("READY")


def parent_of_a_fork_dies() -> None:
    make()
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    say("READY")
    os.kill(os.getpid(), signal.SIGKILL)


def daemonised() -> None:
    """The owner forks and leaves; the child that goes on owns nothing."""
    make()
    if os.fork():
        os._exit(0)
    os.setsid()
    say("READY")
    time.sleep(3)
    os._exit(0)


def replaced_by_exec() -> None:
    make()
    time.sleep(0.6)  # the guardian knows us by now
    say("READY")
    os.execvp("sleep", ["sleep", "12"])


def replaced_by_itself() -> None:
    """An owner that restarts itself in place: same pid, same start time, nothing in memory."""
    if os.environ.get("ACTOR_AGAIN"):
        make(1)
        say("READY")
        time.sleep(1)
        return
    make()
    os.environ["ACTOR_AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def busy() -> None:
    """Creates and stops all the time, for kills at random instants."""
    say("READY")
    boxes: list[Sandbox] = []
    stop_at = time.monotonic() + 30
    chance = random.Random(os.environ["ACTOR_SEED"])
    while time.monotonic() < stop_at:
        if len(boxes) < COUNT and chance.random() < 0.7:
            batch = [Sandbox(**OPTIONS) for _ in range(chance.randint(1, 4))]
            results([box.start() for box in batch])
            boxes += batch
        elif boxes:
            chance.shuffle(boxes)
            going, boxes = boxes[:2], boxes[2:]
            results([box.stop(graceful_shutdown_seconds=0) for box in going])


def kept_on_failure() -> None:
    for _ in range(COUNT):
        box = Sandbox.run(keep="on-failure", keep_for_seconds=4, **OPTIONS)
        say("MADE", box.sandbox_id)
    wait_to_be_struck()


def session_dropped() -> None:
    """A session made in a function and forgotten: its sandboxes must not be forgotten with it."""
    import gc

    def work() -> None:
        session = Session({"provider": PROVIDER, "tags": ("crash",)})
        for _ in range(COUNT):
            box = session.sandbox()
            box.start().result()
            say("MADE", box.sandbox_id)

    work()
    gc.collect()
    say("READY")


def start_then_close() -> None:
    """Close the session while a start is on its way."""
    session = Session({"provider": PROVIDER, "tags": ("crash",)})
    boxes = [session.sandbox() for _ in range(COUNT)]
    starting = [box.start() for box in boxes]
    session.close().result()
    outcomes = []
    for start in starting:
        try:
            start.result()
            outcomes.append("started")
        except Exception as error:
            outcomes.append(type(error).__name__)
    say("OUTCOMES", *outcomes)
    say("READY")


def multiprocessing_child() -> None:
    import multiprocessing

    boxes = make()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_in_child)
    child.start()
    child.join(60)
    works = all(box.exec(["true"]).result().returncode == 0 for box in boxes)
    say("CHILD", child.exitcode, works)
    say("READY")


def _in_child() -> None:
    with Sandbox.run(**OPTIONS) as box:
        assert box.exec(["true"]).result(timeout=60).returncode == 0
    make(1)


def attached() -> None:
    """Uses a sandbox of somebody else's without adopting it; it must live on."""
    box = Sandbox.from_id(os.environ["ACTOR_SANDBOX"], provider=PROVIDER).result()
    box.exec(["true"]).result()
    say("READY")


if __name__ == "__main__":
    if SCENARIO.endswith(".py"):
        with open(SCENARIO) as program:
            exec(compile(program.read(), SCENARIO, "exec"))
    else:
        globals()[SCENARIO]()
