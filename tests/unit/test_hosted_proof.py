"""What proves that a sandbox is gone: its own service's word, asked with its own account. Nobody else's."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lowtide import errors
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.daytona import DaytonaProvider
from lowtide.providers.e2b import E2BProvider
from lowtide.providers.runloop import RunloopProvider

SERVICES: dict[str, tuple[Any, str, str]] = {
    "e2b": (E2BProvider, "api_url", "e2b"),
    "daytona": (DaytonaProvider, "api_url", "daytona"),
    "runloop": (RunloopProvider, "base_url", "runloop_api_client"),
}
PAGES = {
    "plain": ("default backend - 404", "text/plain"),
    "page": (
        "<html><h1>404 Not Found</h1>The requested URL {path} was not found on this server.</html>",
        "text/html",
    ),
    "gone": ("<html><h1>410 Gone</h1></html>", "text/html"),
    "route": ('{{"message":"Cannot GET {path}","error":"Not Found","statusCode":404}}', "application/json"),
    "gateway": ('{{"message":"Not Found"}}', "application/json"),
    "other": ('{{"code":404,"message":"no team of this name"}}', "application/json"),
}


NAMED = ('{{"status":404,"error":"Not Found","path":"{path}"}}', "application/json")
"""Daytona's own answers name the path as well: there it tells nothing."""


@pytest.fixture(params=sorted(SERVICES))
async def provider(request: pytest.FixtureRequest, page: str) -> AsyncIterator[Any]:
    """Connected to a proxy whose service is not there."""
    kind, address, sdk = SERVICES[request.param]
    if any(importlib.util.find_spec(name) is None for name in (sdk, "aiohttp")):
        pytest.skip(f"needs {sdk}")
    from aiohttp import web

    async def answer(asked: web.Request) -> web.Response:
        words, kind = NAMED if asked.path.startswith("/v1/devboxes/named") else PAGES[page]
        return web.Response(
            text=words.format(path=asked.path), content_type=kind, status=410 if page == "gone" else 404
        )

    async with _serving(answer) as url:
        connected = kind.connect({}, {"api_key": "e2b_" + "0" * 40, address: url})
        yield connected
        await connected.aclose()


@asynccontextmanager
async def _serving(answer: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[str]:
    from aiohttp import web

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("page", sorted(PAGES))
async def test_a_404_of_somebody_on_the_way_is_no_proof_that_a_sandbox_is_gone(
    provider: Any, page: str
) -> None:
    # Each is proof to somebody: to an end, to a sweep, to the guardian.
    for name, more in (("destroy", ()), ("get", ()), ("renew", (300.0,))):
        for sandbox_id in ("abc123", "named") if page == "plain" else ("abc123",):
            with pytest.raises(errors.LowtideError) as raised:
                await getattr(provider, name)(sandbox_id, *more)
            assert not isinstance(raised.value, errors.SandboxNotFoundError | errors.SandboxGone)


async def test_what_e2b_does_not_find_to_renew_and_shows_is_not_gone() -> None:
    """The guardian would settle its row, and nobody renew it any more."""
    pytest.importorskip("e2b")
    web = pytest.importorskip("aiohttp.web")
    there: dict[str, Any] = {
        "sandboxID": "abc123",
        "templateID": "base",
        "clientID": "",
        "state": "running",
        "envdVersion": "0.2.0",
    }
    there |= dict.fromkeys(("cpuCount", "memoryMB", "diskSizeMB"), 1)
    there |= dict.fromkeys(("startedAt", "endAt"), "2030-01-01T00:00:00Z")

    async def answer(asked: Any) -> Any:
        if asked.method == "GET":
            return web.json_response(there)
        return web.json_response({"code": 404, "message": 'Sandbox "abc123" doesn\'t exist'}, status=404)

    async with _serving(answer) as url:
        provider = E2BProvider.connect({}, {"api_key": "e2b_" + "0" * 40, "api_url": url})
        assert (await provider.get("abc123")).sandbox_id == "abc123"
        with pytest.raises(errors.SandboxUnavailableError):
            await provider.renew("abc123", 300.0)
        await provider.aclose()


@pytest.mark.parametrize("name", ["e2b", "daytona"])
async def test_a_list_without_an_end_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, address, sdk = SERVICES[name]
    pytest.importorskip(sdk)
    web = pytest.importorskip("aiohttp.web")
    monkeypatch.setattr("lowtide.providers.hosted.lookup._MOST_PAGES", 20)

    async def answer(asked: Any) -> Any:
        page = [] if name == "e2b" else {"items": [], "nextCursor": "more", "total": 0}
        return web.json_response(page, headers={"X-Next-Token": "more"})

    async with _serving(answer) as url, asyncio.timeout(20):
        provider = kind.connect({}, {"api_key": "e2b_" + "0" * 40, address: url})
        with pytest.raises(errors.SandboxUnavailableError, match="no end"):
            _ = [found async for found in provider.list({})]
        await provider.aclose()


def test_a_daytona_key_of_another_organisation_is_another_account_whatever_the_environment_says() -> None:
    pytest.importorskip("daytona")
    said = {"DAYTONA_ORGANIZATION_ID": "one"}  # Daytona hears of it with a token only: a key has its own

    def account(**more: str) -> str:
        return DaytonaProvider.connect({**said, **more}).account

    assert account(DAYTONA_API_KEY="first") != account(DAYTONA_API_KEY="second")
    assert account(DAYTONA_JWT_TOKEN="first") == account(DAYTONA_JWT_TOKEN="second")


async def test_what_a_service_lists_for_another_lease_is_not_taken_for_this_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cwsandbox")
    from lowtide.providers.coreweave import CoreWeaveProvider, create
    from lowtide.providers.coreweave.access import messages

    mine, other = (
        SandboxSpec(labels=Labels(lease_id=name, ledger_id="book", owner="me")) for name in ("mine", "other")
    )

    class Unfiltered:
        async def pages(self, *_: object) -> AsyncIterator[Any]:
            tags = create.tags_of(other.labels.as_dict())
            yield messages().Sandbox(sandbox_id="box", spec=messages().SandboxSpec(tags=tags))

    async def connections() -> Any:
        return Unfiltered()

    provider = CoreWeaveProvider.connect({"CWSANDBOX_API_KEY": "key"})
    monkeypatch.setattr(provider, "connections", connections)
    assert await provider.find(mine) is None
    found = await provider.find(other)
    assert found is not None
    assert found.sandbox_id == "box"


def test_passwords_and_keys_are_in_no_repr_and_no_error() -> None:
    from lowtide.providers.coreweave import CoreWeaveOptions, CoreWeaveProvider
    from lowtide.providers.e2b.access import Access
    from lowtide.providers.e2b.options import E2BOptions

    secret = "hunter2"
    way = {"api_key": secret, "proxy": f"http://me:{secret}@proxy:3128"}
    shown = (
        Access.resolve({}, way),
        E2BOptions(mcp={"github": {"token": secret}}, network={"rules": {"host": secret}}),
        SandboxSpec(labels=Labels(lease_id="a", ledger_id="b", owner="c"), environment={"KEY": secret}),
        CoreWeaveOptions(mounted_files=[{"path": "/key", "content": secret}]),
    )
    assert not any(secret in repr(one) for one in shown)
    for url in (f"https://me:{secret}@host", f"https://me:{secret}@host/path"):
        with pytest.raises(errors.ValidationError) as refused:
            CoreWeaveProvider.connect({"CWSANDBOX_API_KEY": "key", "CWSANDBOX_BASE_URL": url})
        assert secret not in str(refused.value)
