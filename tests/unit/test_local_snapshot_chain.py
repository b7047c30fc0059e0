"""Snapshots of sandboxes made from snapshots, more of them than one mount can hold: their layers are joined."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxUnavailableError
from lowtide.machine import home
from lowtide.providers.local import create, snapshots
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.providers.local.python_trees import ReadOnlyTree
from lowtide.trees.join import join_trees
from lowtide.trees.remove import remove_tree

SECONDS = 60

# Each is a layer. What the base has and what an earlier layer has made is deleted, replaced by another kind, and made again.
STEPS = [
    "mkdir -p /d/a/b /usr/local/x && echo 1 >/d/a/b/one && echo 2 >/d/two && ln -s two /d/link && ln /d/two /d/twin",
    "rm -rf /d/a && echo file >/d/a && echo changed >>/d/two && chmod 700 /d && rm -rf /etc/profile.d /usr/local/x",
    "rm /d/a && mkdir /d/a && echo new >/d/a/new && mkdir /etc/profile.d && echo mine >/etc/profile.d/mine",
    "mkdir -p /d/deep/er && chmod 555 /d/deep && touch -d @1000 /d/deep/er && rm /d/link && mkfifo /d/link",
    "rm -f /etc/hostname; mkdir -p /etc/hostname && echo in >/etc/hostname/in && mv /d/two /d/three && rm /d/twin",
    "echo more >/d/deep/er/more && rm -rf /d/a && mkdir /d/a && touch -d @2000 /d/a && echo last >/d/twin",
]
WHERE = "/d /etc /usr/local"
LOOK = (
    f"find {WHERE} -type d -printf '%p %y %m %U %G %T@\n' | sort; find {WHERE} -not -type d -printf '%p %y %m %U %G %l %T@ %s\n' | sort;"
    f"find {WHERE} -type f -exec sha256sum {{}} + | sort"
)


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    yield
    kept = home() / "local" / "snapshots"
    for name in os.listdir(kept):
        remove_tree(kept / name)


def chain(steps: list[str]) -> str:
    """The snapshot after all of them."""
    snapshot_id = None
    for step in steps:
        with Sandbox.run(provider="local", snapshot=snapshot_id) as sandbox:
            sandbox.exec(["sh", "-c", step], check=True).result(SECONDS)
            snapshot_id = sandbox.snapshot().result(SECONDS)
    assert snapshot_id is not None
    return snapshot_id


def look(snapshot_id: str) -> str:
    with Sandbox.run(provider="local", snapshot=snapshot_id) as sandbox:
        return sandbox.exec(["sh", "-c", LOOK], check=True).result(SECONDS).stdout


@pytest.mark.usefixtures("nothing_kept")
def test_joined_layers_show_what_they_showed(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_id = chain(STEPS)
    joined = home() / "local" / "snapshots" / snapshot_id / "joined"
    shown = look(snapshot_id)
    assert "/d/a d 755" in shown
    assert not joined.exists()
    monkeypatch.setattr(snapshots, "_MOST_BYTES", 0)
    assert look(snapshot_id).splitlines() == shown.splitlines()
    assert joined.is_dir()
    # Also under what is made from it, and joined with that again.
    with Sandbox.run(provider="local", snapshot=snapshot_id) as sandbox:
        sandbox.exec(
            ["sh", "-c", "chmod 755 /d/deep && rm -rf /d/deep && echo 7 >/d/three"], check=True
        ).result(SECONDS)
        above = sandbox.snapshot().result(SECONDS)
    left = [line for line in look(above).splitlines() if "/d/three" in line or "/d/deep" in line]
    assert [line.split()[1] for line in left if line.startswith("/d/")] == ["f"]


@pytest.mark.usefixtures("nothing_kept")
def test_more_snapshots_on_each_other_than_a_mount_can_hold() -> None:
    """In directories that lowtide makes in each layer, because this Python is below them, and in those that it does not."""
    places = ("/root", "/srv", "/tmp/new", "/")
    steps = [
        "; ".join(f"mkdir -p {at}; echo {n} >{at}/{n}; rm -f {at}/{n - 3}" for at in places)
        for n in range(70)
    ]
    before = _listed(None, places)  # with what leads to this Python: a virtual environment may be in /root
    after = _listed(chain(steps), places)
    for at in places:
        assert after[at] == sorted([*before[at], "67", "68", "69"]), at


def _listed(snapshot_id: str | None, places: tuple[str, ...]) -> dict[str, list[str]]:
    with Sandbox.run(provider="local", snapshot=snapshot_id) as sandbox:
        found = {}
        for at in places:
            for name in ("67", "68", "69") if snapshot_id else ():
                assert sandbox.read_file(f"{at}/{name}").result(SECONDS) == f"{name}\n".encode()
            listed = sandbox.exec(["sh", "-c", f"mkdir -p {at}; ls -A {at}"], check=True).result(SECONDS)
            found[at] = sorted(listed.stdout.split())
        return found


@pytest.mark.usefixtures("nothing_kept")
def test_layers_that_cannot_be_joined_are_said_to_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_id = chain(STEPS[:2])

    def full(layers: list[str], target: str) -> None:
        Path(target).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "_MOST_BYTES", 0)
    monkeypatch.setattr(snapshots, "join_trees", full)
    with pytest.raises(SandboxUnavailableError, match="No space left on device"):
        Sandbox.run(provider="local", snapshot=snapshot_id)
    monkeypatch.undo()
    assert not [name for name in os.listdir(home() / "local" / "snapshots") if name.startswith(".")]
    look(snapshot_id)


def test_what_a_joined_directory_hid_stays_hidden(tmp_path: Path) -> None:
    """A file over a directory of the base, then a directory again: without its mark the base's files would be back."""
    below, above, joined = tmp_path / "below", tmp_path / "above", tmp_path / "joined"
    below.mkdir()
    above.mkdir()
    (below / "name").write_text("file")
    (above / "name").mkdir(mode=0o500)
    join_trees([str(below), str(above)], str(joined))
    assert os.getxattr(joined / "name", "user.overlay.opaque") == b"y"
    assert stat.S_IMODE(os.stat(joined / "name").st_mode) == 0o500
    (tmp_path / "top" / "name").mkdir(parents=True)
    again = tmp_path / "again"
    join_trees([str(joined), str(tmp_path / "top")], str(again))
    assert os.getxattr(again / "name", "user.overlay.opaque") == b"y"


JOINS = """
import sys, time
from pathlib import Path
from lowtide.providers.local import snapshots
store = snapshots.SnapshotStore(Path(sys.argv[1]), None)
def stand_still(layers, target):
    Path(target).mkdir()
    print("joining", flush=True)
    time.sleep(1000)
snapshots.join_trees = stand_still
for name in "ab":
    (store.directory / name / "root").mkdir(parents=True)
store._join(["a", "b"])
"""


def test_what_a_killed_process_began_is_removed_and_what_a_living_one_makes_is_not(tmp_path: Path) -> None:
    kept = tmp_path / "snapshots"
    store = snapshots.SnapshotStore(kept, None)
    with subprocess.Popen([sys.executable, "-c", JOINS, str(kept)], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"joining\n"
        with store._draft("draft") as alive:
            (kept / ".gone-3" / "root").mkdir(parents=True)
            (joining,) = kept.glob(".joined-*")
            until = time.time() + 60
            while (kept / ".gone-3").exists() and time.time() < until:
                store.sweep()
                time.sleep(0.1)
            assert joining.exists()  # older, and its maker lives
            killed.kill()
            killed.wait()
            store.sweep()
            assert sorted(os.listdir(kept)) == sorted([alive.name, "a", "b"])
    assert sorted(os.listdir(kept)) == ["a", "b"]


def test_the_parents_of_a_mount_point_keep_their_modes(tmp_path: Path) -> None:
    """This Python may live below /tmp: made anew for its mount point, /tmp was not for everybody any more."""
    below, above = tmp_path / "below", tmp_path / "above"
    (below / "tmp").mkdir(parents=True)
    (below / "tmp").chmod(0o1777)
    (below / "home").mkdir()
    (above / "home").mkdir(parents=True)
    (above / "home").chmod(0o750)
    (above / "opt").symlink_to("/etc")
    trees = [ReadOnlyTree(path=path, mask="") for path in ("/tmp/venv/lib", "/home/one/lib", "/opt/venv")]
    layers = BaseLayers(
        root=(str(below), str(above)), read_only=tuple(trees), record={"snapshots": ["above"]}
    )
    modes = create._trees(layers)
    assert (modes["root/tmp"], modes["root/tmp/venv"]) == (0o1777, 0o755)
    assert (modes["root/home"], modes["root/opt"]) == (0o750, 0o755)
    assert list(modes).index("root/tmp") < list(modes).index("root/tmp/venv")
