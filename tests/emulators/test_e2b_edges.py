"""The edges of the E2B emulator: ports, WebSockets, the async SDK, stdin, and who may see what."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
import yarl

from lowtide.emulators.handle import Handle

sdk = pytest.importorskip("e2b")
Create = Callable[..., Any]

ECHO = """
from aiohttp import web

async def talk(request):
    socket = web.WebSocketResponse(protocols=("echo",))
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(message.data[::-1])
    return socket

async def upload(request):
    size = 0
    async for piece in request.content.iter_any():
        size += len(piece)
    return web.json_response({"size": size, "query": request.rel_url.raw_query_string, "host": request.host})

app = web.Application()
app.router.add_get("/talk", talk)
app.router.add_post("/upload", upload)
web.run_app(app, host="127.0.0.1", port=8090, print=None)
"""


async def wait_for_port(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
    for _ in range(300):
        async with session.get(url, headers=headers) as answer:
            if answer.status != 502:
                return
        await asyncio.sleep(0.1)
    pytest.fail("the server inside never listened")


async def test_websockets_and_streamed_bodies_pass_through(create: Create, e2b: Handle) -> None:
    sandbox = await asyncio.to_thread(create)
    await asyncio.to_thread(sandbox.files.write, "echo.py", ECHO)
    await asyncio.to_thread(sandbox.commands.run, f"{sys.executable} echo.py", background=True)
    url = e2b.urls["e2b"]
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8090"}
    async with aiohttp.ClientSession() as session:
        await wait_for_port(session, url, headers)
        async with session.ws_connect(f"{url}/talk", headers=headers, protocols=["echo"]) as socket:
            await socket.send_str("abc")
            assert await socket.receive_str(timeout=60) == "cba"
            assert socket.protocol == "echo"

        target = yarl.URL(f"{url}/upload?a=%2Fb", encoded=True)

        async def body() -> Any:
            for _ in range(50):
                yield b"x" * 100_000

        async with session.post(target, data=body(), headers=headers) as answer:
            told = await answer.json()
        assert told == {"size": 5_000_000, "query": "a=%2Fb", "host": "localhost:8090"}


async def test_a_closed_port_and_a_missing_sandbox_say_so_in_the_words_the_sdk_looks_for(
    create: Create, e2b: Handle
) -> None:
    sandbox = await asyncio.to_thread(create)
    url = e2b.urls["e2b"]
    async with aiohttp.ClientSession() as session:
        headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8091"}
        async with session.get(url, headers=headers) as answer:
            assert (answer.status, "port is not open" in await answer.text()) == (502, True)
        headers = {"E2b-Sandbox-Id": "inotthere", "E2b-Sandbox-Port": "8091"}
        async with session.get(url, headers=headers) as answer:
            assert (answer.status, "was not found" in await answer.text()) == (502, True)


async def test_envd_wants_the_token_of_that_sandbox(create: Create, e2b: Handle) -> None:
    first, second = await asyncio.to_thread(create), await asyncio.to_thread(create)
    url = e2b.urls["e2b"] + "/process.Process/List"
    async with aiohttp.ClientSession() as session:
        for token in ("", second._envd_access_token, "ea_wrong"):
            headers = {"E2b-Sandbox-Id": first.sandbox_id, "X-Access-Token": token}
            async with session.post(url, json={}, headers=headers) as answer:
                assert answer.status == 401
        headers["X-Access-Token"] = first._envd_access_token
        async with session.post(url, json={}, headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, {"processes": []})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/process.Process/Start", b"\x00\xff\xff\xff\xff"),
        ("/process.Process/Start", b"\x00\x00\x00\x00\x03not"),
        ("/process.Process/Start", b"\x00\x00\x00\x00\x02[]"),
        ("/process.Process/Connect", b""),
        ("/filesystem.Filesystem/WatchDir", b"\x00\x00\x00\x00\x02{}garbage"),
    ],
)
async def test_broken_streams_are_answered_and_harm_nobody(
    create: Create, e2b: Handle, path: str, body: bytes
) -> None:
    sandbox = await asyncio.to_thread(create)
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "X-Access-Token": sandbox._envd_access_token,
        "Content-Type": "application/connect+json",
        "Connect-Timeout-Ms": "2000",
    }
    url = e2b.urls["e2b"] + path
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        assert b'"error"' in await answer.read()
    done = await asyncio.to_thread(sandbox.commands.run, "echo well")
    assert done.stdout == "well\n"


async def test_the_async_sdk_streams_watches_and_feeds_stdin(options: dict[str, Any]) -> None:
    sandbox = await sdk.AsyncSandbox.create(**options)
    try:
        seen: asyncio.Queue[Any] = asyncio.Queue()
        watch = await sandbox.files.watch_dir(".", on_event=seen.put_nowait)
        command = await sandbox.commands.run("cat > copied; echo done", background=True, stdin=True)
        for piece in ("first ", "second"):
            await sandbox.commands.send_stdin(command.pid, piece)
        await command.close_stdin()
        assert (await command.wait()).stdout == "done\n"
        assert await sandbox.files.read("copied") == "first second"
        event = await asyncio.wait_for(seen.get(), 60)
        assert (event.type.value, event.name) == ("create", "copied")
        await watch.stop()
        chunks: list[str] = []
        await sandbox.commands.run("for i in 1 2 3; do echo $i; sleep 0.2; done", on_stdout=chunks.append)
        assert "".join(chunks) == "1\n2\n3\n"
        assert len(chunks) > 1
    finally:
        await sandbox.kill()


async def test_many_sandboxes_at_once(options: dict[str, Any], e2b: Handle) -> None:
    async def one(number: int) -> str:
        sandbox = await sdk.AsyncSandbox.create(metadata={"many": "yes"}, **options)
        try:
            return (await sandbox.commands.run(f"echo {number}")).stdout.strip()
        finally:
            await sandbox.kill()

    assert await asyncio.gather(*(one(n) for n in range(20))) == [str(n) for n in range(20)]
    assert [s for s in e2b.state()["sandboxes"]["e2b"] if s["metadata"].get("many")] == []


def test_files_go_where_their_absolute_paths_say(create: Create) -> None:
    sandbox = create()
    written = sandbox.files.write_files(
        [{"path": "/tmp/one.txt", "data": "1"}, {"path": "/tmp/in/two.txt", "data": "2"}]
    )
    assert [one.path for one in written] == ["/tmp/one.txt", "/tmp/in/two.txt"]
    assert sandbox.files.read("/tmp/in/two.txt") == "2"
    assert not sandbox.files.exists("/home/user/tmp")


def test_directories_outside_the_home_are_made_and_handed_over(create: Create) -> None:
    sandbox = create()
    sandbox.files.make_dir("/workspace/deep")
    sandbox.files.write("/data/in.txt", "x")
    done = sandbox.commands.run(
        "touch /workspace/deep/mine /data/mine && stat -c %U /workspace/deep /data/in.txt"
    )
    owner = sandbox.commands.run("id -un").stdout.strip()
    assert done.stdout.split() == [owner, owner]


def test_stdin_larger_than_a_mebibyte_arrives(create: Create) -> None:
    sandbox = create()
    waiting = sandbox.commands.run("wc -c", background=True, stdin=True)
    sandbox.commands.send_stdin(waiting.pid, "x" * 3_000_000)
    sandbox.commands.close_stdin(waiting.pid)
    assert waiting.wait().stdout.strip() == "3000000"


def test_the_templates_that_are_there_exist(options: dict[str, Any]) -> None:
    options = {name: value for name, value in options.items() if name != "sandbox_url"}
    assert sdk.Template.exists("base", **options)
    assert not sdk.Template.exists("no-such-template", **options)


async def test_only_a_get_reads_and_only_a_post_writes(create: Create, e2b: Handle) -> None:
    sandbox = await asyncio.to_thread(create)
    await asyncio.to_thread(sandbox.files.write, "/tmp/kept", "kept")
    url = e2b.urls["e2b"] + "/files?path=/tmp/kept"
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token}
    async with aiohttp.ClientSession(headers=headers) as session:
        for method in ("HEAD", "PUT", "DELETE", "PATCH"):
            async with session.request(
                method, url, headers={"Content-Type": "application/octet-stream"}
            ) as answer:
                assert answer.status == 405, method
        async with session.get(url) as answer:
            assert await answer.text() == "kept"


async def test_a_signed_address_is_for_the_user_who_was_signed(create: Create, e2b: Handle) -> None:
    if os.geteuid() != 0:
        pytest.skip("all users of a sandbox are one where lowtide does not run as root")
    sandbox = await asyncio.to_thread(create)
    command = "echo root > /root/file; chmod 600 /root/file"
    await asyncio.to_thread(sandbox.commands.run, command, user="root")
    parts = ["/root/file", "read", "", sandbox._envd_access_token]
    signature = base64.b64encode(hashlib.sha256(":".join(parts).encode()).digest()).decode().rstrip("=")
    query = {"path": "/root/file", "signature": f"v1_{signature}"}
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "Authorization": "Basic cm9vdDo="}  # root
    async with (
        aiohttp.ClientSession() as session,
        session.get(e2b.urls["e2b"] + "/files", params=query, headers=headers) as answer,
    ):
        assert "Permission denied" in await answer.text()


async def test_a_list_of_everything_holds_up_nobody(create: Create, e2b: Handle) -> None:
    sandbox = await asyncio.to_thread(create)
    url = e2b.urls["e2b"] + "/filesystem.Filesystem/"
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(url + "ListDir", json={"path": "/", "depth": 2**31 - 1}) as answer:
            assert answer.status in (200, 429), await answer.text()  # a machine may have few files
        async with session.post(url + "Stat", json={"path": "/tmp"}) as answer:
            assert answer.status == 200
