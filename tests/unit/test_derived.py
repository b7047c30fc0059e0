"""Derived file operations, with a real shell, on names and contents nobody would choose."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lowtide.engine import engine
from lowtide.errors import (
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
)
from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers import derived, registry
from lowtide.providers.base import Labels, Provider, SandboxSpec
from lowtide.providers.optional import FileKind

T = TypeVar("T")


class Place:
    """A sandbox that can only run commands, which here run on this machine, in a directory of the test."""

    def __init__(self, provider: Provider, sandbox_id: str) -> None:
        self.provider = provider
        self.sandbox_id = sandbox_id
        self.files = derived.DerivedFiles(provider)
        self.trees = derived.DerivedTrees(provider)


def run(work: Coroutine[Any, Any, T]) -> T:
    return engine().run(work, timeout=120)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    provider = registry.provider("faulty", directory=str(tmp_path / "service"))
    labels = Labels(lease_id=new_lease_id(), ledger_id="test", owner="test")
    return Place(provider, run(provider.create(SandboxSpec(labels=labels))).sandbox_id)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here"
    path.mkdir()
    return path


NAMES = [
    "plain",
    "with space",
    "new\nline",
    "-rf",
    "*",
    "$(id)",
    "ünïcode",
    ".hidden",
    "..two",
    "trailing\n",
    "'q\"",
    "\\n",
]


def test_a_directory_is_listed_whatever_its_names_are(place: Place, here: Path) -> None:
    for name in NAMES:
        (here / name).write_text(name)
    (here / "dir").mkdir()
    (here / "link").symlink_to("odd\ntarget\n")
    found = {entry.name: entry for entry in run(place.files.list_dir(place.sandbox_id, str(here)))}
    assert sorted(found) == sorted([*NAMES, "dir", "link"])
    for name in NAMES:
        entry = found[name]
        assert (entry.kind, entry.size, entry.path) == (FileKind.FILE, len(name.encode()), f"{here}/{name}")
    assert found["dir"].kind is FileKind.DIRECTORY
    assert (found["link"].kind, found["link"].target) == (FileKind.SYMLINK, "odd\ntarget\n")


def test_an_empty_and_a_very_full_directory_are_listed(place: Place, here: Path) -> None:
    assert list(run(place.files.list_dir(place.sandbox_id, str(here)))) == []
    for number in range(3000):
        (here / f"{number:0>200}").touch()
    assert len(run(place.files.list_dir(place.sandbox_id, str(here)))) == 3000


def test_stat_describes_a_link_itself(place: Place, here: Path) -> None:
    (here / "file").write_bytes(b"12345")
    (here / "file").chmod(0o640)
    (here / "link").symlink_to("file")
    entry = run(place.files.stat(place.sandbox_id, f"{here}/file"))
    assert (entry.name, entry.kind, entry.size, entry.mode) == ("file", FileKind.FILE, 5, 0o640)
    assert abs((entry.modified_at or 0).timestamp() - os.stat(here / "file").st_mtime) < 2  # type: ignore[union-attr]
    assert run(place.files.stat(place.sandbox_id, f"{here}/link")).target == "file"
    assert run(place.files.stat(place.sandbox_id, "/")).kind is FileKind.DIRECTORY


def test_what_goes_wrong_has_the_error_people_expect(place: Place, here: Path) -> None:
    (here / "file").touch()
    (here / "full").mkdir()
    (here / "full" / "x").touch()
    files, box = place.files, place.sandbox_id
    cases: list[tuple[Coroutine[Any, Any, Any], type[SandboxFileError]]] = [
        (files.stat(box, f"{here}/none"), SandboxFileNotFoundError),
        (files.stat(box, f"{here}/file/x"), SandboxNotADirectoryError),
        (files.list_dir(box, f"{here}/none"), SandboxFileNotFoundError),
        (files.list_dir(box, f"{here}/file"), SandboxNotADirectoryError),
        (files.make_dir(box, f"{here}/file"), SandboxFileExistsError),
        (files.remove(box, f"{here}/none", recursive=True), SandboxFileNotFoundError),
        (files.remove(box, f"{here}/full", recursive=False), SandboxFileError),
        (collected(derived.read_file(place.provider, box, f"{here}/none")), SandboxFileNotFoundError),
        (collected(derived.read_file(place.provider, box, f"{here}/full")), SandboxIsADirectoryError),
        (derived.write_file(place.provider, box, f"{here}/full", chunks(b"x")), SandboxIsADirectoryError),
        (collected(place.trees.read_tree(box, f"{here}/none")), SandboxFileNotFoundError),
    ]
    for work, kind in cases:
        with pytest.raises(SandboxFileError) as caught:
            run(work)
        assert type(caught.value) is kind, caught.value
        assert caught.value.path is not None


def test_directories_are_made_with_parents_and_removed_as_asked(place: Place, here: Path) -> None:
    files, box = place.files, place.sandbox_id
    for _ in range(2):
        run(files.make_dir(box, f"{here}/a/b\nc/d"))
    assert (here / "a" / "b\nc" / "d").is_dir()
    run(files.remove(box, f"{here}/a/b\nc/d", recursive=False))
    (here / "a" / "link").symlink_to(here)
    run(files.remove(box, f"{here}/a/link", recursive=True))
    assert here.is_dir()
    run(files.remove(box, f"{here}/a", recursive=True))
    assert list(here.iterdir()) == []


def test_files_go_in_and_out_whole(place: Place, here: Path) -> None:
    data = os.urandom(3_000_000)
    path = f"{here}/new/-odd\nname"
    assert run(derived.write_file(place.provider, place.sandbox_id, path, chunks(data), mode=0o600)) == len(
        data
    )
    assert run(collected(derived.read_file(place.provider, place.sandbox_id, path))) == data
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert run(derived.write_file(place.provider, place.sandbox_id, path, chunks(b""))) == 0
    assert run(collected(derived.read_file(place.provider, place.sandbox_id, path))) == b""


def test_trees_go_in_and_out(place: Place, here: Path) -> None:
    (here / "a" / "b").mkdir(parents=True)
    (here / "a" / "b" / "new\nline").write_text("x")
    (here / "a" / "link").symlink_to("b")
    stream = run(collected(place.trees.read_tree(place.sandbox_id, f"{here}/a")))
    run(place.trees.write_tree(place.sandbox_id, f"{here}/copy/deep", chunks(stream)))
    assert (here / "copy" / "deep" / "b" / "new\nline").read_text() == "x"
    assert (here / "copy" / "deep" / "link").readlink() == Path("b")
    with pytest.raises(SandboxFileError):
        run(place.trees.write_tree(place.sandbox_id, f"{here}/bad", chunks(b"this is no archive" * 1000)))


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 65_536):
        yield data[start : start + 65_536]


async def collected(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in stream])
