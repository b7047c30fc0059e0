"""Rooms: the local provider's sandbox that waits for the next create, and goes with the process that made it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from lowtide.errors import ValidationError
from lowtide.providers.base import Limits, Network, NetworkMode, SandboxSpec, SandboxState
from lowtide.providers.local import LocalProvider, rooms_on_disk
from lowtide.providers.local.create import Launch, Room
from lowtide.providers.local.sandbox_directory import SandboxDirectory

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import chunks, read, run, shell, spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src"), *sys.path[1:]]


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    made = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    yield made
    async for info in made.list({}):
        await made.destroy(info.sandbox_id)
    await made.aclose()
    assert left(tmp_path) == []


def left(tmp_path: Path) -> list[Path]:
    local = tmp_path / "home/local"
    return [path for name in ("sandboxes", "rooms", "trash") for path in (local / name).glob("*")]


async def room_of(provider: LocalProvider, like: SandboxSpec | None = None) -> Room:
    """Two alike make a room for the third."""
    for _ in range(2):
        made = await provider.create(like or spec())
        await provider.destroy(made.sandbox_id)
    for _ in range(1000):
        room = provider._rooms._room
        if room is not None and provider._rooms._making is None:
            return room
        await asyncio.sleep(0.01)
    raise AssertionError("no room was made")


def inner_of(provider: LocalProvider, sandbox_id: str) -> int:
    mark = provider._directory(sandbox_id).processes()[1]
    assert mark is not None
    return mark.pid


async def test_the_next_one_alike_moves_in(provider: LocalProvider) -> None:
    room = await room_of(provider)
    made = await provider.create(spec())
    assert inner_of(provider, made.sandbox_id) == room.inner.pid
    assert made.state is SandboxState.RUNNING
    found = [info.sandbox_id async for info in provider.list({})]
    assert found == [made.sandbox_id]
    assert await shell(provider, made.sandbox_id, "cd; pwd; echo x >/usr/bin/new; echo done") == (
        0,
        "/root\ndone\n",
        "",
    )


async def test_it_is_like_one_made_anew(provider: LocalProvider) -> None:
    script = "cat /proc/self/status /proc/1/status | grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)'; env; ls /proc/self/fd"
    first = await provider.create(spec())
    anew = await shell(provider, first.sandbox_id, script)
    await room_of(provider)
    moved = await provider.create(spec())

    def comparable(answer: tuple[int, str, str]) -> list[str]:
        return [line for line in answer[1].splitlines() if not line.startswith("LOWTIDE_PROCESS=")]

    assert comparable(await shell(provider, moved.sandbox_id, script)) == comparable(anew)
    assert anew[0] == 0


async def test_another_process_finds_its_way_in(provider: LocalProvider, tmp_path: Path) -> None:
    like = spec(environment={"COLOUR": "blue"})
    await room_of(provider, like)
    made = await provider.create(spec(environment={"COLOUR": "blue"}))
    other = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    try:
        assert (await shell(other, made.sandbox_id, "echo $COLOUR"))[1] == "blue\n"
        await other.write_file(made.sandbox_id, "/root/f", chunks(b"data"))
        assert (await run(provider, made.sandbox_id, "cat", "/root/f"))[1] == "data"
        assert await other.destroy(made.sandbox_id) is True
    finally:
        await other.aclose()


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {"A": "1"}},
        {"working_dir": "/srv"},
        {"network": Network(mode=NetworkMode.HOST)},
        {"lifetime_seconds": 300.0},
        {"limits": Limits(pids=50)},
        {"command": ("sleep", "100")},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_one_that_is_not_alike_stays_out(provider: LocalProvider, other: dict[str, object]) -> None:
    room = await room_of(provider)
    made = await provider.create(spec(**other))
    assert inner_of(provider, made.sandbox_id) != room.inner.pid


async def test_of_many_at_once_one_moves_in(provider: LocalProvider) -> None:
    room = await room_of(provider)
    made = await asyncio.gather(*(provider.create(spec()) for _ in range(10)))
    inners = [inner_of(provider, info.sandbox_id) for info in made]
    assert inners.count(room.inner.pid) == 1
    answers = await asyncio.gather(*(shell(provider, info.sandbox_id, "hostname") for info in made))
    assert len({out for _, out, _ in answers}) == 10


async def test_a_room_somebody_killed_is_not_used(provider: LocalProvider) -> None:
    room = await room_of(provider)
    os.kill(room.inner.pid, signal.SIGKILL)
    while room.inner.alive():
        await asyncio.sleep(0.01)
    made = await provider.create(spec())
    assert (await shell(provider, made.sandbox_id, "echo here"))[1] == "here\n"


async def test_closing_while_one_is_begun_leaves_nothing(
    provider: LocalProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = rooms_on_disk.sweep

    def slow(home: Path) -> None:
        time.sleep(0.3)
        sweep(home)

    monkeypatch.setattr(rooms_on_disk, "sweep", slow)
    for _ in range(2):
        await provider.destroy((await provider.create(spec())).sandbox_id)
    while provider._rooms._making is None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    await provider.aclose()
    await asyncio.sleep(0.4)
    assert left(tmp_path) == []


def layer(content: bytes) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("greeting")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    out.seek(0)
    return out


async def test_an_image_has_rooms_too(provider: LocalProvider) -> None:
    provider.images.add("app:1", [layer(b"one")], {})
    provider.images.add("app:2", [layer(b"two")], {})
    room = await room_of(provider, spec(image="app:1"))
    other = await provider.create(spec(image="app:2"))
    assert inner_of(provider, other.sandbox_id) != room.inner.pid
    assert await read(provider, other.sandbox_id, "/greeting") == b"two"
    room = await room_of(provider, spec(image="app:1"))
    made = await provider.create(spec(image="app:1"))
    assert inner_of(provider, made.sandbox_id) == room.inner.pid
    assert await read(provider, made.sandbox_id, "/greeting") == b"one"
    with pytest.raises(ValidationError, match=made.sandbox_id):
        provider.images.remove("app:1")


async def test_a_room_does_not_hold_its_image_and_goes_with_it(provider: LocalProvider) -> None:
    provider.images.add("app:1", [layer(b"one")], {})
    room = await room_of(provider, spec(image="app:1"))
    elsewhere = LocalProvider.connect({"LOWTIDE_HOME": str(provider.home.parent)})
    assert elsewhere.images.remove("app:1")
    await elsewhere.aclose()
    assert not room.inner.alive()
    provider.images.add("app:1", [layer(b"another")], {})
    made = await provider.create(spec(image="app:1"))
    assert await read(provider, made.sandbox_id, "/greeting") == b"another"


async def test_an_image_that_is_replaced_takes_its_room_along(provider: LocalProvider) -> None:
    provider.images.add("app:1", [layer(b"one")], {})
    room = await room_of(provider, spec(image="app:1"))
    provider.images.add("app:1", [layer(b"two")], {})
    assert not room.inner.alive()
    made = await provider.create(spec(image="app:1"))
    assert await read(provider, made.sandbox_id, "/greeting") == b"two"


async def test_one_that_is_cleared_away_while_somebody_moves_in_is_made_anew(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.images.add("app:1", [layer(b"one")], {})
    room = await room_of(provider, spec(image="app:1"))
    write = Launch._write_record

    def cleared(launch: Launch, directory: SandboxDirectory) -> None:
        if directory.path == room.directory.path:
            rooms_on_disk.clear(provider.home, "app:1")
        write(launch, directory)

    monkeypatch.setattr(Launch, "_write_record", cleared)
    made = await provider.create(spec(image="app:1"))
    assert inner_of(provider, made.sandbox_id) != room.inner.pid
    assert await read(provider, made.sandbox_id, "/greeting") == b"one"


async def test_snapshot_pause_and_grace_work_as_always(provider: LocalProvider) -> None:
    room = await room_of(provider)
    made = await provider.create(spec())
    assert inner_of(provider, made.sandbox_id) == room.inner.pid
    await shell(provider, made.sandbox_id, "echo kept >/root/f")
    await provider.pause(made.sandbox_id)
    await provider.resume(made.sandbox_id)
    snapshot = await provider.snapshot_and_destroy(made.sandbox_id, "s", grace_seconds=1.0)
    again = await provider.create(spec(snapshot=snapshot))
    assert (await shell(provider, again.sandbox_id, "cat /root/f"))[1] == "kept\n"
    await provider.destroy(again.sandbox_id)
    assert await provider.delete_snapshot(snapshot) is True


OWNER = """
import asyncio, os, sys, time
sys.path[:0] = sys.argv[3:]
from test_local_rooms import room_of
from local_sandbox import spec
from lowtide.engine import engine
from lowtide.providers.local import LocalProvider

provider = LocalProvider.connect({"LOWTIDE_HOME": sys.argv[1]})
room = engine().run(room_of(provider))
print(room.inner.pid, room.directory.path, flush=True)
exec(sys.argv[2])
"""


def owner(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], int, Path]:
    """A process of its own that has a room, and does `then` with it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "home"), then, *PATHS], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pid, _, directory = process.stdout.readline().strip().partition(" ")
    return process, int(pid), Path(directory)


def eventually(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_it_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process, inner, directory = owner(tmp_path, "time.sleep(600)")
    with process:
        assert not ended(inner)
        process.kill()
    assert eventually(lambda: ended(inner))
    # The directory is all that is left, and goes with the next one who comes by: here one that only looks.
    assert directory.exists()
    await LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")}).aclose()
    assert left(tmp_path) == []


def test_it_goes_with_a_process_that_ends(tmp_path: Path) -> None:
    process, inner, _ = owner(tmp_path, "sys.exit(0)")
    with process:
        assert process.wait(60) == 0
    assert eventually(lambda: ended(inner))
    assert left(tmp_path) == []


def test_a_forked_child_does_not_hold_it(tmp_path: Path) -> None:
    then = "child = os.fork() or time.sleep(600)\nprint(child, flush=True)\ntime.sleep(600)"
    process, inner, _ = owner(tmp_path, then)
    with process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            assert eventually(lambda: ended(inner))
            assert not ended(child)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_its_owner_dies_after_the_name_and_before_the_word(tmp_path: Path) -> None:
    then = """
class Leash:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def close(self): pass
    def send(self, _): os.kill(os.getpid(), 9)
leash, room.leash = room.leash, Leash()
engine().run(provider.create(spec()))
"""
    process, inner, _ = owner(tmp_path, then)
    with process:
        assert process.wait(60) == -signal.SIGKILL
    assert eventually(lambda: ended(inner))
    provider = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    found = [info async for info in provider.list({})]
    assert len(found) == 1
    directory = provider._directory(found[0].sandbox_id)
    # The outer bwrap follows the inner one, when it has written down what that ended with.
    assert eventually(lambda: (info := directory.info()) is not None and info.state.terminal)
    assert await provider.destroy(found[0].sandbox_id) is True
    await provider.aclose()
    assert left(tmp_path) == []
