"""Archives from a hostile sandbox: nothing is written outside, nothing is followed, the rest arrives."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import archive
from lowtide.trees import tar_stream, unpack


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
