"""The engine itself: restarted under us, reached over TCP, and with a hundred sandboxes at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.container_engine import DOCKER, Boxes, answers, boxes_on, docker, import_bare_image, needs_docker

from lowtide.errors import SandboxError, SandboxNotFoundError
from lowtide.providers.base import ProcessSpec

pytestmark = [*needs_docker, pytest.mark.timeout(600)]

BARE = "lowtide-bare:1"


class OwnEngine:
    """A Docker engine that belongs to one test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = f"unix://{directory}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        place = self._directory
        with open(place / "log", "ab") as log:
            # In a network namespace of its own: an engine without a bridge removes docker0, and there
            # may be another engine on this machine that needs it.
            self._process = subprocess.Popen(
                ["unshare", "--net", "dockerd", "-H", self.url, "--data-root", place / "data",
                 "--exec-root", place / "run", "--pidfile", place / "pid", "--bridge=none", "--iptables=false",
                 "--storage-driver=vfs"],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        for _ in range(300):
            answers.cache_clear()
            if answers(self.url):
                break
            time.sleep(0.1)
        docker(self.url, "version")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
            self._process = None

    def kill_leftovers(self) -> None:
        """What a stopped engine leaves: the mounts of its network namespaces and containers."""
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            where = line.split()[4]
            if where.startswith(f"{self._directory}/"):
                subprocess.run(["umount", "-l", where], check=False)


@pytest.fixture
def own_engine() -> Iterator[OwnEngine]:
    if os.getuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("an engine of the test's own needs root and dockerd")
    directory = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/tmp"))
    engine = OwnEngine(directory)
    try:
        engine.start()
        import_bare_image(engine.url, BARE)
        yield engine
    finally:
        engine.stop()
        engine.kill_leftovers()
        shutil.rmtree(directory, ignore_errors=True)


async def test_an_engine_that_is_restarted_under_us(own_engine: OwnEngine) -> None:
    async with boxes_on(own_engine.url) as boxes:
        box = await boxes.make(image=BARE)
        handle = await boxes.provider.start_process(box, ProcessSpec(argv=("/only", "init", "1000", "0")))
        own_engine.stop()
        with pytest.raises(SandboxError) as caught:
            await asyncio.wait_for(handle.wait(), 60)
        assert type(caught.value).__name__ in ("SandboxGone", "SandboxUnavailableError")
        with pytest.raises(SandboxError):
            await boxes.run(box, "/only")
        own_engine.start()
        # The engine ends containers when it stops, and removes those that were to be removed.
        assert await boxes.gone(box)
        with pytest.raises(SandboxNotFoundError):
            await boxes.provider.get(box)
        assert await boxes.provider.destroy(box) is False
        again = await boxes.make(image=BARE)
        assert (await boxes.run(again, "/only"))[0] == 2


@asynccontextmanager
async def over_tcp(url: str) -> AsyncIterator[str]:
    """The same engine behind a TCP port, as a remote one is."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        inner_writer.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_an_engine_over_tcp() -> None:
    async with over_tcp(DOCKER) as url, boxes_on(url) as boxes:
        box = await boxes.make()
        assert await boxes.run(box, "echo", "far away") == (0, "far away\n", "")
        handle = await boxes.provider.start_process(box, ProcessSpec(argv=("cat",), stdin=True))
        await handle.write_stdin(b"over there")
        await handle.close_stdin()
        assert [data async for _, data in handle.output()] == [b"over there"]
        assert (await boxes.provider.url(box, 8000)).url.startswith("http://127.0.0.1:")
        account = await asyncio.to_thread(lambda: boxes.provider.account)
        assert account != await asyncio.to_thread(lambda: Boxes(DOCKER).provider.account)
        assert await boxes.provider.destroy(box, grace_seconds=2) is True


@pytest.mark.slow
async def test_a_hundred_containers_at_once() -> None:
    async with boxes_on(DOCKER) as boxes:
        ids = await asyncio.gather(*(boxes.make() for _ in range(100)))
        assert len(set(ids)) == 100
        answers_ = await asyncio.gather(*(boxes.run(box, "echo", box) for box in ids))
        assert [out.strip() for _, out, _ in answers_] == ids
        listed = {info.sandbox_id async for info in boxes.provider.list({"lowtide-ledger": boxes.ledger_id})}
        assert listed == set(ids)
        ended = await asyncio.gather(*(boxes.provider.destroy(box, grace_seconds=1) for box in ids))
        assert all(ended)
