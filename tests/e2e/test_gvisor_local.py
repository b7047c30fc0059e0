"""isolation="gvisor" on the local provider: the wall, the refusals, and that nothing of it is ever left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.crash.stalls import Stalls
from tests.crash.world import World

from lowtide import Sandbox
from lowtide.errors import MissingDependencyError, SandboxGone, UnsupportedError
from lowtide.providers.base import SandboxState

needs_runsc = pytest.mark.skipif(
    shutil.which("runsc") is None, reason="runsc is not installed: scripts/engines up tools"
)
ANSWER_SECONDS = 120.0
GVISOR = {"provider": "local", "isolation": "gvisor"}


def eventually(done: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def processes_of(sandbox_id: str) -> list[str]:
    """Every process of this machine, in whatever namespaces, that has the sandbox's layers mounted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"/sandboxes/{sandbox_id}/" in (entry / "mountinfo").read_text():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


def test_without_runsc_it_says_what_to_install_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_RUNSC", str(tmp_path / "nowhere"))
    tag = f"gvisor{os.getpid()}"
    with pytest.raises(MissingDependencyError, match="apt install runsc"):
        Sandbox.run(**GVISOR, tags=[tag]).exec(["true"]).result(ANSWER_SECONDS)
    assert Sandbox.list(tags=[tag], provider="local").result(ANSWER_SECONDS) == []


@pytest.mark.parametrize(
    ("asked", "feature"),
    [
        ({"network": "internet"}, "network-internet"),
        ({"network": "host"}, "network-host"),
        ({"network": ["example.org"]}, "network-allow"),
        ({"resources": {"limits": {"pids": 10}}}, "pids-limit"),
    ],
)
def test_what_does_not_go_with_it_is_refused_at_once(asked: dict[str, object], feature: str) -> None:
    with pytest.raises(UnsupportedError, match="gvisor") as caught:
        Sandbox(**GVISOR, **asked)  # type: ignore[arg-type]
    assert (caught.value.provider, caught.value.feature) == ("local", feature)


@needs_runsc
def test_a_kernel_of_its_own_answers_and_serves_as_nobody_here() -> None:
    with Sandbox.run(**GVISOR, environment_variables={"A_SECRET": "s3cr3t-in-memory"}) as box:
        assert "gVisor" in box.exec(["dmesg"]).result(ANSWER_SECONDS).stdout
        assert box.exec(["sh", "-c", "echo $A_SECRET"]).result(ANSWER_SECONDS).stdout == "s3cr3t-in-memory\n"
        with pytest.raises(UnsupportedError, match="tty"):
            box.exec(["true"], tty=True)
        keys = "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -a '^LOWTIDE_KEY=.'"
        assert box.exec(["sh", "-c", keys]).result(ANSWER_SECONDS).stdout == ""
        serving = processes_of(box.sandbox_id or "")
        assert any("runsc-gofer" in line for line in serving)
        home = Path(os.environ["LOWTIDE_HOME"])
        on_disk = subprocess.run(
            ["grep", "-rl", "s3cr3t-in-memory", str(home)], capture_output=True, text=True, check=False
        ).stdout
        assert on_disk == ""
    assert processes_of(box.sandbox_id or "") == []


@needs_runsc
def test_another_process_uses_it_and_may_end_it() -> None:
    with Sandbox.run(**GVISOR) as box:
        box.write_file("/root/x", b"from the first").result(ANSWER_SECONDS)
        code = (
            "import sys; from lowtide import Sandbox\n"
            "box = Sandbox.from_id(sys.argv[1], provider='local').result(60)\n"
            "print(box.exec(['cat', '/root/x']).result(60).stdout)\n"
            "Sandbox.delete(sys.argv[1], provider='local').result(60)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, box.sandbox_id or ""], capture_output=True, text=True, check=False
        )
        assert done.stdout.strip() == "from the first", done.stderr
        with pytest.raises(SandboxGone):
            box.exec(["true"]).result(ANSWER_SECONDS)
    assert processes_of(box.sandbox_id or "") == []


@needs_runsc
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has no control groups here")
def test_beyond_its_memory_the_sandbox_ends_and_says_why() -> None:
    with Sandbox.run(**GVISOR, resources={"limits": {"memory": "256Mi"}}) as box:
        code = "import os; os.write(1, b'on'); x = b'x' * 1_000_000_000; print('had it all')"
        process = box.exec(["python3", "-c", code])
        assert process.exception(ANSWER_SECONDS) is not None or "had" not in process.result().stdout
        eventually(lambda: box.get_status() is SandboxState.FAILED, 20, "its end")
    assert processes_of(box.sandbox_id or "") == []


@needs_runsc
def test_its_lifetime_needs_neither_owner_nor_guardian(tmp_path: Path) -> None:
    code = (
        "from lowtide import Sandbox; import time\n"
        "box = Sandbox.run(provider='local', isolation='gvisor', max_lifetime_seconds=8)\n"
        "box.exec(['true']).result(60); print(box.sandbox_id, flush=True); time.sleep(600)"
    )
    world = World(tmp_path, "local")
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(world.environ)
    )
    try:
        assert owner.stdout is not None
        sandbox_id = owner.stdout.readline().strip()
        began, stalls = time.monotonic(), Stalls(world.home)
        os.kill(owner.pid, signal.SIGSTOP)  # so that it starts no other guardian
        world.kill_guardian()
        owner.kill()
        while processes_of(sandbox_id):
            assert time.monotonic() - began < 8 * 2 + stalls.seconds(), "it outlived its lifetime"
            stalls.sleep(0.1)
        # Its directory waits for the next lowtide process.
        subprocess.run(
            [sys.executable, "-m", "lowtide", "sweep"],
            env=dict(world.environ),
            capture_output=True,
            check=True,
        )
        assert world.existing() == set()
    finally:
        owner.kill()
        owner.wait()
        world.close()


@needs_runsc
def test_killed_at_random_instants_nothing_is_left(tmp_path: Path) -> None:
    world = World(tmp_path, "local")
    try:
        for moment in (0.0, 0.15, 0.4, 0.8, 1.5):
            actor = world.start("busy", 2, ACTOR_ISOLATION="gvisor", ACTOR_SEED=str(moment))
            actor.until("READY")
            time.sleep(moment)
            actor.kill()
            world.wait_until_clean()
            for made in actor.made():
                eventually(lambda made=made: processes_of(made) == [], 5, "the end of its processes")  # type: ignore[misc]
    finally:
        world.close()
