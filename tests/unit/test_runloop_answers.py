"""Runloop's provider before a service that lies, hangs, or is not there: a clear error in bounded time, nothing lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from lowtide import errors
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.hosted import Counted, transfer
from lowtide.providers.runloop import RunloopProvider, channel

pytest.importorskip("runloop_api_client")
web = pytest.importorskip("aiohttp.web")

PAGE = "<html>Please log in</html>"
Answer = Callable[[Any], Awaitable[Any]]


class Service:
    """Answers each path's last word as it is told, everything else with 503."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []

    async def answer(self, request: Any) -> Any:
        word = request.path.rpartition("/")[2]
        self.asked.append(word)
        found = self.answers.get(word, self.answers.get("*"))
        if callable(found):
            return await found(request)
        if found is PAGE:
            return web.Response(text=PAGE, content_type="text/html")
        return web.json_response(found, status=200 if found is not None else 503)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"  # type: ignore[attr-defined]
    yield made
    await runner.cleanup()


@pytest.fixture
async def provider(service: Any) -> AsyncIterator[RunloopProvider]:
    connected = RunloopProvider.connect({"RUNLOOP_API_KEY": "key", "RUNLOOP_BASE_URL": service.url})
    yield connected
    await connected.aclose()


def spec() -> SandboxSpec:
    return SandboxSpec(labels=Labels(lease_id="lease", ledger_id="ledger", owner="me"))


def devbox(**more: Any) -> dict[str, Any]:
    return {"id": "dbx_1", "status": "running", "metadata": spec().labels.as_dict(), **more}


@pytest.mark.parametrize(
    "lie", [PAGE, [], {}, devbox(id=5), devbox(id="a/../b"), devbox(metadata=["a"])], ids=str
)
async def test_an_answer_that_is_no_devbox_is_no_word_about_one(
    service: Service, provider: RunloopProvider, lie: Any
) -> None:
    service.answers["*"] = lie
    for call in (provider.get("dbx_1"), provider.destroy("dbx_1"), provider.wait_ready("dbx_1")):
        with pytest.raises(errors.SandboxUnavailableError):
            await call


@pytest.mark.parametrize("lie", [PAGE, {}, devbox(id=5)], ids=str)
async def test_what_a_create_made_is_found_when_its_answer_cannot_be_read(
    service: Service, provider: RunloopProvider, lie: Any
) -> None:
    async def devboxes(request: Any) -> Any:
        if request.method == "POST":
            return (
                web.Response(text=PAGE, content_type="text/html") if lie is PAGE else web.json_response(lie)
            )
        return web.json_response({"devboxes": [1, None, devbox(id=7), devbox()], "has_more": False})

    service.answers["devboxes"] = devboxes
    assert (await provider.create(spec())).sandbox_id == "dbx_1"


@pytest.mark.parametrize("moment", ["soon", 10**30, -(10**30), None])
async def test_a_time_that_is_none_hides_no_devbox(
    service: Service, provider: RunloopProvider, moment: Any
) -> None:
    service.answers["devboxes"] = {"devboxes": [devbox(create_time_ms=moment)], "has_more": False}
    assert [info.created_at async for info in provider.list({})] == [None]


async def test_who_cannot_be_reached_was_sent_nothing() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        nowhere = RunloopProvider.connect({"RUNLOOP_API_KEY": "key", "RUNLOOP_BASE_URL": url})
        with pytest.raises(errors.SandboxUnavailableError, match="RUNLOOP_BASE_URL") as refused:
            await nowhere.create(spec())
        assert refused.value.nothing_sent  # so that nobody looks for what it made
        await nowhere.aclose()


async def test_who_hung_up_may_have_been_sent_it(service: Service, provider: RunloopProvider) -> None:
    async def hang_up(request: Any) -> Any:
        request.transport.abort()
        raise asyncio.CancelledError

    service.answers["*"] = hang_up
    with pytest.raises(errors.LowtideError) as lost:
        await provider.create(spec())
    assert not lost.value.nothing_sent


@pytest.mark.parametrize(
    "url", ["nowhere", "ftp://host", "http://[::1", "http://me:hunter2@host:99999", "https://ho st"]
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(errors.ValidationError, match="RUNLOOP_BASE_URL") as refused:
        RunloopProvider.connect({"RUNLOOP_API_KEY": "key", "RUNLOOP_BASE_URL": url})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("said", ['{"output":null}', '{"output":5}', '{"output":"\\ud800"}', "no JSON", ""])
async def test_a_stream_that_cannot_be_read_ends(
    service: Service, provider: RunloopProvider, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(request: Any) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {said}\n\n".encode() if said else b"")
        return response

    monkeypatch.setattr(channel, "_BROKEN_SECONDS", 0.1)
    service.answers |= {"stream_stdout_updates": stream, "e1": {"execution_id": "e1", "status": "running"}}

    async def as_it_is(error: errors.LowtideError) -> errors.LowtideError:
        return error

    way = channel.ExecutionChannel(provider.client(), "dbx_1", "e1", as_it_is)
    with pytest.raises(errors.SandboxUnavailableError, match="cannot be read"):
        await asyncio.wait_for(way.receive(), 60)
    assert service.asked.count("stream_stdout_updates") > 2  # it is tried again first


async def test_an_upload_that_stands_still_ends(
    service: Service, provider: RunloopProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = asyncio.Event()

    async def hang(request: Any) -> Any:
        came.set()
        await asyncio.sleep(3600)

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 1_000_000

    service.answers["upload_file"] = hang
    monkeypatch.setattr(transfer.Counted.watched, "__kwdefaults__", {"idle_seconds": 0.2})
    with pytest.raises(errors.RequestTimeoutError, match="took no data"):
        await asyncio.wait_for(provider.send_file("dbx_1", "/tmp/x", Counted(chunks())), 60)
    assert came.is_set()
