"""Archives from a hostile sandbox: nothing is written outside, nothing is followed, the rest arrives."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide import archive
from lowtide.trees import pack, tar_stream, unpack
from lowtide.trees.copy import copy_tree
from lowtide.trees.pack import Pack
from lowtide.trees.remove import remove_tree
from lowtide.trees.walk import TooLarge


def member(name: str, data: bytes | None = None, **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data or b"")
    info.mode = 0o644
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, data or b""


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


def stream(*members: tuple[tarfile.TarInfo, bytes]) -> Iterator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    raw = buffer.getvalue()
    yield from (raw[start : start + 700] for start in range(0, len(raw), 700))


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("untouched")
    path = tmp_path / "inside"
    path.mkdir()
    return path


def everything(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_an_ordinary_tree_arrives_whole(inside: Path) -> None:
    tree = archive.unpack(
        stream(
            member("./", type=tarfile.DIRTYPE, mode=0o755),
            member("./d/e", b"data", mode=0o755),
            link("./d/up", "../f"),
            link("./d/hard", "./d/e", tarfile.LNKTYPE),
            member("new\nline \udcff", b"x"),
        ),
        str(inside),
    )
    assert tree == archive.Tree(3, 5, ())
    assert (inside / "d" / "e").read_bytes() == b"data"
    assert (inside / "d" / "e").stat().st_mode & 0o777 == 0o755
    assert (inside / "d" / "up").readlink() == Path("../f")
    assert os.path.samefile(inside / "d" / "hard", inside / "d" / "e")


@pytest.mark.parametrize(
    "members",
    [
        [member("../secret", b"owned")],
        [member("a/../../secret", b"owned")],
        [link("out", "..")],
        [link("out", "/etc/passwd")],
        [link("d/out", "../../secret")],
        [link("x", "."), link("y", "x/x/../../secret")],
        [link("hard", "../secret", tarfile.LNKTYPE)],
        [member("device", type=tarfile.CHRTYPE), member("pipe", type=tarfile.FIFOTYPE)],
    ],
)
def test_what_would_lead_out_is_left_out_and_named(
    inside: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    tree = archive.unpack(stream(*members, member("fine", b"1")), str(inside))
    assert tree.skipped
    assert "fine" in everything(inside)
    for path in inside.rglob("*"):
        assert path.resolve().is_relative_to(inside)
    assert (inside.parent / "secret").read_text() == "untouched"
    assert everything(inside.parent) - {f"inside/{name}" for name in everything(inside)} == {
        "secret",
        "inside",
    }


def test_nothing_is_written_through_a_link(inside: Path) -> None:
    tree = archive.unpack(stream(link("d", "."), member("d/file", b"x"), member("d", b"y")), str(inside))
    assert (inside / "d").is_dir()
    assert not (inside / "d").is_symlink()
    assert (inside / "d" / "file").read_bytes() == b"x"
    assert set(tree.skipped) == {"d"}


def test_an_absolute_name_lands_inside(inside: Path) -> None:
    archive.unpack(stream(member("/etc/motd", b"x")), str(inside))
    assert (inside / "etc" / "motd").read_bytes() == b"x"


def test_special_bits_are_dropped(inside: Path) -> None:
    archive.unpack(stream(member("tool", b"x", mode=0o6755), member("none", b"x", mode=0)), str(inside))
    assert (inside / "tool").stat().st_mode & 0o7777 == 0o755
    assert (inside / "none").stat().st_mode & 0o7777 == 0o600


def test_a_header_that_claims_to_be_huge_is_refused_before_it_is_read(inside: Path) -> None:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 4 << 30

    def endless() -> Iterator[bytes]:
        yield info.tobuf(tarfile.USTAR_FORMAT)
        for _ in range(64):
            yield b"a" * (1 << 20)
        raise AssertionError("it was read on")

    with pytest.raises(tarfile.TarError):
        archive.unpack(endless(), str(inside))


def test_a_broken_stream_is_an_error(inside: Path) -> None:
    for raw in (b"no archive at all" * 100, next(stream(member("x", b"1" * 5000)))[:600]):
        with pytest.raises(tarfile.TarError):
            archive.unpack(iter([raw]), str(inside))


def test_packing_and_unpacking_gives_the_same_tree(tmp_path: Path, inside: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "new\nline").write_bytes(os.urandom(100_000))
    (source / "a" / "link").symlink_to("b")
    os.mkfifo(source / "pipe")
    blocks: list[bytes] = []
    packed = archive.pack(str(source), blocks.append)
    assert (packed.files, packed.bytes, packed.skipped) == (1, 100_000, ("pipe",))
    archive.unpack(blocks, str(inside))
    assert everything(inside) == everything(source) - {"pipe"}


def test_merging_replaces_files_and_follows_no_link(tmp_path: Path) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    for path in (source / "d", target, elsewhere):
        path.mkdir(parents=True)
    (source / "d" / "x").write_text("new")
    (source / "f").write_text("new")
    (target / "f").symlink_to(elsewhere / "f")
    archive.merge(str(source), str(target))
    assert (target / "f").read_text() == "new"
    assert not (elsewhere / "f").exists()
    (source / "d").mkdir(exist_ok=True)
    (source / "d" / "x").write_text("newer")
    (target / "d" / "x").unlink()
    (target / "d").rmdir()
    (target / "d").symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError) as refused:
        archive.merge(str(source), str(target))
    assert (refused.value.errno, refused.value.filename) == (errno.ENOTDIR, str(target / "d"))
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("kind", ["skipped", "link"])
def test_names_without_an_end_fill_no_memory(
    inside: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(unpack, "_MOST_REMEMBERED", 1 << 20)

    def endless() -> Iterator[bytes]:
        for number in range(100_000):
            if kind == "skipped":
                yield tar_stream.mark(tar_stream.SKIPPED, b"n" * 10_000)
            else:
                yield tar_stream.header(b"%d" % number, tar_stream.LINK, 0o777, 0, 0, b"t" * 1000)
        pytest.fail("it was all taken")

    with pytest.raises(tarfile.ReadError, match="memory"):
        archive.unpack(endless(), str(inside))


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def chain(levels: int) -> Iterator[bytes]:
    """Directories in each other, with a file in each, as a sandbox sends them: every name in full."""
    for level in range(1, levels + 1):
        name = b"dd/" * level
        yield tar_stream.header(name, tar_stream.FOLDER, 0o711, 0, 10**18)
        yield tar_stream.header(name + b"f", tar_stream.FILE, 0o600, 0, 0)
    yield tar_stream.END


@pytest.mark.usefixtures("traced")
def test_a_deep_chain_of_directories_takes_linear_time_and_memory(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, opened, real = 1500, 0, os.open

    def counting(*arguments: Any, **keywords: Any) -> int:
        nonlocal opened
        opened += 1
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, "open", counting)
    tree = archive.unpack(chain(levels), str(inside))
    monkeypatch.undo()
    assert tree.files == levels
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    assert opened < 8 * levels
    fd = os.open(inside, os.O_RDONLY)
    for _ in range(levels):  # all of them have got their mode and time
        below = os.open("dd", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        info = os.fstat(fd)
        assert (info.st_mode & 0o777, info.st_mtime_ns) == (0o711, 10**18)
    os.close(fd)
    remove_tree(inside)


def test_directories_come_in_any_order(inside: Path) -> None:
    """From a deep one to its neighbour, up by more than are held open, back down, and through what is a link by then."""
    deep = "/".join("abcdefghijklmnopqrstuvwxyz")
    members = []
    for name in (deep, f"{deep}/1", "a/b/2", f"{deep}/3/4", "5", f"{deep[:-2]}/6", deep):
        members.append(member(f"{name}/", type=tarfile.DIRTYPE, mode=0o750, mtime=1000))
        members.append(member(f"{name}/f-{name.replace('/', '')}", b"x"))
    archive.unpack(stream(*members), str(inside))
    files = {path.name: path for path in inside.rglob("f-*")}
    assert len(files) == 6
    for path in files.values():
        assert path.name == "f-" + "".join(path.relative_to(inside).parts[:-1])
        assert (path.parent.stat().st_mode & 0o777, path.parent.stat().st_mtime) == (0o750, 1000)


def test_an_archive_of_more_than_is_accepted_is_given_up(inside: Path) -> None:
    """By content, and by entries: empty ones fill a disk too."""

    def endless(kind: bytes) -> Iterator[bytes]:
        for number in range(1000):
            name = b"%d" % number
            if kind == b"content":
                yield tar_stream.header(name, tar_stream.FILE, 0o600, 1 << 20, 0) + bytes(1 << 20)
            elif kind == tar_stream.FOLDER:
                yield tar_stream.header(name + b"/", kind, 0o700, 0, 0)
            else:
                yield tar_stream.header(name, kind, 0o600, 0, 0, b"0" if kind != tar_stream.FILE else b"")
        pytest.fail("it was all taken")

    for kind in (b"content", tar_stream.FILE, tar_stream.FOLDER, tar_stream.LINK, tar_stream.HARD_LINK):
        place = inside / str(kind)
        place.mkdir()
        with pytest.raises(TooLarge):
            archive.unpack(endless(kind), str(place), most=1 << 21)
        assert sum(path.lstat().st_size + 4096 for path in place.rglob("*") if path.is_file()) <= 1 << 21


def test_the_umask_applies_to_what_is_unpacked(inside: Path) -> None:
    members = (
        member("d/", type=tarfile.DIRTYPE, mode=0o1777),
        member("d/f", b"x", mode=0o666),
        member("d/run", b"x", mode=0o6777),
    )
    archive.unpack(stream(*members), str(inside), umask=0o027)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in inside.rglob("*")}
    assert modes == {"d": 0o1750, "f": 0o640, "run": 0o750}


NAME = "n" * 200


def linked(top: Path, count: int) -> Path:
    """Files with two names each, a hundred in a directory; names of pipes beside them."""
    for number in range(count):
        folder = top / f"{NAME}{number // 100}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}-a{NAME}").write_text(str(number))
        os.link(folder / f"{number}-a{NAME}", folder / f"{number}-b{NAME}")
        os.mkfifo(folder / f"{number}-c{NAME}")
    return top


@pytest.mark.usefixtures("traced")
def test_names_of_hard_links_and_of_what_is_skipped_are_not_kept(tmp_path: Path, inside: Path) -> None:
    """As a sandbox's tree is packed for a download: one name more each would be 3 MB here, and any number there."""
    source, archived = linked(tmp_path / "source", 3000), tmp_path / "archive"
    with archived.open("wb") as out:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        top = os.open(source, os.O_RDONLY)
        Pack(out.write, marks=True).run(top)
        os.close(top)
        assert tracemalloc.get_traced_memory()[1] - before < 2 << 20
    with archived.open("rb") as file:
        tree = archive.unpack(iter(lambda: file.read(1 << 16), b""), str(inside))
    assert (tree.files, len(tree.skipped)) == (6000, 3000)
    folder = inside / f"{NAME}29"
    assert os.path.samefile(folder / f"2999-a{NAME}", folder / f"2999-b{NAME}")


def test_more_hard_links_than_are_remembered_are_files_of_their_own(
    tmp_path: Path, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    for kind in "ab":
        (source / kind).mkdir(parents=True)
    for number in range(100):  # all first names come before all second ones
        (source / "a" / f"{number}").write_text(str(number))
        os.link(source / "a" / f"{number}", source / "b" / f"{number}")
    monkeypatch.setattr(pack, "_MOST_LINKED", 10_000)
    blocks: list[bytes] = []
    assert archive.pack(str(source), blocks.append).files == 200
    archive.unpack(blocks, str(inside))
    pairs = [(inside / "a" / f"{number}", inside / "b" / f"{number}") for number in range(100)]
    assert all(one.read_text() == other.read_text() == one.name for one, other in pairs)
    assert 0 < sum(os.path.samefile(*pair) for pair in pairs) < 50


@pytest.mark.usefixtures("traced")
def test_a_snapshot_keeps_hard_links_without_keeping_their_names(tmp_path: Path) -> None:
    source, target = linked(tmp_path / "source", 3000), tmp_path / "target"
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    copy_tree(str(source), str(target))
    assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    for number in (0, 2999):
        folder = target / f"{NAME}{number // 100}"
        assert os.path.samefile(folder / f"{number}-a{NAME}", folder / f"{number}-b{NAME}")
        assert (folder / f"{number}-a{NAME}").stat().st_nlink == 2
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
