"""The bound around all sandboxes: held without a limit being asked for, settable, and gone with the last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowtide.errors import SandboxFileError, ValidationError
from lowtide.providers.base import Limits
from lowtide.providers.local import LocalProvider, bound_groups, cgroups, doctor
from lowtide.providers.local.bound import Bound

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, shell, spec

needs_groups = pytest.mark.skipif(
    isinstance(cgroups.hierarchy("memory"), str) or isinstance(cgroups.hierarchy("pids"), str),
    reason="no control groups can be made here",
)


@needs_groups
async def test_all_sandboxes_together_have_so_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_LOCAL_MEMORY_BYTES", str(256 << 20))
    provider = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    try:
        one, two = await provider.create(spec()), await provider.create(spec())
        groups = [group.path for group in provider._prerequisites.bound]
        assert all(group.is_dir() for group in groups)
        take = "x = bytearray(int(__import__('sys').argv[1]) << 20); print(len(x))"
        for made in (one, two):
            code, _, _ = await run(provider, made.sandbox_id, "python3", "-c", take, "400")
            assert code == 137
            assert (await run(provider, made.sandbox_id, "python3", "-c", take, "20"))[0] == 0
    finally:
        async for info in provider.list({}):
            await provider.destroy(info.sandbox_id)
        await provider.aclose()
    await gone(groups)


@needs_groups
async def test_what_outlives_its_maker_takes_the_bound_with_it(tmp_path: Path) -> None:
    first = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    made = await first.create(spec())
    groups = [group.path for group in first._prerequisites.bound]
    await first.aclose()
    await asyncio.sleep(0.3)
    assert all(group.is_dir() for group in groups)
    second = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    assert await second.destroy(made.sandbox_id) is True
    await second.aclose()
    assert [group for group in groups if group.exists()] == []


@pytest.mark.slow
async def test_a_directory_with_too_many_entries_is_refused(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    many = (
        "import os; os.mkdir('/many'); os.chdir('/many'); [os.symlink('x', str(n)) for n in range(100_001)]"
    )
    assert (await run(provider, made.sandbox_id, "python3", "-c", many))[0] == 0
    with pytest.raises(SandboxFileError, match="holds too much"):
        await provider.list_dir(made.sandbox_id, "/many")
    assert (await shell(provider, made.sandbox_id, "rm /many/5"))[0] == 0
    assert len(await provider.list_dir(made.sandbox_id, "/many")) == 100_000


async def test_counters_of_the_user_are_bounded(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    count = """
import ctypes
libc = ctypes.CDLL(None)
made = 0
while made < 1000 and libc.inotify_init() >= 0:
    made += 1
print(made)
"""
    _, out, _ = await run(provider, made.sandbox_id, "python3", "-c", count)
    assert 1 <= int(out) <= 32
    raised = "echo 1000 >/proc/sys/user/max_inotify_instances"
    assert (await shell(provider, made.sandbox_id, raised))[0] != 0


@needs_groups
async def test_a_limit_of_its_own_and_the_bound_hold_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_LOCAL_MEMORY_BYTES", str(256 << 20))
    provider = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    try:
        large = await provider.create(spec(limits=Limits(memory_bytes=1 << 30)))
        small = await provider.create(spec(limits=Limits(memory_bytes=64 << 20)))
        take = "x = bytearray(int(__import__('sys').argv[1]) << 20); print(len(x))"
        assert (await run(provider, large.sandbox_id, "python3", "-c", take, "400"))[0] == 137
        assert (await run(provider, large.sandbox_id, "python3", "-c", take, "100"))[0] == 0
        assert (await run(provider, small.sandbox_id, "python3", "-c", take, "100"))[0] == 137
        assert (await run(provider, small.sandbox_id, "python3", "-c", take, "20"))[0] == 0
        groups = [group.path for group in provider._prerequisites.bound]
        for made in (large, small):
            own = provider._directory(made.sandbox_id).spec()["cgroups"]  # type: ignore[index]
            assert own
            assert all(Path(path).parent in groups for path in own)
    finally:
        async for info in provider.list({}):
            await provider.destroy(info.sandbox_id)
        await provider.aclose()
    await gone(groups)


def test_version_2_takes_limits_below_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernel's own version 2, by a controller that is free here: it refuses a group with processes in it."""
    mount = Path("/sys/fs/cgroup/unified")
    controllers = (mount / "cgroup.controllers").read_text().split() if mount.is_dir() else []
    if os.geteuid() != 0 or "hugetlb" not in controllers:
        pytest.skip("no controller of version 2 is free here")
    directory = cgroups.Hierarchy(version=2, parent=mount, own=mount)
    enabled = (mount / "cgroup.subtree_control").read_text().split()
    (mount / "cgroup.subtree_control").write_text("+hugetlb")
    monkeypatch.setattr(cgroups, "CONTROLLERS", ("hugetlb",))
    monkeypatch.setattr(cgroups, "hierarchy", lambda controller: directory)
    monkeypatch.setattr(
        cgroups, "settings", lambda attribute, value, version: [("hugetlb.2MB.max", str(2 << 20))]
    )
    (group,) = bound_groups.shared(Bound.resolve({}, tmp_path), tmp_path)
    sleeper = subprocess.Popen(["sleep", "60"])
    own = group.path / "lowtide-own"
    try:
        assert bound_groups.join([group], sleeper.pid) == {}
        plan = cgroups.plan("own", Limits(pids=3), below={group.place.parent: group.path})
        assert [one.path for one in plan] == [own]
        cgroups.make(plan)
        (own / "cgroup.procs").write_text(str(sleeper.pid))
        assert (own / "hugetlb.2MB.max").read_text().strip() == str(2 << 20)
        bound_groups.release([str(group.path)])
        assert own.is_dir(), "what is in use stays"
    finally:
        sleeper.kill()
        sleeper.wait()
        with contextlib.suppress(FileNotFoundError):
            own.rmdir()
        bound_groups.release([str(group.path)], 5.0)
        if "hugetlb" not in enabled:
            with contextlib.suppress(OSError):  # somebody else has taken it meanwhile
                (mount / "cgroup.subtree_control").write_text("-hugetlb")
    assert not group.path.exists()


async def test_a_bound_that_the_kernel_refuses_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = cgroups.settings

    def settings(attribute: str, value: float, version: int) -> list[tuple[str, str]]:
        return [("cgroup.procs", "nonsense")] if attribute == "pids" else usual(attribute, value, version)

    monkeypatch.setattr(cgroups, "settings", settings)
    provider = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    try:
        made = await provider.create(spec())
        assert (await run(provider, made.sandbox_id, "true"))[0] == 0
        assert [said.partition(":")[0] for said in made.unheld] == ["pids"]
        assert (await provider.get(made.sandbox_id)).unheld == made.unheld
    finally:
        async for info in provider.list({}):
            await provider.destroy(info.sandbox_id)
        await provider.aclose()


OWNER = """
import os, sys, time
from lowtide import Sandbox
box = Sandbox.run(resources={"limits": {"pids": 50}}) if sys.argv[1] == "limited" else Sandbox.run()
box.exec(["true"]).result()
print("made", flush=True)
time.sleep(600)
"""


FILL = """
import os, sys, time
kind = sys.argv[1]
try:
    if kind == "files":
        os.mkdir("/root/many")
        for number in range(30000):
            os.close(os.open(f"/root/many/{number}", os.O_CREAT | os.O_WRONLY))
        os.chmod("/root/many", 0)
    file = open("/root/large", "wb", buffering=0)
    if kind == "a file without a name":
        os.unlink("/root/large")
    while True:
        file.write(bytes(1 << 20))
except OSError:
    time.sleep(600)
"""

ON_A_SMALL_DISK = """
import os, sys, time
from lowtide import Sandbox
from lowtide.errors import LowtideError
fill, kind, home = sys.argv[1:]
os.environ["LOWTIDE_HOME"] = home
with Sandbox.run() as innocent, Sandbox.run() as guilty:
    process = guilty.exec(["python3", "-c", fill, kind])
    deadline = time.monotonic() + 60
    while guilty.get_status() == "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    print(guilty.get_status())
    while time.monotonic() < deadline:
        disk = os.statvfs(home)
        if disk.f_bavail * disk.f_frsize > 400 << 20 and disk.f_favail > 15000:
            break
        time.sleep(0.05)
    print("room" if time.monotonic() < deadline else "full")
    print(innocent.exec(["true"]).result().returncode)
    try:
        guilty.exec(["true"]).result()
    except LowtideError as error:
        print(guilty.refresh().result(), error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("kind", ["a file", "a file without a name", "files"])
def test_whoever_fills_the_disk_is_ended_and_makes_room(tmp_path: Path, kind: str) -> None:
    """In a mount namespace of its own, so that nobody else's sandbox gets the small disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=512m,nr_inodes=20000 lowtide {disk} && exec "$@"'
    scenario = [sys.executable, "-c", ON_A_SMALL_DISK, FILL, kind, f"{disk}/home"]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *scenario],
        env={
            **os.environ,
            "LOWTIDE_LOCAL_FREE_BYTES": str(51 << 20),
            "LOWTIDE_LOCAL_FREE_INODES": "1000",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.splitlines()[:3] == ["failed", "room", "0"], done.stdout + done.stderr


@needs_groups
@pytest.mark.parametrize("how", ["owner", "owner and spawner", "asked to end"])
def test_killed_owners_leave_no_group(tmp_path: Path, how: str) -> None:
    home = tmp_path / "home"
    environ = {**os.environ, "LOWTIDE_HOME": str(home)}
    owners = []
    try:
        for limits in ("limited", "usual"):
            owner = subprocess.Popen(
                [sys.executable, "-c", OWNER, limits], env=environ, stdout=subprocess.PIPE, text=True
            )
            owners.append(owner)
        for owner in owners:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "made\n"
        groups = [Path(path) for path in bound_groups.left_over(home / "local")]
        assert groups
        for owner in owners:
            spawners = [pid for pid in children(owner.pid) if b"spawner/__main__.py" in command(pid)]
            assert len(spawners) == 1
            if how == "owner and spawner":
                os.kill(spawners[0], signal.SIGKILL)
            owner.send_signal(signal.SIGTERM if how == "asked to end" else signal.SIGKILL)
    finally:
        for owner in owners:
            if how != "asked to end":
                owner.kill()
            owner.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while bound_groups.left_over(home / "local") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert bound_groups.left_over(home / "local") == []


@needs_groups
def test_whoever_comes_next_removes_the_empty_groups_of_homes_that_are_gone(tmp_path: Path) -> None:
    """A home that was deleted, or a container that was killed whole, leaves nobody who would."""
    place = cgroups.hierarchy("pids")
    assert isinstance(place, cgroups.Hierarchy)
    groups = [place.parent / bound_groups.name(tmp_path / name) for name in ("empty", "young", "used")]
    empty, _, used = groups
    held = subprocess.Popen(["sleep", "100"])
    try:
        for group in groups:
            (group / "lowtide-shared").mkdir(parents=True)
        (used / "lowtide-shared" / "cgroup.procs").write_text(str(held.pid))
        for group in (empty, used):
            os.utime(group, (0, 0))
        bound_groups.sweep([place.parent])
        assert [group.exists() for group in groups] == [False, True, True]
        assert (used / "lowtide-shared").exists()
    finally:
        held.kill()
        held.wait()
        bound_groups.release([str(group) for group in groups], 5.0)


def children(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return [int(word) for word in found]


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def gone(groups: list[Path]) -> None:
    for _ in range(200):
        if not any(group.exists() for group in groups):
            break
        await asyncio.sleep(0.05)
    assert [group for group in groups if group.exists()] == []


def test_the_bound_is_said_and_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usual = Bound.resolve({}, tmp_path)
    assert usual.memory_bytes == int(total * 0.75)
    assert usual.cpu_weight == 50
    assert set(usual.sources.values()) == {"default"}
    file = tmp_path / "config.toml"
    file.write_text('provider = "local"\n[local]\nmemory_bytes = "none"\npids = 100\ncpu_weight = 20\n')
    environ = {"LOWTIDE_LOCAL_PIDS": "200", "LOWTIDE_LOCAL_CPU_WEIGHT": "30"}
    held = Bound.resolve(environ, tmp_path, {"cpu_weight": None})
    assert (held.memory_bytes, held.pids, held.cpu_weight) == (None, 200, None)
    assert held.sources["memory_bytes"] == str(file)
    assert held.sources["pids"] == "LOWTIDE_LOCAL_PIDS"
    assert held.sources["cpu_weight"] == "argument"
    with pytest.raises(ValidationError, match="LOWTIDE_LOCAL_PIDS"):
        Bound.resolve({"LOWTIDE_LOCAL_PIDS": "lots"}, tmp_path)
    file.write_text("[local]\nmemory = 5\n")
    with pytest.raises(ValidationError, match="unknown bound memory"):
        Bound.resolve({}, tmp_path)
    file.unlink()
    with pytest.raises(ValidationError, match="unknown bound colour"):
        LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path)}, {"colour": 1})
    environ = {"LOWTIDE_HOME": str(tmp_path)}
    names = {check.name for check in doctor.doctor(environ)}
    assert {"memory of all sandboxes together", "processes of all sandboxes together"} <= names
    monkeypatch.setattr(cgroups, "hierarchy", lambda controller: "not here")
    said = [check for check in doctor._defaults(environ) if not check.ok]
    assert len(said) == 3
    assert all("cannot be held" in check.why for check in said)


def test_the_end_of_one_sandbox_does_not_read_the_processes_of_all(tmp_path: Path) -> None:
    """They are in one group: 200 ends would read 200 lists of a thousand processes."""
    inner = tmp_path / "group" / "lowtide-shared"
    inner.mkdir(parents=True)
    os.mkfifo(inner / "cgroup.procs")  # whoever reads it waits
    ending = threading.Thread(target=bound_groups.release, args=([str(inner.parent)],), daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
