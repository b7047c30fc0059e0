"""Where the E2B provider reaches into its SDK: a release that moves one of these fails here, and not at a user's."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from lowtide.providers.e2b import transport
from lowtide.providers.e2b.sdk import sandbox_class

pytest.importorskip("e2b")
pytest.importorskip("e2b_code_interpreter")


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _given(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


async def test_the_sdks_private_parts_are_where_this_provider_reaches_for_them() -> None:
    api, client_async = _module("e2b.api"), _module("e2b.api.client_async")
    rpc, meanings, utils = (_module(f"e2b.envd.{name}") for name in ("client_async", "rpc", "utils"))
    process_connect = _module("e2b.envd.process.process_connect")
    process_pb = _module("e2b.envd.process.process_pb")
    entries = _module("e2b.sandbox.filesystem.filesystem")
    filesystem = _module("e2b.sandbox_async.filesystem.filesystem")
    sandbox_api = _module("e2b.sandbox_async.sandbox_api")
    oneof, version = _module("protobuf").Oneof, _module("packaging.version").Version("0.6.5")

    # transport.py: connections that are taken out of its tables, and a transport in the place of its own
    assert callable(client_async.HTTPTransport)
    assert any(isinstance(getattr(client_async, name, None), dict) for name in transport.TABLES)
    assert _given(transport.PlainTransport.__init__) >= {"proxy", "read_timeout"}
    # destroy.py and lookup.py: requests of our own over its connections
    config = _module("e2b.connection_config").ConnectionConfig(
        api_key="e2b_x", api_url="http://127.0.0.1:9", sandbox_url="http://127.0.0.1:9"
    )
    pool = {"proxy"} | ({"http_version", "retry_connect"} if hasattr(config, "http_version") else set())
    assert _given(client_async.get_pyqwest_transport) >= pool
    assert callable(api.proxy_to_config)
    assert callable(api.handle_api_exception)
    assert isinstance(_module("e2b.api.metadata").default_headers, dict)
    assert callable(_module("e2b.api.client.models").SandboxDetail.from_dict)
    # errors.py: the answer that the SDK drops is in a frame's `res`
    for name in ("_cls_set_timeout", "_cls_kill"):
        assert "res" in getattr(sandbox_api.SandboxApi, name).__code__.co_varnames
    # sdk.py: an object without its clients
    facts: dict[str, Any] = {
        "sandbox_id": "x",
        "sandbox_domain": None,
        "envd_version": version,
        "envd_access_token": "token",
        "traffic_access_token": None,
        "connection_config": config,
    }
    made, lazy = _module("e2b").AsyncSandbox(**facts), sandbox_class()(**facts)
    assert {"_envd_api", "_filesystem", "_commands"} <= set(vars(made))
    assert not {"_envd_api", "_filesystem", "_commands"} & set(vars(lazy))
    for mine, theirs in ((lazy.commands, made.commands), (lazy.files, made.files)):
        assert type(mine) is type(theirs)
        assert set(vars(mine)) == set(vars(theirs))
    assert lazy.envd_api_url == made.envd_api_url
    assert lazy._envd_version == version
    assert (lazy._envd_access_token, lazy.traffic_access_token) == ("token", None)
    # channel.py: the generated client of envd, one step below `commands.run`
    assert callable(lazy.commands._check_health)
    assert _given(process_connect.ProcessClient.start) >= {"request", "headers"}
    assert "request" in _given(lazy.process_rpc.send_input)
    assert callable(rpc.as_stream)
    assert callable(meanings.ahandle_rpc_exception_with_health)
    assert utils.authentication_header(version, "root")
    process = process_pb.ProcessConfig(cmd="a", args=["b"], envs={"c": "d"})
    assert process_pb.StartRequest(process=process, stdin=True).stdin
    event = process_pb.ProcessEvent.StartEvent(pid=7)
    started = process_pb.StartResponse(event=process_pb.ProcessEvent(event=oneof("start", event)))
    assert utils.extract_start_pid(started, "start") == 7
    selector = process_pb.ProcessSelector(selector=oneof("pid", 7))
    piece = process_pb.ProcessInput(input=oneof("stdin", b"\xff"))
    assert process_pb.SendInputRequest(process=selector, input=piece).input
    # files.py: a stream as content
    if not hasattr(entries, "AsyncWriteEntry"):
        assert filesystem.ENVD_API_FILES_ROUTE
        assert callable(filesystem._ahandle_filesystem_envd_api_exception)
    # interpreter.py: its object made from ours
    assert callable(_module("e2b_code_interpreter").AsyncSandbox(**facts).run_code)
