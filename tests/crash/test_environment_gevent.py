"""A process whose threads, locks and sockets gevent has replaced: the engine runs in a real thread all the same."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.providers import registry
from tests.crash.world import World

pytest.importorskip("gevent", reason="gevent is not installed")

GEVENT = {"ACTOR_GEVENT": "1"}
RUN = """
        def run(box):
            # `faulty` runs commands with asyncio, whose own child processes gevent leaves to the main thread.
            return PROVIDER == "faulty" or box.exec(["true"]).result(timeout=60).returncode == 0
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("scenario", ["hold", "in_session"])
def test_a_signal(world: World, scenario: str, number: signal.Signals) -> None:
    actor = world.start(scenario, 2, **GEVENT)
    actor.until("READY")
    actor.process.send_signal(number)
    assert actor.wait() == -number
    world.wait_until_clean()


@pytest.mark.parametrize(
    ("scenario", "status"), [("normal_exit", 0), ("unhandled_exception", 1), ("stop_all", 0)]
)
def test_leaving(world: World, scenario: str, status: int) -> None:
    actor = world.start(scenario, 3, **GEVENT)
    assert actor.wait() == status
    actor.drain()
    assert "READY" in actor.lines
    world.wait_until_clean()


def test_patched_after_lowtide_was_loaded(world: World) -> None:
    actor = world.start_program(
        RUN
        + """
        boxes = make()
        import gevent.monkey
        gevent.monkey.patch_all()
        boxes += make()
        say("DONE", sum(run(box) for box in boxes))
        wait_to_be_struck()
        """
    )
    actor.until("READY")
    assert "DONE 4" in actor.lines
    actor.process.terminate()
    assert actor.wait() == -signal.SIGTERM
    world.wait_until_clean()


@pytest.mark.local  # runs commands
def test_greenlets_go_on_while_others_wait(world: World) -> None:
    """Each waits for a command that only ends when another greenlet has run."""
    actor = world.start_program(
        """
        import gevent

        def one():
            with Sandbox.run(**OPTIONS) as box:
                say("MADE", box.sandbox_id)
                arrived.append(box)
                while len(arrived) < 4:
                    gevent.sleep(0.01)
                box.write_file("/tmp/x", b"text").result(timeout=60)
                assert box.read_file("/tmp/x").result(timeout=60) == b"text"
                process = box.exec(["cat"], stdin=b"in and out")
                return process.result(timeout=60).stdout

        arrived = []
        ticks = 0

        def tick():
            global ticks
            while True:
                ticks += 1
                gevent.sleep(0.001)

        ticking = gevent.spawn(tick)
        jobs = [gevent.spawn(one) for _ in range(4)]
        gevent.joinall(jobs, raise_error=True)
        say("DONE", *sorted({job.value for job in jobs}))
        say("TICKED", ticks > 20)
        """,
        **GEVENT,
    )
    assert actor.until("DONE") == "DONE in and out"
    assert actor.until("TICKED") == "TICKED True"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.local  # runs commands
def test_a_forked_child_uses_its_own(world: World) -> None:
    actor = world.start("fork_child_uses_its_own", 2, **GEVENT)
    assert actor.until("CHILD") == "CHILD 0 True"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.everywhere
def test_gevent_everywhere(world: World) -> None:
    if registry.provider_class(world.provider_name).traits.own_threads:
        actor = world.start("normal_exit", 1, **GEVENT)
        assert actor.wait(120) == 1
        assert f"{world.provider_name} cannot be used in a process that gevent" in actor.stacks()
        assert world.rows() == []
        return
    actor = world.start_program(
        RUN
        + """
        boxes = make()
        say("DONE", sum(run(box) for box in boxes))
        wait_to_be_struck()
        """,
        **GEVENT,
    )
    actor.until("READY", 180)
    assert "DONE 2" in actor.lines
    actor.process.terminate()
    assert actor.wait(120) == -signal.SIGTERM
    world.wait_until_clean()


APP = """
import os
from lowtide import Sandbox

boxes = []

def app(environ, start_response):
    box = Sandbox.run(provider=os.environ["APP_PROVIDER"])
    boxes.append(box)
    said = "" if box.provider == "faulty" else box.exec(["echo", "hello"]).result(timeout=60).stdout
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {box.sandbox_id} {said}".encode()]
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_gunicorn(world: World, tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    (tmp_path / "served.py").write_text(APP)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "-b", f"127.0.0.1:{port}", "served:app"]
    with open(tmp_path / "gunicorn.log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--graceful-timeout", "5"],
            cwd=tmp_path,
            env={**world.environ, "APP_PROVIDER": world.provider_name},
            stdout=log,
            stderr=log,
        )
    try:
        answers = [ask(port, server, tmp_path / "gunicorn.log") for _ in range(2)]
        assert world.existing() == {answer.split()[1] for answer in answers}
        worker = int(answers[0].split()[0])
        if number == signal.SIGTERM:
            server.terminate()
            assert server.wait(60) == 0
        else:
            os.kill(worker, signal.SIGKILL)
        world.wait_until_clean()
    finally:
        server.terminate()
        server.wait(60)


def ask(port: int, server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/")
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, log.read_text()[-3000:]
            return text
        except ConnectionRefusedError:
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        finally:
            connection.close()
