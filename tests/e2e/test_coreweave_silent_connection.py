"""A connection whose other end has vanished without a word: a router forgot it, or this machine was elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.coreweave_emulator import needs_emulator, serving

from lowtide.errors import RequestTimeoutError
from lowtide.providers.coreweave.access import Access, connections, messages

pytestmark = needs_emulator


@pytest.fixture(scope="module")
def emulator() -> Iterator[Any]:
    yield from serving()


class Road:
    """To the service and back, until `vanish`: what is open then stays open, and nothing gets through."""

    def __init__(self, url: str) -> None:
        self._to = urlsplit(url)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: list[dict[str, bool]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Road:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()

    def vanish(self) -> None:
        for one in self._open:
            one["through"] = False

    @property
    def count(self) -> int:
        return len(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection(self._to.hostname, self._to.port)
        state = {"through": True}
        self._open.append(state)
        self._writers += [writer, inner[1]]
        for source, target in ((reader, inner[1]), (inner[0], writer)):
            self._tasks.add(asyncio.get_running_loop().create_task(self._carry(source, target, state)))

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, state: dict[str, bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if state["through"]:
                    target.write(data)
        if state["through"]:
            target.close()


def test_what_is_asked_next_goes_another_way(emulator: Any) -> None:
    async def life() -> None:
        pb = messages()
        async with Road(os.environ["CWSANDBOX_BASE_URL"]) as road:
            access = Access(api_key=os.environ["CWSANDBOX_API_KEY"], base_url=f"http://127.0.0.1:{road.port}")
            there = connections(access)
            try:
                asked = pb.ListSandboxesRequest(page_size=1)
                await there.call("ListSandboxes", asked, 10.0)
                road.vanish()
                both = [there.call("ListSandboxes", asked, 0.5) for _ in range(2)]
                for failed in await asyncio.gather(*both, return_exceptions=True):
                    assert isinstance(failed, RequestTimeoutError)
                await there.call("ListSandboxes", asked, 10.0)
                assert road.count == 2
            finally:
                await there.aclose()

    asyncio.run(life())


def test_a_stream_that_is_given_up_is_not_followed_by_another_on_its_connection(emulator: Any) -> None:
    async def life() -> None:
        pb = messages()
        async with Road(os.environ["CWSANDBOX_BASE_URL"]) as road:
            access = Access(api_key=os.environ["CWSANDBOX_API_KEY"], base_url=f"http://127.0.0.1:{road.port}")
            there = connections(access)
            wrong = pb.ExecStreamRequest(init=pb.ExecStreamInit(sandbox_id="none", command=["true"]))
            try:
                for silent in (False, True):
                    call = there.stream("StreamExec")
                    await call.write(wrong)
                    if silent:
                        road.vanish()
                        there.give_up(call)
                        call.cancel()
                    else:
                        assert (await call.code()).name == "NOT_FOUND"
                call = there.stream("StreamExec")
                await call.write(wrong)
                async with asyncio.timeout(20):
                    assert (await call.code()).name == "NOT_FOUND"
                assert road.count == 2
            finally:
                await there.aclose()

    asyncio.run(life())


def test_the_kernel_gives_up_what_nobody_acknowledges(emulator: Any) -> None:
    async def life() -> list[int]:
        access = Access(api_key=os.environ["CWSANDBOX_API_KEY"], base_url=os.environ["CWSANDBOX_BASE_URL"])
        there = connections(access)
        try:
            await there.call("ListSandboxes", messages().ListSandboxesRequest(page_size=1), 10.0)
            return list(_user_timeouts(urlsplit(access.base_url).port))
        finally:
            await there.aclose()

    assert asyncio.run(life()) == [20_000]


def _user_timeouts(port: int | None) -> Iterator[int]:
    """In milliseconds, of this process's connections to the port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, IndexError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.getpeername()[1] == port:
                        yield found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
