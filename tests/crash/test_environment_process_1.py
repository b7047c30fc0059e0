"""The owner is process 1, as in a container without an init: the kernel sends it no deadly signal, and it adopts orphans."""

from __future__ import annotations

import signal

import pytest

from tests.crash.environments import pid_namespace
from tests.crash.world import World

ZOMBIES = """
    def zombies():
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    name, _, rest = file.read().partition("(")[2].rpartition(")")
            except OSError:
                continue
            if rest.split()[0] == "Z":
                found.append((name, int(pid), int(rest.split()[1])))
        return found

    def say_zombies():
        until = time.monotonic() + 10
        while zombies() and time.monotonic() < until:
            time.sleep(0.1)
        say("ZOMBIES", len(zombies()), *zombies())
"""


def gone_with_its_namespace(world: World) -> None:
    """Nobody can look into a pid namespace that is gone: what is left ends with its lifetime at the provider."""
    world.service.move_clock(3600)
    world.sweep()
    world.wait_until_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_the_status_a_shell_gives(world: World, number: signal.Signals) -> None:
    actor = world.start("in_session", 2, within=pid_namespace(init=False))
    actor.until("READY")
    actor.signal(number)
    assert actor.wait() == 128 + number
    assert world.existing() == set()
    assert world.open_rows() == []


@pytest.mark.faulty  # hangs on demand
def test_leaving_is_bounded_when_the_provider_hangs(world: World) -> None:
    actor = world.start("hold", 2, within=pid_namespace(init=False), LOWTIDE_EXIT_SECONDS="2")
    actor.until("READY")
    world.service.fault("destroy", hold_seconds=300, times=2)
    actor.signal(signal.SIGTERM)
    assert actor.wait(21) == 128 + signal.SIGTERM
    world.service.clear()
    gone_with_its_namespace(world)


@pytest.mark.faulty  # has a lifetime that runs out: the guardian ends with the namespace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interpreter_that_stands_still_is_ended_too(world: World, number: signal.Signals) -> None:
    actor = world.start_program(
        """
        import ctypes
        from lowtide.lifecycle import signals

        boxes = make()

        async def end_everything(**how):
            ctypes.PyDLL(None).sleep(600)

        signals._end_everything = end_everything
        wait_to_be_struck()
        """,
        within=pid_namespace(init=False),
        LOWTIDE_EXIT_SECONDS="2",
    )
    actor.until("READY")
    actor.signal(number)
    assert actor.wait(21) == (128 + number if number == signal.SIGTERM else 1)
    gone_with_its_namespace(world)


@pytest.mark.local
def test_no_zombies_are_left(world: World) -> None:
    actor = world.start_program(
        ZOMBIES
        + """
    for _ in range(3):
        boxes = make()
        for box in boxes:
            box.exec(["sh", "-c", "true & sleep 0.05 & exit 0"]).result()
        results([box.stop() for box in boxes])
    say_zombies()
    """,
        within=pid_namespace(init=False),
    )
    assert actor.until("ZOMBIES") == "ZOMBIES 0"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.local
def test_a_killed_guardian_and_a_proxy_leave_none_either(world: World) -> None:
    actor = world.start_program(
        ZOMBIES
        + """
    from lowtide.lifecycle.guardian_link import connect
    from pathlib import Path
    import json

    def guardian():
        while (link := connect(Path(os.environ["LOWTIDE_HOME"]))) is None:
            time.sleep(0.05)
        with link:
            link.settimeout(5)
            link.sendall(b'{"status": true}\\n')
            return json.loads(link.recv(65536))["pid"]

    box = Sandbox.run(network=["example.com"], **OPTIONS)
    say("MADE", box.sandbox_id)
    os.kill(guardian(), signal.SIGKILL)
    box.stop().result()
    say_zombies()
    """,
        within=pid_namespace(init=False),
    )
    assert actor.until("ZOMBIES") == "ZOMBIES 0"
    assert actor.wait() == 0
    world.wait_until_clean()


@pytest.mark.everywhere
def test_process_1_everywhere(world: World) -> None:
    actor = world.start("in_session", 2, within=pid_namespace(init=False))
    actor.until("READY", 180)
    actor.signal(signal.SIGTERM)
    assert actor.wait(120) == 128 + signal.SIGTERM
    assert world.open_rows() == []
    world.wait_until_clean()
