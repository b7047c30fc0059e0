"""Where an upload's bytes come from: an async source is read on the loop it belongs to, while there is one."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox, ValidationError, source
from lowtide.engine import engine
from lowtide.trees import holes


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    from lowtide.providers import registry

    with Sandbox.run(provider=registry.provider("faulty", directory=str(tmp_path))) as sandbox:
        yield sandbox


async def letters() -> AsyncIterator[bytes]:
    for letter in (b"a", b"b", b"c"):
        await asyncio.sleep(0)
        yield letter


async def wrapped(data: AsyncIterable[bytes]) -> AsyncIterable[bytes]:
    return source.chunks_of(data)


async def joined(chunks: AsyncIterable[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


def test_an_async_source_is_read_on_the_loop_it_belongs_to(box: Sandbox) -> None:
    threads = set()

    async def data() -> AsyncIterator[bytes]:
        async for letter in letters():
            threads.add(threading.current_thread())
            yield letter

    async def main() -> int:
        return await box.write_file_streaming("/tmp/letters", data())

    assert asyncio.run(main()) == 3
    assert threads == {threading.main_thread()}
    assert box.read_file("/tmp/letters").result() == b"abc"


def test_its_error_is_the_upload_s_error(box: Sandbox) -> None:
    async def data() -> AsyncIterator[bytes]:
        yield b"a"
        raise ZeroDivisionError("in the source")

    async def main() -> None:
        await box.write_file_streaming("/tmp/letters", data())

    with pytest.raises(ZeroDivisionError, match="in the source"):
        asyncio.run(main())


def test_giving_up_ends_a_step_that_is_being_taken(box: Sandbox) -> None:
    ended = []

    async def data() -> AsyncIterator[bytes]:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(True)
        yield b""

    async def main() -> None:
        writing = box.write_file_streaming("/tmp/letters", data())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await writing
        for _ in range(200):
            if ended:
                break
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert ended


def test_a_source_whose_loop_is_closed_is_a_clear_error() -> None:
    chunks = asyncio.run(wrapped(letters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValidationError, match="has been closed"):
            engine().run(joined(chunks), 10)
        gc.collect()


def test_a_loop_that_never_comes_to_it_has_nothing_to_complain_about() -> None:
    home = asyncio.new_event_loop()
    chunks = home.run_until_complete(wrapped(letters()))
    reading = engine().submit(joined(chunks))
    for _ in range(500):  # until the step waits for its turn on a loop that does not run
        if home._ready:  # type: ignore[attr-defined]
            break
        threading.Event().wait(0.01)
    assert home._ready  # type: ignore[attr-defined]
    reading.cancel()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        home.close()
        gc.collect()
    assert not said


async def test_a_file_that_does_not_block_is_read_to_its_end() -> None:
    for buffering in (0, -1):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        with open(reading, "rb", buffering=buffering) as file:
            whole = asyncio.create_task(joined(source.stdin_of(file)))
            for part in (b"one ", b"two"):
                await asyncio.sleep(0.05)  # so that it is asked before there is anything
                os.write(writing, part)
            os.close(writing)
            assert await whole == b"one two"


def test_what_comes_of_an_async_source_is_checked_without_a_loop_too(box: Sandbox) -> None:
    async def items(*given: object) -> AsyncIterator[object]:
        for item in given:
            yield item

    assert box.exec(["cat"], stdin=items("text ", b"bytes")).result(60).stdout == "text bytes"  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        box.write_file_streaming("f", items(1)).result(60)  # type: ignore[arg-type]


async def test_a_file_that_was_empty_stays_so_however_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    with path.open("rb") as file, (tmp_path / "copy").open("wb") as copy:

        def grows() -> bool:  # asked once the copy has looked at its size
            path.write_bytes(b"line\n")
            return False

        assert holes.copy_data(file.fileno(), copy.fileno(), grows) == 0
        assert (tmp_path / "copy").stat().st_size == 0
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        assert await joined(source.read_blocks(file.fileno(), None)) == b""
    with open("/proc/self/status", "rb") as untold:
        assert (await joined(source.read_blocks(untold.fileno(), None))).startswith(b"Name:")
