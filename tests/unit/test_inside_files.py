"""Files and trees through the program inside, which runs here."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.inside_program import serving

from lowtide import archive
from lowtide.errors import (
    ResourceExhaustedError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
)
from lowtide.providers.inside import Channel, Client, Clients, files
from lowtide.providers.inside.calls import Calls
from lowtide.providers.inside.forward import Forward
from lowtide.providers.optional import FileKind
from lowtide.trees import tar_stream

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as inside:
        yield inside.client()


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def _all(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in stream])


@pytest.mark.parametrize("sync", [False, True])
async def test_a_file_there_and_back(client: Client, tmp_path: Path, sync: bool) -> None:
    path, data = tmp_path / "new" / "file", os.urandom(3_000_000)
    assert (
        await files.write_file(client, str(path), _chunks(data, b"", b"x"), mode=0o640, sync=sync)
        == 3_000_001
    )
    assert path.read_bytes() == data + b"x"
    assert path.stat().st_mode & 0o7777 == 0o640
    assert await _all(files.read_file(client, str(path))) == data + b"x"
    assert os.listdir(path.parent) == ["file"]


async def test_who_reads_meanwhile_sees_the_old_or_the_new(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old" * 1000)
    seen = set()

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(20):
            seen.add(path.read_bytes())
            yield b"n" * 1000

    await files.write_file(client, str(path), slowly())
    assert seen == {b"old" * 1000}
    assert path.read_bytes() == b"n" * 20_000


async def test_a_write_that_is_given_up_leaves_the_old_file_and_nothing_else(
    client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    async def fails() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        await files.write_file(client, str(path), fails())
    with pytest.raises(SandboxFileError, match="announced"):
        await files.write_file(client, str(path), _chunks(b"new"), size=9)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
async def test_a_full_disk_leaves_the_old_file(client: Client, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)
    )
    if await mounting.wait():
        pytest.skip("this machine mounts no tmpfs")
    try:
        (disk / "file").write_bytes(b"old")
        with pytest.raises(ResourceExhaustedError, match="no space"):
            await files.write_file(client, str(disk / "file"), _chunks(b"x" * 500_000))
        assert (disk / "file").read_bytes() == b"old"
        assert os.listdir(disk) == ["file"]
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(disk))).wait()


async def test_a_link_is_followed_and_stays_one(client: Client, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    await files.write_file(client, str(tmp_path / "link"), _chunks(b"new"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    entry = await files.stat(client, str(tmp_path / "link"))
    assert (entry.kind, entry.target) == (FileKind.SYMLINK, "real")


async def test_what_goes_wrong_has_the_type_people_expect(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SandboxFileNotFoundError):
        await _all(files.read_file(client, str(tmp_path / "none")))
    with pytest.raises(SandboxIsADirectoryError):
        await _all(files.read_file(client, str(tmp_path)))
    with pytest.raises(SandboxNotADirectoryError):
        await files.list_dir(client, str(tmp_path / "file"))
    with pytest.raises(SandboxNotADirectoryError):
        await files.write_file(client, str(tmp_path / "file" / "x"), _chunks(b""))
    with pytest.raises(SandboxFileError, match="not empty"):
        await files.remove(client, str(tmp_path), recursive=False)


async def test_listing_making_and_removing(client: Client, tmp_path: Path) -> None:
    await files.make_dir(client, str(tmp_path / "a" / "b" / ""))
    for number in range(700):
        (tmp_path / "a" / f"n{number}\n\udcff").write_bytes(b"x" * number)
    entries = await files.list_dir(client, str(tmp_path / "a"))
    assert len(entries) == 701
    assert {entry.size for entry in entries if entry.kind is FileKind.FILE} == set(range(700))
    await files.remove(client, str(tmp_path / "a"), recursive=True)
    assert os.listdir(tmp_path) == []


async def test_a_tree_there_and_back(client: Client, tmp_path: Path) -> None:
    deep = "d" * 60 + "/" + "e" * 60 + "/" + "f" * 200
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as tar:
        for name, data, mode in (("plain", b"p" * 1000, 0o644), (deep, b"deep", 0o600), ("run", b"", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, 1_000_000
            tar.addfile(entry, io.BytesIO(data))
        closed = tarfile.TarInfo("closed")
        closed.type, closed.mode = tarfile.DIRTYPE, 0o555
        tar.addfile(closed)
        inner = tarfile.TarInfo("closed/inner")
        inner.size = 3
        tar.addfile(inner, io.BytesIO(b"abc"))
        for kind, name, target in ((tarfile.SYMTYPE, "link", "x" * 150), (tarfile.LNKTYPE, "hard", "plain")):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            tar.addfile(entry)
    await files.write_tree(client, str(tmp_path / "t"), _chunks(source.getvalue()))
    top = tmp_path / "t"
    assert (top / deep).read_bytes() == b"deep"
    assert (top / "closed").stat().st_mode & 0o777 == 0o555
    assert (top / "closed/inner").read_bytes() == b"abc"
    assert os.readlink(top / "link") == "x" * 150
    assert (top / "hard").stat().st_ino == (top / "plain").stat().st_ino
    assert (top / "plain").stat().st_mtime == 1_000_000
    packed = await _all(files.read_tree(client, str(top)))
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        names = {member.name.removeprefix("./"): member for member in tar.getmembers()}
        assert {deep, "plain", "run", "closed", "closed/inner", "link", "hard", "."} <= set(names)
        member = tar.extractfile(names[deep])
        assert member is not None
        assert member.read() == b"deep"
        assert names["run"].mode == 0o755
        assert names["link"].linkname == "x" * 150


async def test_names_of_one_file_and_its_exact_time_are_packed(client: Client, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    (source / "a").write_text("x" * 300_000)
    os.link(source / "a", source / "d" / "b")
    for path, moment in (("a", 981_173_106_789_012_345), ("d", -1_500_000_001)):
        os.utime(source / path, ns=(moment, moment))
    await files.write_tree(client, str(target), files.read_tree(client, str(source)))
    assert (target / "a").samefile(target / "d" / "b")
    assert (target / "a").stat().st_mtime_ns == 981_173_106_789_012_345
    assert (target / "d").stat().st_mtime_ns == -1_500_000_001
    entry = await files.stat(client, str(target / "a"))
    assert entry.modified_at is not None
    assert entry.modified_at.microsecond == 789_012
    await files.write_file(client, str(target / "a"), _chunks(b""), modified=-1.5)
    assert (target / "a").stat().st_mtime_ns == -1_500_000_000


async def test_a_file_that_says_another_size_than_it_has_is_not_padded(client: Client) -> None:
    """The kernel's own: 0 in /proc, a whole page in /sys."""
    for place in ("/proc/sys/kernel/random", "/sys/kernel/mm/transparent_hugepage"):
        if not os.path.exists(place):
            continue
        packed = await _all(files.read_tree(client, place))
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            found = {member.name: member.size for member in tar if member.isfile()}
        steady = [name for name in ("./boot_id", "./poolsize", "./enabled", "./defrag") if name in found]
        assert steady
        for name in steady:
            with open(os.path.join(place, name), "rb") as file:
                assert found[name] == len(file.read()) > 0


async def test_a_file_of_the_kernels_that_cannot_be_read_is_skipped_by_name(client: Client) -> None:
    """It has a size and no block that holds it: /sys has many that can only be written."""
    top = Path("/sys/kernel/mm")
    closed = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file() and not _readable(path)}
    if not closed:
        pytest.skip("this kernel has no such file there")
    stream = tar_stream.Reader(io.BytesIO(await _all(files.read_tree(client, str(top)))))
    marks = [member.marks for member in stream if member.kind == tar_stream.MARK]
    assert closed <= {os.fsdecode(mark.get(tar_stream.SKIPPED, b"")) for mark in marks}
    assert closed <= {*archive.pack(str(top), lambda _: None).skipped}


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


async def test_what_goes_away_while_a_tree_is_read_is_left_out(client: Client, tmp_path: Path) -> None:
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            (tmp_path / "t" / "d" / "e").mkdir(parents=True)
            (tmp_path / "t" / "d" / "e").rmdir()
            (tmp_path / "t" / "d").rmdir()
            (tmp_path / "t" / "d").symlink_to("/etc")
            (tmp_path / "t" / "d").unlink()

    (tmp_path / "t").mkdir()
    changing = asyncio.ensure_future(asyncio.to_thread(change))
    try:
        for _ in range(40):
            packed = await _all(files.read_tree(client, str(tmp_path / "t")))
            with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
                assert set(tar.getnames()) <= {".", "./d", "./d/e"}
    finally:
        over.set()
        await changing


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/../out", "a/.."])
async def test_a_tree_does_not_lead_out_of_its_directory(client: Client, tmp_path: Path, name: str) -> None:
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(SandboxFileError):
        await files.write_tree(client, str(tmp_path / "t"), _chunks(source.getvalue()))
    assert not (tmp_path / "out").exists()


async def test_a_tree_that_is_cut_short_is_an_error(client: Client, tmp_path: Path) -> None:
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as tar:
        entry = tarfile.TarInfo("file")
        entry.size = 5000
        tar.addfile(entry, io.BytesIO(b"x" * 5000))
    with pytest.raises(SandboxFileError, match="cut short"):
        await files.write_tree(client, str(tmp_path / "t"), _chunks(source.getvalue()[:3000]))
    assert os.listdir(tmp_path / "t") == []


async def test_a_port_is_reached_and_half_closed(client: Client) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"got " + await reader.read())
        writer.close()

    async def get() -> Client:
        return client

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    forward = Forward(get, server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection(*forward.address)
    writer.write(b"x" * 200_000)
    writer.write_eof()
    assert await reader.read() == b"got " + b"x" * 200_000
    writer.close()
    forward.close()
    server.close()


async def test_a_service_that_says_more_than_it_hears_is_passed_on_both_ways_at_once(client: Client) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data * 10)
            await writer.drain()
        writer.close()

    async def get() -> Client:
        return client

    async def send() -> None:
        for _ in range(128):
            writer.write(b"x" * (1 << 16))
            await writer.drain()
        writer.write_eof()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    forward, got = Forward(get, server.sockets[0].getsockname()[1]), 0
    reader, writer = await asyncio.open_connection(*forward.address)
    sending = asyncio.ensure_future(send())
    async with asyncio.timeout(30):
        while data := await reader.read(1 << 20):
            got += len(data)
        await sending
    assert got == 10 * 128 << 16
    writer.close()
    forward.close()
    server.close()


async def test_two_who_ask_for_a_port_at_once_get_one_address() -> None:
    async def nothing(_: str, first: bytes) -> Channel:
        raise ConnectionError

    async def key(_: str) -> bytes:
        return b""

    calls = Calls(Clients("test", nothing, key))
    first, second = await asyncio.gather(calls.forward("here", 80), calls.forward("here", 80))
    assert first == second
    assert first[1]
    calls.end_calls()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["beside", "on another file system"])
async def test_a_file_that_is_there_already_takes_anothers_place(
    client: Client, tmp_path: Path, elsewhere: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if elsewhere else tmp_path) as beside:
        source, real, link = Path(beside) / "source", tmp_path / "real", tmp_path / "link"
        source.write_bytes(b"new" * 200_000)
        real.write_bytes(b"old")
        real.chmod(0o750)
        link.symlink_to("real")
        await files.replace_file(client, str(link), str(source))
        assert (link.is_symlink(), real.read_bytes(), source.exists()) == (True, b"new" * 200_000, False)
        assert real.stat().st_mode & 0o7777 == 0o750
        source.write_bytes(b"")
        await files.replace_file(client, str(tmp_path / "a" / "b"), str(source), mode=0o600)
        assert (tmp_path / "a" / "b").stat().st_mode & 0o7777 == 0o600
        source.write_bytes(b"")
        with pytest.raises(SandboxIsADirectoryError):
            await files.replace_file(client, str(tmp_path / "a"), str(source))
        with pytest.raises(SandboxFileNotFoundError):
            await files.replace_file(client, str(real), str(source) + "none")
    assert real.read_bytes() == b"new" * 200_000


async def test_a_time_no_calendar_has_hides_no_file(client: Client) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # a disk has no such time, memory has
        odd, plain = Path(place, "odd"), Path(place, "plain")
        odd.write_text("x")
        plain.write_text("x")
        os.utime(odd, (1e12, 1e12))
        assert (await files.stat(client, str(odd))).modified_at is None
        found = await files.list_dir(client, place)
        assert [(entry.name, entry.modified_at is None) for entry in found] == [
            ("odd", True),
            ("plain", False),
        ]


async def test_a_write_that_is_given_up_while_it_starts_leaves_nothing(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "old").write_bytes(b"old")
    await files.stat(client, str(tmp_path))
    for _ in range(60):
        writing = asyncio.ensure_future(files.write_file(client, str(tmp_path / "old"), _chunks(b"new")))
        while client.idle:
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"
    assert client.idle
