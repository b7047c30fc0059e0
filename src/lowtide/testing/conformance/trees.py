"""Conformance of whole directories: in and out as they are, and never a step outside."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxFileError
from lowtide.testing.conformance.base import ANSWER_SECONDS, Conformance, sh
from lowtide.testing.conformance.files import NAMES


class TreesConformance(Conformance):
    def test_a_tree_comes_back_as_it_went(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        source = tmp_path / "source"
        _plant(source)
        box.upload(source, f"{place}/tree").result(ANSWER_SECONDS)
        box.download(f"{place}/tree", tmp_path / "back").result(ANSWER_SECONDS)
        assert _picture(tmp_path / "back") == _picture(source)

    def test_commands_see_an_uploaded_tree(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        source = tmp_path / "source"
        _plant(source)
        box.upload(source, f"{place}/tree").result(ANSWER_SECONDS)
        assert sh(box, f"{place}/tree/bin/run") == "ran\n"
        assert sh(box, f"cat {place}/tree/link") == "hello\n"
        assert sh(box, f"ls -A {place}/tree/empty") == ""

    def test_a_tree_into_a_directory_that_is_there_adds_to_it(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "new").write_text("new")
        box.write_file(f"{place}/tree/old", b"old").result(ANSWER_SECONDS)
        box.upload(tmp_path / "one", f"{place}/tree").result(ANSWER_SECONDS)
        assert sh(box, f"cat {place}/tree/old {place}/tree/new") == "oldnew"

    def test_an_empty_tree(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        box.upload(tmp_path / "empty", f"{place}/tree").result(ANSWER_SECONDS)
        box.download(f"{place}/tree", tmp_path / "back").result(ANSWER_SECONDS)
        assert _picture(tmp_path / "back") == {}

    def test_a_tree_with_two_thousand_files(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.mkdir()
        for n in range(2000):
            (source / f"{n:04}").write_text(str(n))
        box.upload(source, f"{place}/tree").result(ANSWER_SECONDS)
        assert sh(box, f"ls {place}/tree | wc -l").strip() == "2000"
        box.download(f"{place}/tree", tmp_path / "back").result(ANSWER_SECONDS)
        assert _picture(tmp_path / "back") == _picture(source)

    def test_links_that_lead_out_of_a_downloaded_tree_do_not_reach_this_machine(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        secret = tmp_path / "secret"
        secret.write_text("this machine's")
        sh(
            box,
            f"mkdir -p {place}/t/sub && cd {place}/t && echo inside > sub/f"
            f" && ln -s {secret} absolute && ln -s ../../../../../../../../../etc/passwd up"
            " && ln -s sub/f fine && ln -s /etc etc",
        )
        target = tmp_path / "out" / "tree"
        target.parent.mkdir()
        box.download(f"{place}/t", target).result(ANSWER_SECONDS)
        assert (target / "sub" / "f").read_text() == "inside\n"
        root = target.resolve()
        for path in target.rglob("*"):
            assert path.resolve().is_relative_to(root), f"{path} leads out of the tree"
        assert secret.read_text() == "this machine's"
        assert [entry.name for entry in target.parent.iterdir()] == ["tree"]

    def test_devices_and_pipes_in_a_tree_do_not_reach_this_machine(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        sh(box, f"mkdir {place}/t && cd {place}/t && mkfifo pipe && echo x > file")
        box.download(f"{place}/t", tmp_path / "back").result(ANSWER_SECONDS)
        kinds = {path.name: path.lstat().st_mode for path in (tmp_path / "back").iterdir()}
        assert (tmp_path / "back" / "file").read_text() == "x\n"
        assert all(stat.S_ISREG(mode) for mode in kinds.values()), kinds

    def test_a_downloaded_tree_has_no_set_id_bits_and_says_so(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        sh(box, f"mkdir -p {place}/t/shared {place}/t/tmp && cp /bin/sh {place}/t/shell")
        sh(box, f"cd {place}/t && chmod 6755 shell && chmod 2755 shared && chmod 1777 tmp")
        with _umask(0o000):
            moved = box.download(f"{place}/t", tmp_path / "back").result(ANSWER_SECONDS)
        assert _modes(tmp_path / "back") == {"shell": 0o755, "shared": 0o755, "tmp": 0o1777}
        assert sorted(moved.stripped) == ["shared", "shell"]

    def test_a_download_applies_the_umask_of_this_process(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        sh(box, f"mkdir -p {place}/t/open {place}/t/tmp && cd {place}/t && echo x > file && echo x > run")
        sh(box, f"cd {place}/t && chmod 777 open run && chmod 666 file && chmod 1777 tmp")
        with _umask(0o027):
            box.download(f"{place}/t", tmp_path / "t" / "all").result(ANSWER_SECONDS)
            box.download(f"{place}/t/run", tmp_path / "t" / "run").result(ANSWER_SECONDS)
        assert _modes(tmp_path / "t" / "all") == {"open": 0o750, "tmp": 0o1750, "file": 0o640, "run": 0o750}
        assert _modes(tmp_path / "t") == {"all": 0o750, "run": 0o750}

    def test_a_missing_tree_leaves_nothing_here(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        with pytest.raises(SandboxFileError):
            box.download(f"{place}/missing", tmp_path / "back").result(ANSWER_SECONDS)
        assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}


def _plant(root: Path) -> None:
    """A tree with everything that makes trees hard."""
    (root / "a" / "deep" / "er").mkdir(parents=True)
    (root / "a" / "deep" / "er" / "file").write_bytes(os.urandom(70_000))
    (root / "empty").mkdir()
    (root / "zero").touch()
    (root / "hello").write_text("hello\n")
    (root / "link").symlink_to("hello")
    (root / "a" / "up").symlink_to("../hello")
    (root / "bin").mkdir()
    (root / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (root / "bin" / "run").chmod(0o755)
    for name in NAMES:
        (root / "names" / name).mkdir(parents=True)
        (root / "names" / name / name).write_text(name)
    (root / ("n" * 120)).write_text("a long name")
    (root / ("p" * 100) / ("q" * 100)).mkdir(parents=True)
    (root / ("p" * 100) / ("q" * 100) / "long path").write_text("x")


def _picture(root: Path) -> dict[str, tuple[str, object]]:
    """Everything about a tree that must survive a transfer."""
    picture: dict[str, tuple[str, object]] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            picture[name] = ("link", os.readlink(path))
        elif path.is_dir():
            picture[name] = ("directory", None)
        else:
            picture[name] = ("x" if path.stat().st_mode & 0o100 else "-", path.read_bytes())
    return picture
