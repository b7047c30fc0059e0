"""What lowtide uses of Daytona's SDK beyond its documented calls: a release that moves it fails here, by name."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import warnings
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("daytona") is None, reason="needs the extra lowtide[daytona]"
)


def test_the_sdk_has_every_private_part_that_lowtide_uses() -> None:
    from lowtide.providers.daytona.access import Access, Connection

    async def looked() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            connection = Connection(Access(api_key="a-key", api_url="http://127.0.0.1:9/api"))
            sdk: Any = await connection.sdk()
            for call, words in {
                "get_sandbox": (),
                "get_sandbox_without_preload_content": ("_request_timeout",),
                "delete_sandbox_without_preload_content": ("_request_timeout",),
                "stop_sandbox": ("force", "_request_timeout"),
                "list_sandboxes": ("labels", "cursor", "limit"),
            }.items():
                taken = inspect.signature(getattr(sdk._sandbox_api, call)).parameters
                assert set(words) <= set(taken), call
            session, headers = await connection.session()
            assert headers["Authorization"] == "Bearer a-key"
            assert session is sdk._shared_session.session
            # As aiohttp has them: the look-ups that are spared, and the connections whose end is awaited.
            assert isinstance(session._trust_env, bool)
            assert len(session._trace_configs) == 1  # refuses redirects
            assert isinstance(session.connector._conns, dict)  # type: ignore[union-attr]
            await connection.aclose()
            assert session.closed

    asyncio.run(looked())


def test_a_sandbox_of_the_sdk_says_where_its_toolbox_is() -> None:
    from daytona import AsyncSandbox
    from daytona._async.process import AsyncProcess

    assert "toolbox_proxy_url" in inspect.getsource(AsyncSandbox)
    assert {"command", "env"} <= set(inspect.signature(AsyncProcess.exec).parameters)
    assert "session_id" in inspect.signature(AsyncProcess.kill_pty_session).parameters
