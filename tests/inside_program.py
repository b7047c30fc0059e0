"""The program inside, run on this machine over a pair of pipes: no engine, no sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.providers.base import ProcessSpec
from lowtide.providers.inside import Client
from lowtide.providers.inside import program as inside

PROGRAM = Path(inside.__file__).parent / f"inside.{os.uname().machine}"


@cache
def wrapped_by() -> dict[str, tuple[str, ...]]:
    """The other ways to run it that this machine has: another kernel, another processor."""
    ways: dict[str, tuple[str, ...]] = {}
    if shutil.which("runsc"):
        ways["gvisor"] = ("runsc", "--rootless", "--network=none", "--ignore-cgroups", "do")
    if shutil.which("qemu-aarch64"):
        ways["aarch64"] = ("qemu-aarch64",)
    return ways


class PipeChannel:
    """Implements `Channel` over the standard streams of a process on this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.limit: int | None = None
        """After how many received bytes it breaks."""
        self.gentle = False
        self.silent = False
        """As behind a firewall that has begun to drop packets: what is sent is lost, nothing arrives, nothing ends."""

    async def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        if self.silent:
            return
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def receive(self) -> bytes:
        assert self.process.stdout is not None
        data = await self.process.stdout.read(1 << 16)
        while self.silent:
            await asyncio.sleep(3600)
        if self.limit is not None:
            self.limit -= len(data)
            if self.limit <= 0:  # in the middle of whatever was under way
                self.close()
                return b""
        return data

    def close(self) -> None:
        if self.gentle and self.process.stdin is not None:
            self.process.stdin.close()  # killed, gVisor would leave its own things behind
        elif self.process.returncode is None:
            self.process.kill()


@dataclass
class Inside:
    """One server of its own, and channels to it."""

    text: bool = False
    argv: Sequence[str] = (str(PROGRAM),)
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": os.environ["PATH"], "HOME": "/"})
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    channels: list[PipeChannel] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    words: tuple[str, ...] = ()
    limits: list[int] = field(default_factory=list)
    """When each of the next channels breaks."""

    async def open(self, first: bytes) -> PipeChannel:
        words = ["serve", self.name, *(["text"] if self.text else []), *self.words]
        process = await asyncio.create_subprocess_exec(
            *self.argv,
            *words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            limit=1 << 20,
        )
        channel = PipeChannel(process)
        channel.gentle = self.argv[0] == "runsc"
        channel.limit = self.limits.pop(0) if self.limits else None
        self.channels.append(channel)
        await channel.send(first)
        return channel

    def client(self, **keywords: Any) -> Client:
        keywords.setdefault("key", b"k" * 16)
        client = Client(self.open, provider="test", sandbox_id="here", text=self.text, **keywords)
        self.clients.append(client)
        return client

    async def aclose(self) -> None:
        for client in self.clients:
            client.close()
        await asyncio.sleep(0)
        for channel in self.channels:
            try:
                await asyncio.wait_for(channel.process.wait(), 60 if channel.gentle else 5)
            except TimeoutError:
                channel.process.kill()
                await channel.process.wait()
        if self.argv[0] != "runsc":  # whose processes are not this machine's
            for pid in {client.pid for client in self.clients if client.pid is not None}:
                _end(pid)


def _end(server: int) -> None:
    """A server waits for clients that may come again; a test is over when it is."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    ends = [server]
    for pid in ends:
        ends += parents.get(pid, [])
    for pid in ends:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def serving(**keywords: Any) -> AsyncIterator[Inside]:
    inside = Inside(**keywords)
    try:
        yield inside
    finally:
        await inside.aclose()


async def run(client: Client, *argv: str, **keywords: Any) -> tuple[int, bytes, bytes]:
    stdin = keywords.pop("input", None)
    process = await client.start(ProcessSpec(argv=argv, stdin=stdin is not None, **keywords))
    if stdin is not None:
        await process.write_stdin(stdin)
        await process.close_stdin()
    streams = {1: bytearray(), 2: bytearray()}
    async for number, data in process.output():
        streams[number] += data
    return await process.wait(), bytes(streams[1]), bytes(streams[2])
