"""Layers that hostile code has written, joined; drafts of snapshots that others sweep."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ordinary_user import OrdinaryUser, why_not
from tests.unit.local_sandbox import shell, spec

from lowtide.errors import SandboxNotFoundError
from lowtide.providers.local import LocalProvider, snapshots
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.trees.copy import copy_tree
from lowtide.trees.join import join_trees
from lowtide.trees.remove import remove_tree

# What is there of a directory, with what only the system knows.
LOOK = """
import os, stat
for folder in ("/w", "/etc"):
    for name in sorted(os.listdir(folder)):
        path = f"{folder}/{name}"
        found = os.lstat(path)
        marks = {} if stat.S_ISLNK(found.st_mode) else {one: os.getxattr(path, one) for one in os.listxattr(path)}
        print(path, oct(found.st_mode), found.st_uid, found.st_mtime_ns, sorted(marks.items()))
"""
ACL = """
import os, struct
entries = [(1, 7), (4, 5), (16, 7), (32, 5)]
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, mode, 0xFFFFFFFF) for tag, mode in entries)
os.makedirs("/w/acl")
os.setxattr("/w/acl", "system.posix_acl_access", acl)
os.setxattr("/w/acl", "system.posix_acl_default", acl)
"""
SOCKET = """
import os, socket
os.mkdir("/w/acl/new")
os.unlink("/etc/passwd")
socket.socket(socket.AF_UNIX).bind("/etc/passwd")
os.mkfifo("/w/pipe", 0o666)
os.symlink("pipe", "/w/link")
"""
CLOSED = """
import asyncio, sys
from lowtide.errors import SandboxNotFoundError
from lowtide.providers.local import LocalProvider, snapshots
from lowtide.providers.local.base_layers import BaseLayers
from tests.unit.local_sandbox import shell, spec
async def main():
    provider, taken = LocalProvider.connect({"LOWTIDE_HOME": sys.argv[1]}), None
    try:
        for step in ("chmod 555 / /usr", "chmod 755 /; mkdir /new; chmod 555 /", "mkdir /newer; ls -d /new /newer"):
            made = (await provider.create(spec(snapshot=taken))).sandbox_id
            said = await shell(provider, made, step)
            assert said[0] == 0, said
            taken = await provider.snapshot_and_destroy(made, "x")
            snapshots._MOST_BYTES = 0
    finally:
        await provider.aclose()
asyncio.run(main())
"""


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider.connect({**os.environ, "LOWTIDE_HOME": str(tmp_path / "home")})
    yield provider
    async for info in provider.list({}):
        await provider.destroy(info.sandbox_id)
    await provider.aclose()
    remove_tree(tmp_path / "home")


async def python(provider: LocalProvider, program: str, snapshot: str | None, move: bool | None) -> str:
    """What it prints; with `move` the snapshot that it makes."""
    made = (await provider.create(spec(snapshot=snapshot))).sandbox_id
    code, out, err = await shell(provider, made, f"python3 - <<'END'\n{program}\nEND")
    assert code == 0, err
    if move is None:
        await provider.destroy(made)
        return out
    if move:
        return await provider.snapshot_and_destroy(made, "x")
    taken = await provider.snapshot(made, "x")
    await provider.destroy(made)
    return taken


@pytest.mark.parametrize("move", [True, False])
async def test_sockets_and_access_lists_are_joined_too(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch, move: bool
) -> None:
    """A socket that was left out brought the file back that it had replaced."""
    taken = await python(provider, ACL, None, move)
    taken = await python(provider, SOCKET, taken, move)
    shown = await python(provider, LOOK, taken, None)
    assert "/etc/passwd 0o140" in shown
    assert "posix_acl_default" in shown
    assert "/w/pipe 0o10644 0 " in shown
    monkeypatch.setattr(snapshots, "_MOST_BYTES", 0)
    assert (await python(provider, LOOK, taken, None)).splitlines() == shown.splitlines()


async def test_a_copy_of_a_layer_has_its_owners_and_times(provider: LocalProvider) -> None:
    taken = await python(provider, ACL, None, False)
    made = (await provider.create(spec(snapshot=taken))).sandbox_id
    looks = [f"python3 - <<'END'\n{program}\nEND" for program in (SOCKET, LOOK)]
    assert (await shell(provider, made, looks[0]))[0] == 0
    shown = (await shell(provider, made, looks[1]))[1]
    taken = await provider.snapshot(made, "x")
    assert (await python(provider, LOOK, taken, None)).splitlines() == shown.splitlines()


def test_whiteouts_of_a_directory_in_which_a_later_layer_has_nothing_stay_unseen(tmp_path: Path) -> None:
    """Such a directory is made for a sandbox before it runs; an overlay lists whiteouts where this mark is missing."""
    for layer in "abc":
        (tmp_path / layer / "etc").mkdir(parents=True)
    (tmp_path / "a" / "etc" / "name").touch()
    os.mknod(tmp_path / "b" / "etc" / "name", stat.S_IFCHR, 0)
    os.setxattr(tmp_path / "b" / "etc", "user.overlay.origin", b"")
    join_trees([str(tmp_path / layer) for layer in "abc"], str(tmp_path / "joined"))
    assert "user.overlay.origin" in os.listxattr(tmp_path / "joined" / "etc")


def test_a_file_with_as_many_names_as_it_can_have(tmp_path: Path) -> None:
    """As the whiteouts of one layer are: one file."""
    below, above, joined = tmp_path / "below", tmp_path / "above", tmp_path / "joined"
    below.mkdir()
    above.mkdir()
    os.mknod(above / "name", stat.S_IFCHR, 0)
    for number in range(33_000):
        os.link(above / "name", above / f"{number}")
    join_trees([str(below), str(above)], str(joined))
    copy_tree(str(joined), str(tmp_path / "linked"), link=True)
    assert set(os.listdir(joined)) == set(os.listdir(tmp_path / "linked")) == set(os.listdir(above))
    assert len({os.lstat(joined / name).st_ino for name in os.listdir(joined)}) <= 2


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_roots_that_their_owner_may_not_write() -> None:
    with OrdinaryUser() as user:
        done = subprocess.run(
            user.command("-c", CLOSED, f"{user.place}/home"),
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture
def slow_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A maker that is held up before it locks its draft: it has come there, and it may go on."""
    there, on, real, maker = threading.Event(), threading.Event(), fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not maker:
            maker.append(threading.get_ident())
            there.set()
            on.wait(60)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    yield there, on
    on.set()


def test_a_draft_that_is_swept_before_its_maker_has_locked_it_is_made_again(
    tmp_path: Path, slow_lock: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = snapshots.SnapshotStore(tmp_path / "snapshots", None), []

    def make() -> None:
        with store._draft("draft") as draft:
            made.append(draft.is_dir())

    maker = threading.Thread(target=make)
    maker.start()
    there, on = slow_lock
    assert there.wait(60)
    monkeypatch.setattr(snapshots, "_MAKING_SECONDS", -1.0)  # it takes longer than anybody thought
    store.sweep()
    assert os.listdir(store.directory) == []
    on.set()
    maker.join(60)
    assert made == [True]


def test_a_child_forked_meanwhile_does_not_keep_a_snapshot_locked(tmp_path: Path) -> None:
    store = snapshots.SnapshotStore(tmp_path / "snapshots", None)
    with store._draft("draft") as draft:
        descriptor = next(fd for fd in map(int, os.listdir("/proc/self/fd")) if _is(fd, draft))
        child = os.dup(descriptor)  # what a fork does: the lock belongs to both
        draft.rename(store.directory / "kept")
    again = os.open(store.directory / "kept", os.O_RDONLY)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as `delete` does, which would wait for that child
    finally:
        os.close(again)
        os.close(child)


def _is(fd: int, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except OSError:
        return False


def test_a_snapshot_that_is_moved_is_never_swept_whatever_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle, its maker leaves in the draft all there is of the layers."""
    store = snapshots.SnapshotStore(tmp_path / "snapshots", None)
    top = tmp_path / "sandbox"
    (top / "root").mkdir(parents=True)
    (top / "root" / "file").write_text("all there is")
    monkeypatch.setattr(snapshots.json, "dumps", lambda _: 1 / 0)  # where it is killed
    with pytest.raises(ZeroDivisionError):
        store.take(None, {"foundation": {}, "working_dir": "/"}, "draft-1", str(top), move=True)  # type: ignore[arg-type]
    monkeypatch.setattr(snapshots, "_MAKING_SECONDS", -1.0)
    store.sweep()
    assert [path.read_text() for path in store.directory.rglob("file")] == ["all there is"]


async def test_the_layers_of_an_image_count_too(provider: LocalProvider, tmp_path: Path) -> None:
    """They are in the same mount as those of the snapshots."""
    layers = [tmp_path / "home" / "local" / "images" / ("x" * 64) / f"{number:02}" for number in range(36)]
    for layer in layers:
        layer.mkdir(parents=True)
    prerequisites = provider._prerequisites
    host = prerequisites._base

    def base(image: str | None) -> BaseLayers:
        below = host(image)
        return replace(below, root=(*below.root, *map(str, layers)))

    prerequisites._base = base  # type: ignore[method-assign]
    taken = None
    for _ in range(40):
        made = (await provider.create(spec(snapshot=taken))).sandbox_id
        taken = await provider.snapshot_and_destroy(made, "x")


FEW = """
import os, resource, sys
from pathlib import Path
from lowtide.trees.join import join_trees
from lowtide.trees.remove import remove_tree
top = Path(sys.argv[1])
for layer in "ab":
    (top / layer).mkdir()
(top / "b" / "deep").touch()
here, name = os.open(top / "a", os.O_RDONLY), "deep"
for _ in range(300):
    os.mkdir(name, dir_fd=here)
    below = os.open(name, os.O_RDONLY, dir_fd=here)
    os.close(here)
    here, name = below, "d"
os.close(here)
before = os.listdir("/proc/self/fd")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
join_trees([str(top / "a"), str(top / "b")], str(top / "joined"))
assert (top / "joined" / "deep").is_file()
resource.setrlimit(resource.RLIMIT_NOFILE, (10, 64))
try:
    remove_tree(top / "a")
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
assert os.listdir("/proc/self/fd") == before, os.listdir("/proc/self/fd")
remove_tree(top / "a")
"""


def test_deep_layers_with_few_descriptors_and_none_is_left_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_snapshot_that_is_deleted_while_it_is_joined_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = snapshots.SnapshotStore(tmp_path / "snapshots", None)
    for chain in (["a"], ["a", "b"]):
        (store.directory / chain[-1] / "root").mkdir(parents=True)
        manifest = {"base": "host", "snapshots": chain, "working_dir": "/"}
        (store.directory / chain[-1] / "manifest.json").write_text(json.dumps(manifest))

    def join(layers: list[str], target: str) -> None:
        assert store.delete("b", tmp_path / "sandboxes")
        join_trees(layers, target)

    monkeypatch.setattr(snapshots, "_MOST_BYTES", 0)
    monkeypatch.setattr(snapshots, "join_trees", join)
    with pytest.raises(SandboxNotFoundError, match="deleted meanwhile"):
        store.base_layers("b", lambda _: BaseLayers(root=("/",), record={"base": "host"}))
    assert os.listdir(store.directory) == ["a"]
