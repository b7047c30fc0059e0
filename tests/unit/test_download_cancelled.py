"""A download that is given up: its thread has ended before it has, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from lowtide import Sandbox, download, local_target
from lowtide.testing.conformance.base import eventually

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox.run(provider="local") as sandbox:
        yield sandbox


async def test_what_a_thread_still_writes_is_not_removed_under_it() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"all there is"

    def take(_: Iterable[bytes]) -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    taking = asyncio.create_task(download._into_thread(chunks(), take))
    await asyncio.to_thread(begun.wait, 60)
    taking.cancel()
    await asyncio.wait({taking}, timeout=0.1)
    assert not taking.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert ended.is_set()


def test_into_a_pipe_that_nobody_reads(box: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    box.write_file("/tmp/big", bytes(9_000_000)).result(60)
    downloading = box.download("/tmp/big", tmp_path / "pipe")
    eventually(_writes_into_a_target)
    downloading.cancel()
    eventually(lambda: not _writes_into_a_target())


def _writes_into_a_target() -> bool:
    """Whether a thread is in `local_target.write_into`."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is local_target.write_into.__code__:
                return True
            frame = frame.f_back
    return False
