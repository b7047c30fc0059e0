"""What the program inside keeps of its main command's output: bounded, for every client, to the last byte."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from tests.inside_program import PROGRAM, PipeChannel

from lowtide.providers.base import STDERR
from lowtide.providers.inside import Client, frames, logs
from lowtide.providers.inside.program import EXPIRED

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="each has a network of its own, which only root makes"),
]
KEY = b"k" * 16


@pytest.fixture(params=["plain", "sanitized"])
def program(request: pytest.FixtureRequest) -> Path:
    found = PROGRAM if request.param == "plain" else request.getfixturevalue("sanitized")
    assert isinstance(found, Path)
    return found


class Guarded:
    """A main command under `guard log`, in namespaces of its own: its name is nobody else's, and what it signals is its own."""

    def __init__(self, program: Path, process: asyncio.subprocess.Process) -> None:
        self.program, self.process = program, process
        self.clients: list[Client] = []
        self.channels: list[PipeChannel] = []

    async def open(self, first: bytes) -> PipeChannel:
        own = f"/proc/{self.process.pid}/ns"
        words = ("nsenter", f"--net={own}/net", f"--pid={own}/pid_for_children", str(self.program))
        started = await asyncio.create_subprocess_exec(
            *words, "attach", "wait", stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 20
        )
        self.channels.append(PipeChannel(started))
        await self.channels[-1].send(first)
        return self.channels[-1]

    def client(self) -> Client:
        self.clients.append(Client(self.open, key=KEY, provider="test", sandbox_id="here"))
        return self.clients[-1]

    async def log(self, client: Client | None = None, tail_lines: int | None = None) -> bytes:
        reading = logs.read(client or self.client(), follow=False, tail_lines=tail_lines)
        return b"".join([data async for data in reading])

    async def until(self, last: bytes) -> bytes:
        client = self.client()
        while not (printed := await self.log(client)).endswith(last):
            await asyncio.sleep(0.02)
        return printed


@asynccontextmanager
async def guarded(
    program: Path,
    script: str,
    stdout: int = subprocess.DEVNULL,
    stderr: int | None = None,
    keeps: tuple[str, ...] = ("log",),
    lifetime: int = 0,
) -> AsyncIterator[Guarded]:
    # As process 1, as in a sandbox: elsewhere root's program would signal the whole machine, were it told to end.
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *(str(program), "guard", *keeps, str(lifetime), "0", "sh", "-c", script),
        env={"PATH": os.environ["PATH"], "LOWTIDE_KEY": KEY.hex()},
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        limit=1 << 20,
    )
    inside = Guarded(program, process)
    try:
        while not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text():
            await asyncio.sleep(0.005)
        yield inside
    finally:
        for client in inside.clients:
            client.close()
        if process.returncode is None:
            process.kill()  # and with it all that is in its namespaces
        await process.wait()
        for channel in inside.channels:
            channel.close()
            await channel.process.wait()


async def test_every_client_reads_all_of_it_or_its_last_lines(program: Path) -> None:
    async with guarded(program, "printf 'one\\ntwo\\n\\377'; echo three >&2; sleep 60") as inside:
        assert await inside.until(b"three\n") == b"one\ntwo\n\xffthree\n"
        assert await inside.log(tail_lines=1) == b"\xffthree\n"
        assert await inside.log(tail_lines=9) == b"one\ntwo\n\xffthree\n"


async def test_following_goes_on_to_the_last_byte_also_over_channels_that_drop(
    program: Path, tmp_path: Path
) -> None:
    script = f"echo begin; until [ -e {tmp_path}/go ]; do sleep 0.02; done; seq 100000; exit 7"
    async with guarded(program, script) as inside:
        await inside.until(b"begin\n")
        printed = b""
        async with aclosing(logs.read(inside.client(), follow=True, tail_lines=None)) as reading:  # type: ignore[type-var]
            async for data in reading:
                if not printed:
                    (tmp_path / "go").touch()
                if len(printed) < 100_000:
                    inside.channels[-1].close()
                printed += data
        assert printed == b"begin\n" + b"".join(b"%d\n" % n for n in range(1, 100_001))
        assert await inside.process.wait() == 7


async def test_a_flood_waits_for_no_reader_of_the_log_and_the_newest_is_kept(program: Path) -> None:
    script = "yes 0123456789012345678 | head -c 20000000; echo last; sleep 60"
    async with guarded(program, script) as inside:
        process = inside.client()
        async with process.log(follow=True) as unread:
            printed = await inside.until(b"last\n")
            assert await unread.next() is not None
        assert frames.LOG_KEPT - 20 <= len(printed) <= frames.LOG_KEPT
        assert set(printed.splitlines()) == {b"0123456789012345678", b"last"}
        assert await inside.log(tail_lines=2) == b"0123456789012345678\nlast\n"


async def test_what_it_prints_also_goes_where_it_went_before_and_no_faster(program: Path) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb") as stdout:
        async with guarded(program, "yes | head -c 300000; exit 3", stdout=theirs) as inside:
            while select.select([], [theirs], [], 0)[1]:  # how many bytes that takes depends on their pieces
                await asyncio.sleep(0.02)
            os.close(theirs)
            there = fcntl.ioctl(ours, termios.FIONREAD, bytes(4))
            assert len(await inside.log()) == int.from_bytes(there, sys.byteorder)  # nobody reads it there
            assert await asyncio.to_thread(stdout.read) == b"y\n" * 150_000
            assert await inside.process.wait() == 3


async def test_a_reader_that_is_gone_does_not_hold_up_the_end(program: Path, tmp_path: Path) -> None:
    script = f"echo begin; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo last"
    async with guarded(program, script) as inside:
        await inside.until(b"begin\n")
        client = inside.client()
        async with aclosing(logs.read(client, follow=True, tail_lines=None)) as reading:  # type: ignore[type-var]
            assert await anext(reading) == b"begin\n"
            inside.channels[-1].process.kill()
            client.close(goodbye=False)
        (tmp_path / "go").touch()
        assert await inside.process.wait() == 0


async def test_a_reader_that_takes_nothing_is_told_once_that_it_missed_something(program: Path) -> None:
    script = "yes 0123456789012345678 | head -c 100000000; echo last; sleep 60"
    async with guarded(program, script) as inside, inside.client().log(follow=True) as unread:
        await inside.until(b"last\n")
        missed = [False]
        while (chunk := await unread.next()) is not None and not chunk[1].endswith(b"last\n"):
            missed.append(chunk == (STDERR, frames.NOT_KEPT))
        assert not any(one and another for one, another in pairwise(missed)), sum(missed)


@pytest.mark.parametrize("keeps", [("log",), ()])
async def test_a_lifetime_ends_though_nobody_reads_what_it_prints(
    program: Path, keeps: tuple[str, ...]
) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "wb"):
        async with guarded(program, "yes >&2", stderr=theirs, keeps=keeps, lifetime=1) as inside:
            assert await asyncio.wait_for(inside.process.wait(), 60) == EXPIRED
