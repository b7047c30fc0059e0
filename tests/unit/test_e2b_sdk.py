"""Where the E2B provider reaches into its SDK: a release that moves one of these fails here, and not at a user's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lowtide.providers.e2b import transport
from lowtide.providers.e2b.sdk import sandbox_class

pytest.importorskip("e2b")
pytest.importorskip("e2b_code_interpreter")


def _given(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


async def test_the_sdks_private_parts_are_where_this_provider_reaches_for_them() -> None:
    from e2b import AsyncSandbox, api, envd
    from e2b.api import client_async
    from e2b.api.client.api.sandboxes import get_sandboxes_sandbox_id
    from e2b.api.metadata import default_headers
    from e2b.connection_config import ConnectionConfig
    from e2b.envd import client_async as rpc
    from e2b.envd import rpc as meanings
    from e2b.envd import utils
    from e2b.envd.process import process_connect, process_pb
    from e2b.sandbox.filesystem import filesystem as entries
    from e2b.sandbox_async import sandbox_api
    from e2b.sandbox_async.filesystem import filesystem
    from e2b_code_interpreter import AsyncSandbox as Interpreter
    from packaging.version import Version
    from protobuf import Oneof

    # transport.py: connections that are taken out of its tables, and a transport in the place of its own
    assert client_async.HTTPTransport
    assert any(isinstance(getattr(client_async, name, None), dict) for name in transport.TABLES)
    assert _given(transport.PlainTransport.__init__) >= {"proxy", "read_timeout"}
    # destroy.py and lookup.py: requests of our own over its connections
    config = ConnectionConfig(api_key="e2b_x", api_url="http://127.0.0.1:9", sandbox_url="http://127.0.0.1:9")
    pool = {"proxy"} | ({"http_version", "retry_connect"} if hasattr(config, "http_version") else set())
    assert _given(client_async.get_pyqwest_transport) >= pool
    assert callable(api.proxy_to_config)
    assert callable(api.handle_api_exception)
    assert isinstance(default_headers, dict)
    assert "client" in _given(get_sandboxes_sandbox_id.asyncio_detailed)
    # errors.py: the answer that the SDK drops is in a frame's `res`
    for name in ("_cls_set_timeout", "_cls_kill"):
        assert "res" in getattr(sandbox_api.SandboxApi, name).__code__.co_varnames
    # sdk.py: an object without its clients
    facts: dict[str, Any] = {
        "sandbox_id": "x",
        "sandbox_domain": None,
        "envd_version": Version("0.6.5"),
        "envd_access_token": "token",
        "traffic_access_token": None,
        "connection_config": config,
    }
    made, lazy = AsyncSandbox(**facts), sandbox_class()(**facts)
    assert {"_envd_api", "_filesystem", "_commands"} <= set(vars(made))
    assert not {"_envd_api", "_filesystem", "_commands"} & set(vars(lazy))
    for mine, theirs in ((lazy.commands, made.commands), (lazy.files, made.files)):
        assert type(mine) is type(theirs)
        assert set(vars(mine)) == set(vars(theirs))
    assert lazy.envd_api_url == made.envd_api_url
    assert lazy._envd_version == Version("0.6.5")
    assert (lazy._envd_access_token, lazy.traffic_access_token) == ("token", None)
    # channel.py: the generated client of envd, one step below `commands.run`
    assert callable(lazy.commands._check_health)
    assert _given(process_connect.ProcessClient.start) >= {"request", "headers"}
    assert "request" in _given(lazy.process_rpc.send_input)
    assert rpc.as_stream
    assert envd.rpc is meanings
    assert callable(meanings.ahandle_rpc_exception_with_health)
    assert utils.authentication_header(Version("0.6.5"), "root")
    process = process_pb.ProcessConfig(cmd="a", args=["b"], envs={"c": "d"})
    assert process_pb.StartRequest(process=process, stdin=True).stdin
    event = process_pb.ProcessEvent.StartEvent(pid=7)
    started = process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof("start", event)))
    assert utils.extract_start_pid(started, "start") == 7
    selector = process_pb.ProcessSelector(selector=Oneof("pid", 7))
    piece = process_pb.ProcessInput(input=Oneof("stdin", b"\xff"))
    assert process_pb.SendInputRequest(process=selector, input=piece).input
    # files.py: a stream as content
    if not hasattr(entries, "AsyncWriteEntry"):
        assert filesystem.ENVD_API_FILES_ROUTE
        assert callable(filesystem._ahandle_filesystem_envd_api_exception)
    # interpreter.py: its object made from ours
    assert callable(Interpreter(**facts).run_code)
