"""What one emulator has built the next one does not build again, and what is kept is whole, right and bounded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide import machine
from lowtide.emulators import dockerfile, layer_cache
from lowtide.emulators.build import BuildFailed, Built
from lowtide.emulators.layer_cache import LayerCache
from lowtide.trees.remove import remove_tree
from tests.emulators.test_build import building, context, read

IDENTITY = "FROM x\nRUN cat /proc/sys/kernel/random/uuid > /id; rm -rf /etc/terminfo /mnt; mkdir -p /srv/d; ln -s d /srv/l"


async def built(
    home: Path,
    steps: Sequence[dockerfile.Step] | str,
    *,
    place: str = "one",
    show: str = "/id",
    network: str = "none",
    files: bytes = b"",
) -> tuple[str, list[str]]:
    """What an emulator of its own comes to, and its log."""
    said: list[str] = []
    cache = LayerCache(home / "kept")
    async with building(home / place, cache, network) as (backing, builder):
        steps = list(dockerfile.steps(steps)) if isinstance(steps, str) else steps
        made = await builder.build(steps, log=said.append, context=files)
        return await read(backing, made, show), said


def test_a_layer_outlives_the_emulator_that_built_it(tmp_path: Path) -> None:
    async def check() -> None:
        first, said = await built(tmp_path, IDENTITY)
        assert "CACHED\n" not in said
        remove_tree(tmp_path / "one")  # all that the first had
        again, said = await built(tmp_path, f"{IDENTITY}\nRUN cat /id > /more", place="two", show="/more")
        assert (again, said.count("CACHED\n")) == (first, 1)
        third, said = await built(tmp_path, f"{IDENTITY}\nRUN cat /id > /more", place="three", show="/more")
        assert (third, said.count("CACHED\n")) == (first, 2)
        show = "ls -d /etc/terminfo /mnt /srv/l/. 2>&1 | sort; stat -c %a /srv/d"
        what = [await built(tmp_path, f"{IDENTITY}\nRUN ({show}) > /is{n}", show=f"/is{n}") for n in "12"]
        assert what[0][0] == what[1][0]
        assert "/srv/l/." in what[0][0]
        assert "No such file" in what[0][0]

    asyncio.run(check())


def test_a_layer_is_used_only_where_everything_it_was_made_of_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        first, _ = await built(tmp_path, IDENTITY)
        others = [
            await built(tmp_path, IDENTITY, network="allow=example.org"),
            await built(tmp_path, IDENTITY.replace("RUN", "ENV A=b\nRUN", 1)),
            await built(tmp_path, IDENTITY.replace("RUN", "ARG A=b\nRUN", 1)),
            await built(tmp_path, IDENTITY.replace("RUN", "COPY a /a\nRUN", 1), files=context(a="1")),
            await built(tmp_path, IDENTITY.replace("RUN", "COPY a /a\nRUN", 1), files=context(a="2")),
        ]
        monkeypatch.setattr(layer_cache, "_INSTALLED", (str(tmp_path),))  # something else is installed here
        others.append(await built(tmp_path, IDENTITY))
        assert len({first, *(found for found, _ in others)}) == 7
        assert not any("CACHED\n" in said for _, said in others)

    asyncio.run(check())


def test_what_failed_saw_secrets_or_stands_on_something_else_is_not_kept(tmp_path: Path) -> None:
    async def check() -> None:
        with pytest.raises(BuildFailed):
            await built(tmp_path, "FROM x\nRUN echo begun > /begun; exit 3")
        before = len(LayerCache(tmp_path / "kept").layers())
        secret = [replace(one, secret=True) for one in dockerfile.steps(IDENTITY)]
        await built(tmp_path, [*secret, *dockerfile.steps("RUN true")])
        fresh = [replace(one, fresh="1") for one in dockerfile.steps(IDENTITY)]
        await built(tmp_path, fresh)
        async with building(tmp_path / "two", LayerCache(tmp_path / "kept")) as (backing, builder):
            taken = await backing.stop(await backing.create())
            made = await builder.build(
                dockerfile.steps("RUN true"), log=lambda text: None, below=Built(snapshot=taken)
            )
            assert made.own
        assert len(LayerCache(tmp_path / "kept").layers()) == before

    asyncio.run(check())


def test_two_emulators_that_build_the_same_at_once_both_have_it(tmp_path: Path) -> None:
    async def check() -> None:
        found = await asyncio.gather(*(built(tmp_path, IDENTITY, place=name) for name in ("a", "b")))
        assert all(found)
        third, said = await built(tmp_path, IDENTITY, place="c")
        assert third in {one for one, _ in found}
        assert "CACHED\n" in said
        assert not [
            path for path in (tmp_path / "kept").iterdir() if path.name.startswith((".draft", ".gone"))
        ]

    asyncio.run(check())


def test_the_least_recently_used_go_and_who_stands_on_them_notices_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        cache = LayerCache(tmp_path / "kept")
        async with building(tmp_path / "one", cache) as (backing, builder):
            recipe = "FROM x\nRUN head -c 3000000 /dev/urandom > /large; echo held > /id"
            held = await builder.build(dockerfile.steps(recipe), log=lambda text: None)
            small = LayerCache(tmp_path / "kept", 4_000_000)
            snapshot = backing.provider.snapshots.directory / str(held.snapshot)
            os.utime(snapshot)
            await builder.build(dockerfile.steps(f"{recipe}; true"), log=lambda text: None)
            assert len(cache.layers()) == 3
            gone = small.make_room(4_000_000)
            assert [one.size_bytes > 3_000_000 for one in gone][-1:] == [True]
            assert sum(one.size_bytes for one in cache.layers()) <= 4_000_000
            assert cache.make_room(0)
            assert cache.layers() == []
            assert await read(backing, held, "/id") == "held\n"
            assert os.listdir(tmp_path / "kept") == [".lock"]

    asyncio.run(check())


def test_after_a_power_cut_only_what_had_reached_the_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        first, _ = await built(tmp_path, IDENTITY)
        monkeypatch.setattr(machine, "boot_id", lambda: "the next one")
        again, said = await built(tmp_path, IDENTITY)
        assert again == first
        assert "CACHED\n" in said
        for mark in (tmp_path / "kept").glob("*/on-disk"):
            mark.unlink()
        again, said = await built(tmp_path, IDENTITY)
        assert again != first
        assert "CACHED\n" not in said
        assert (await built(tmp_path, IDENTITY))[
            0
        ] == again  # kept in the place of what was of no use any more

    asyncio.run(check())


KILLED = """
import sys
from pathlib import Path
from lowtide.emulators.layer_cache import LayerCache
sys.stdout.write("ready\\n"); sys.stdout.flush()
cache, source = LayerCache(Path(sys.argv[1])), Path(sys.argv[2])
number = 0
while True:
    number += 1
    cache.keep(f"{number:064x}", source)
"""


def test_a_kill_in_the_midst_leaves_no_half_layer(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(300):
        (source / "root" / f"d{number}").mkdir(parents=True)
        (source / "root" / f"d{number}" / "f").write_text("content")
    (source / "manifest.json").write_text(
        json.dumps({"working_dir": "/root", "snapshots": [], "base": "host"})
    )
    kept = tmp_path / "kept"
    for _ in range(4):
        keeper = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(kept), str(source)], stdout=subprocess.PIPE, text=True
        )
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ready\n"
        while not list(kept.glob(".draft-*/root/d1*")):
            assert keeper.poll() is None
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()
        keeper.stdout.close()
    cache = LayerCache(kept)
    for one in cache.layers():
        assert len(list((kept / one.key / "root").glob("*/f"))) == 300
    cache.make_room(1 << 40)
    assert not [path for path in kept.iterdir() if path.name.startswith(".draft")]


def test_a_layer_of_many_empty_files_and_directories_counts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(100):
        (source / "root" / f"d{number}").mkdir(parents=True)
        (source / "root" / f"d{number}" / "f").touch()
    (source / "manifest.json").write_text(json.dumps({"working_dir": "/root"}))
    LayerCache(tmp_path / "kept", most_bytes=100_000).keep("0" * 64, source)
    assert LayerCache(tmp_path / "kept").layers() == []
    LayerCache(tmp_path / "kept", most_bytes=1_000_000).keep("0" * 64, source)
    assert [one.size_bytes for one in LayerCache(tmp_path / "kept").layers()] == [201 * 1024]


def test_a_disk_that_is_full_fails_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def check() -> None:
        monkeypatch.setattr(layer_cache, "copy_tree", full)
        first, _ = await built(tmp_path, IDENTITY)
        assert first
        assert LayerCache(tmp_path / "kept").layers() == []

    asyncio.run(check())
