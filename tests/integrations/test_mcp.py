"""`lowtide mcp` as its clients meet it: the nine tools, real processes over stdio and HTTP, and nothing left after a kill."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.crash.stalls import Stalls

mcp = pytest.importorskip("mcp")

from lowtide import Sandbox  # noqa: E402
from lowtide.errors import ValidationError  # noqa: E402
from lowtide.integrations.mcp.answers import bundles, sendable  # noqa: E402
from lowtide.integrations.mcp.client_config import own_token  # noqa: E402
from lowtide.integrations.mcp.connection import Bounds, Connection  # noqa: E402
from lowtide.integrations.mcp.http import Clients  # noqa: E402
from lowtide.integrations.mcp.server import one_connection  # noqa: E402

NINE = {
    "run_command", "run_code", "sandbox_create", "sandbox_list", "sandbox_end",
    "file_read", "file_write", "file_list", "port_url",
}  # fmt: skip
PROMISED_SECONDS = 1.0
FACTOR = 3.0


@contextlib.asynccontextmanager
async def connected(**bounds: Any) -> AsyncIterator[Any]:
    """A client of a server in this process, as `mcp` offers it for tests."""
    server = one_connection({"provider": "local", "tags": ["mcp-test"]}, Bounds(**bounds))
    async with mcp.Client(server) as client:
        yield client


async def call(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    answer = await client.call_tool(tool, arguments)
    assert not answer.is_error, answer.content
    assert json.loads(answer.content[0].text) == answer.structured_content, (
        "text for clients without structure"
    )
    return dict(answer.structured_content)


async def refused(client: Any, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error, answer.structured_content
    return str(answer.content[0].text)


async def test_there_are_nine_tools_each_described_with_hints_and_a_schema_of_its_answer() -> None:
    async with connected() as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == NINE
    for tool in tools.values():
        assert tool.description
        assert tool.annotations.read_only_hint is not None
        assert tool.output_schema["type"] == "object"
        assert "ctx" not in tool.input_schema["properties"]
    assert tools["file_read"].annotations.read_only_hint
    assert tools["sandbox_end"].annotations.destructive_hint


async def test_calls_share_one_sandbox_that_ends_with_the_connection() -> None:
    async with connected() as client:
        first = await call(client, "run_command", command="echo one | tee /tmp/one; echo err >&2; exit 3")
        assert (first["exit_code"], first["stdout"], first["stderr"]) == (3, "one\n", "err\n")
        assert (first["ended_by"], first["stdout_dropped_bytes"]) == ("itself", 0)
        second = await call(client, "run_command", command="cat /tmp/one - && pwd", stdin="two\n", cwd="/tmp")
        assert (second["stdout"], second["sandbox"]) == ("one\ntwo\n/tmp\n", first["sandbox"])
        shown = (await call(client, "sandbox_list"))["sandboxes"]
        assert shown == [
            {"sandbox": first["sandbox"], "provider": "local", "status": "running", "implicit": True}
        ]
    assert await Sandbox.list(tags=["mcp-test"], provider="local") == []


async def test_code_keeps_its_variables_and_tells_of_errors() -> None:
    async with connected() as client:
        await call(client, "run_code", code="x = 20")
        answer = await call(client, "run_code", code="print('hi'); x + 1")
        assert answer["stdout"] == "hi\n"
        assert answer["results"][0]["text/plain"] == "21"
        failed = await call(client, "run_code", code="1 / 0")
        assert "ZeroDivisionError" in failed["error"]


async def test_files_in_parts_text_and_bytes() -> None:
    async with connected() as client:
        binary = bytes(range(256))
        await call(
            client,
            "file_write",
            path="/tmp/d/b",
            content=base64.b64encode(binary).decode(),
            encoding="base64",
        )
        answer = await call(client, "file_read", path="/tmp/d/b")
        assert (base64.b64decode(answer["content"]), answer["encoding"]) == (binary, "base64")
        await call(client, "file_write", path="/tmp/d/t", content="äöü" * 1000, executable=True)
        text, offset = "", 0
        while True:  # parts that cut characters in two come together again
            part = await call(client, "file_read", path="/tmp/d/t", offset=offset, max_bytes=1001)
            text += part["content"]
            offset += len(part["content"].encode())
            if not part["dropped_bytes"]:
                break
        assert text == "äöü" * 1000
        listed = await call(client, "file_list", path="/tmp/d")
        assert [(one["name"], one["kind"], one["size"]) for one in listed["entries"]] == [
            ("b", "file", 256),
            ("t", "file", 6000),
        ]
        assert "SandboxFileNotFoundError" in await refused(client, "file_read", path="/nowhere")
        assert "base64" in await refused(client, "file_write", path="/tmp/x", content="?", encoding="base64")


async def test_output_beyond_the_bound_is_cut_in_the_middle_and_counted() -> None:
    async with connected(output_bytes=2000, collected_bytes=1 << 20) as client:
        answer = await call(client, "run_command", command="echo begin; seq 100000; echo end")
        assert answer["stdout"].startswith("begin\n")
        assert answer["stdout"].endswith("end\n")
        whole = len("begin\nend\n") + sum(len(str(n)) + 1 for n in range(1, 100001))
        assert answer["stdout_dropped_bytes"] == whole - 2000
        flood = await call(client, "run_command", command="yes", timeout_seconds=60)
        assert (flood["ended_by"], flood["exit_code"]) == ("output limit", None)
        hostile = await call(
            client, "run_command", command=r"printf '\377\000\033[2J\351'; printf '\200' >&2"
        )
        assert (hostile["stdout"], hostile["stderr"]) == ("\ufffd\0\x1b[2J\ufffd", "\ufffd")


async def test_a_name_that_is_no_text_does_not_take_the_rest_of_its_directory_with_it() -> None:
    async with connected() as client:
        await call(client, "run_command", command=r"mkdir /tmp/n; cd /tmp/n; touch good $'bad\xff'")
        listed = await call(client, "file_list", path="/tmp/n")
        assert [one["name"] for one in listed["entries"]] == [r"bad\udcff", "good"]


async def test_a_file_without_an_end_is_given_up_when_its_time_is_over() -> None:
    async with connected(timeout_seconds=2) as client:
        await call(client, "run_command", command="truncate -s 1T /tmp/endless")
        assert "within 2 seconds" in await refused(client, "file_read", path="/tmp/endless", offset=10**12)
        assert (await call(client, "file_read", path="/tmp/endless", max_bytes=1))["content"] == "\0"


def test_values_are_bounded_by_their_number_and_their_kinds_too() -> None:
    kept, dropped = bundles(({"text/plain": ""},) * 100_000 + ({"k" * 5000: "v"}, {"\ud800": "last"}), 1000)
    assert len(kept) < 100
    assert len("".join(dropped)) < 50_000
    assert dropped[-1] == f"and {100_002 - len(kept) - 100} more"
    json.dumps(sendable(bundles(({"\ud800": "\ud800"},), 1000)[0]), ensure_ascii=False).encode()


async def test_a_sandbox_that_is_slow_to_start_counts_and_holds_up_nobody_else() -> None:
    connection = Connection({"provider": "local"}, Bounds(sandboxes=2))
    name, _ = await connection.sandbox(None)
    real, forever = connection._session, asyncio.Event()
    connection._session = SimpleNamespace(sandbox=lambda: forever.wait())  # type: ignore[assignment]
    slow = asyncio.create_task(connection.create({}))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(10):
            assert (await connection.sandbox(None))[0] == name
            with pytest.raises(ValidationError, match="has 2 sandboxes"):
                await connection.create({})
    finally:
        slow.cancel()
        connection._session = real
        await connection.close()


async def test_calls_wait_for_their_turn_and_an_end_does_not() -> None:
    async with connected(calls=2) as client:
        first = await call(client, "run_command", command="echo begin")
        count = "n=$(ls /tmp/at-work-* 2>/dev/null | wc -l); touch /tmp/at-work-$$; sleep 0.3; rm /tmp/at-work-$$; echo $n"
        answers = await asyncio.gather(*(call(client, "run_command", command=count) for _ in range(6)))
        assert {int(one["stdout"]) for one in answers} <= {0, 1}
        held = [
            asyncio.create_task(client.call_tool("run_command", {"command": "sleep 60"})) for _ in range(3)
        ]
        await asyncio.sleep(0.5)
        assert (await call(client, "sandbox_end", sandbox=first["sandbox"]))["outcome"] == "destroyed"
        await asyncio.gather(*held, return_exceptions=True)


async def test_an_error_is_no_longer_than_a_page_whatever_it_names() -> None:
    async with connected() as client:
        said = await refused(client, "file_read", path="/tmp/" + "a/" * 100_000)
        assert "bytes left out" in said
        assert len(said) < 10_000


async def test_a_part_of_a_file_is_no_longer_than_any_output() -> None:
    async with connected(output_bytes=2000) as client:
        await call(client, "file_write", path="/tmp/long", content="x" * 5000)
        part = await call(client, "file_read", path="/tmp/long", max_bytes=1 << 30)
        assert (len(part["content"]), part["dropped_bytes"]) == (2000, 3000)


async def test_a_command_out_of_time_answers_with_what_it_printed_and_told_of_its_progress() -> None:
    told: list[float] = []

    async def progress(so_far: float, total: float | None, message: str | None) -> None:
        assert total == 3
        told.append(so_far)

    async with connected() as client:
        answer = await client.call_tool(
            "run_command",
            {"command": "echo so far; sleep 1000", "timeout_seconds": 3},
            progress_callback=progress,
        )
        assert answer.structured_content["ended_by"] == "timeout"
        assert answer.structured_content["stdout"] == "so far\n"
        assert told
        assert "at most 3600" in await refused(client, "run_command", command="true", timeout_seconds=7200)
        assert (await call(client, "run_command", command="pgrep -c sleep; true"))["stdout"] == "0\n"


async def test_more_sandboxes_up_to_a_bound_and_none_of_anybody_else() -> None:
    async with connected(sandboxes=2) as client, Sandbox.run(provider="local") as others:
        made = await call(client, "sandbox_create", env={"WORD": "here"})
        ran = await call(client, "run_command", command="echo $WORD", sandbox=made["sandbox"])
        assert (ran["stdout"], ran["sandbox"]) == ("here\n", made["sandbox"])
        await call(client, "run_command", command="true")
        assert "sandbox_end" in await refused(client, "sandbox_create")
        assert "no sandbox" in await refused(client, "run_command", command="true", sandbox=others.sandbox_id)
        assert "no sandbox" in await refused(client, "sandbox_end", sandbox=others.sandbox_id)
        for directory in ("/", "/root", "./here", "~", " "):  # of this machine
            assert "no directory" in await refused(client, "sandbox_create", image=directory)
        ended = await call(client, "sandbox_end", sandbox=made["sandbox"])
        assert ended["outcome"] == "destroyed"
        await call(client, "sandbox_create")


async def test_a_sandbox_that_is_gone_is_said_once_and_then_made_anew() -> None:
    async with connected() as client:
        name = (await call(client, "run_command", command="true"))["sandbox"]
        await Sandbox.delete(name)
        assert "a new one" in await refused(client, "run_command", command="true")
        assert (await call(client, "run_command", command="true"))["sandbox"] != name


async def test_a_port_has_an_address() -> None:
    async with connected() as client:
        await call(client, "run_command", command="mkdir /tmp/w; echo served > /tmp/w/f")
        await call(client, "run_command", command="python3 -m http.server 8123 -d /tmp/w >/dev/null 2>&1 & sleep 1000", timeout_seconds=1)  # fmt: skip
        # The command's whole tree ended with its time; a server that is to stay leaves it.
        await call(client, "run_command", command="setsid python3 -m http.server 8123 -d /tmp/w >/dev/null 2>&1 </dev/null & while ! python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))' 2>/dev/null; do sleep 0.1; done")  # fmt: skip
        at = await call(client, "port_url", port=8123)
        request = urllib.request.Request(f"{at['url']}/f", headers=at["headers"])
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.read() == b"served\n"


# Real processes.


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = Path(os.environ["LOWTIDE_HOME"]) / f"mcp-{os.urandom(4).hex()}"
    place.mkdir(mode=0o700)
    return place


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "LOWTIDE_HOME": str(home), "PYTHONUNBUFFERED": "1"}


def shown(home: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "ls", "--json"],
        env=environment(home),
        capture_output=True,
        check=True,
    )
    return [row["id"] for row in json.loads(done.stdout)]


def wait_until_empty(home: Path, seconds: float = PROMISED_SECONDS) -> None:
    """`lowtide ls` shows nothing within the promise, times the factor for a busy machine, plus its stalls."""
    began, stalls = time.monotonic(), Stalls(home)
    while left := shown(home):
        took = time.monotonic() - began
        assert took < seconds * FACTOR + stalls.seconds(), f"after {took:.1f} s: {left}"
        stalls.sleep(0.05)


CLIENT = """
import asyncio, os, sys
import mcp
from mcp.client.stdio import StdioServerParameters
async def main():
    server = StdioServerParameters(command=sys.executable, args=["-m", "lowtide", "mcp", "-p", "local"], env=dict(os.environ))
    async with mcp.Client(server) as client:
        answer = await client.call_tool("run_command", {"command": "echo ready"})
        print(answer.structured_content["stdout"].strip(), flush=True)
        if sys.argv[1:] == ["busy"]:
            await client.call_tool("run_command", {"command": "sleep 1000", "timeout_seconds": 1000})
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@contextlib.contextmanager
def stdio_client(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments],
        env=environment(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            yield client
        finally:
            client.kill()


def child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("busy", [(), ("busy",)], ids=["idle", "in the middle of a command"])
@pytest.mark.parametrize("side", ["client", "server"])
def test_kill_dash_nine_of_either_side_leaves_nothing(home: Path, side: str, busy: tuple[str, ...]) -> None:
    with stdio_client(home, *busy) as client:
        server = child(client.pid)
        assert len(shown(home)) == 1
        os.kill(client.pid if side == "client" else server, signal.SIGKILL)
        wait_until_empty(home)
    deadline = time.monotonic() + 30
    while not gone(server):
        assert time.monotonic() < deadline, "the server outlives its client"
        time.sleep(0.05)


def test_a_client_that_leaves_takes_everything_with_it(home: Path) -> None:
    with stdio_client(home) as client:
        assert client.stdin is not None
        client.stdin.close()
        assert client.wait(60) == 0
        assert shown(home) == []


def test_a_client_that_closes_our_input_and_reads_nothing_holds_neither_sandboxes_nor_the_server(
    home: Path,
) -> None:
    command = [sys.executable, "-m", "lowtide", "mcp", "-p", "local"]
    flood = {"name": "run_command", "arguments": {"command": "head -c 60000 /dev/zero | tr '\\0' x"}}
    told = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    said: list[dict[str, Any]] = [{"id": 0, "method": "initialize", "params": told}]
    said += [{"method": "notifications/initialized"}]
    said += [{"id": n, "method": "tools/call", "params": flood} for n in range(1, 4)]
    with subprocess.Popen(
        command, env=environment(home), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(
                b"".join(json.dumps({"jsonrpc": "2.0", **one}).encode() + b"\n" for one in said)
            )
            server.stdin.flush()
            deadline = time.monotonic() + 60
            while waiting(server.stdout) < 60_000:  # one answer is more than a pipe holds
                assert time.monotonic() < deadline
                time.sleep(0.05)
            server.stdin.close()
            wait_until_empty(home)
            assert server.wait(30) == 0
        finally:
            server.kill()


def waiting(pipe: IO[bytes]) -> int:
    """How many bytes are in it."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


@contextlib.contextmanager
def http_server(home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The server, its address and its token."""
    with subprocess.Popen(
        [sys.executable, "-m", "lowtide", "mcp", "--http", "0", "-p", "local", *arguments],
        env=environment(home),
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            found = re.search(r"(http://127\.0\.0\.1:\d+/mcp) \(token: (.*)\)", line)
            assert found, line
            path = Path(found[2])
            assert path.stat().st_mode & 0o777 == 0o600
            yield server, found[1], path.read_text()
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


HTTP_CLIENT = """
import asyncio, os, sys
import httpx2, mcp
from mcp.client.streamable_http import streamable_http_client
async def main():
    url, mode = sys.argv[1:3]
    async with httpx2.AsyncClient(headers={"Authorization": "Bearer " + os.environ["TOKEN"]}, timeout=60) as http:
        async with mcp.Client(streamable_http_client(url, http_client=http), mode=mode) as client:
            answer = await client.call_tool("run_command", {"command": "true"})
            print(answer.structured_content["sandbox"], flush=True)
            await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@contextlib.contextmanager
def http_client(url: str, token: str, mode: str = "legacy") -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", HTTP_CLIENT, url, mode],
        env={**os.environ, "TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as client:
        try:
            assert client.stdout is not None
            yield client, client.stdout.readline().strip()
        finally:
            client.kill()


def test_over_http_each_client_has_its_own_and_its_leaving_or_death_ends_that_alone(home: Path) -> None:
    with (
        http_server(home, "--idle", "2s") as (_, url, token),
        http_client(url, token) as (leaving, first),
        http_client(url, token) as (dying, second),
        http_client(url, token) as (_staying, third),
    ):
        assert sorted(shown(home)) == sorted([first, second, third])
        assert leaving.stdin is not None
        leaving.stdin.close()
        assert leaving.wait(60) == 0  # its DELETE was answered
        assert sorted(shown(home)) == sorted([second, third])
        dying.kill()
        began, stalls = time.monotonic(), Stalls(home)
        while second in shown(home):
            assert time.monotonic() - began < (2 + PROMISED_SECONDS) * FACTOR + stalls.seconds()
            stalls.sleep(0.1)
        assert shown(home) == [third]  # longer quiet than --idle, but its stream is open


def test_over_http_kill_dash_nine_of_the_server_leaves_nothing(home: Path) -> None:
    with http_server(home) as (server, url, token), http_client(url, token) as (_, sandbox):
        assert shown(home) == [sandbox]
        server.kill()
        wait_until_empty(home)


def test_over_http_clients_without_sessions_end_by_their_silence(home: Path) -> None:
    with (
        http_server(home, "--idle", "3s") as (_, url, token),
        http_client(url, token, "2026-07-28") as (client, sandbox),
    ):
        assert sandbox
        client.kill()
        wait_until_empty(home, 3 + PROMISED_SECONDS)


def test_over_http_a_refusal_waits_for_the_rest_of_what_it_refuses(home: Path) -> None:
    """Not for ever: and one that came in the midst of it would be lost with the connection."""
    body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
    with http_server(home) as (_, url, _token):
        address = urllib.parse.urlsplit(url)
        head = f"POST /mcp HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        for sent in (body, b""):
            with socket.create_connection((address.hostname, address.port), timeout=0.2) as connection:
                connection.sendall(head.encode())
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(30)
                connection.sendall(sent)
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.split()[1] == b"401"


def test_over_http_nothing_is_told_without_the_token_or_to_another_host(home: Path) -> None:
    with http_server(home) as (_, url, token):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": f"Bearer {token}x"}, 401),
            ({"Authorization": f"Bearer {token}", "Host": "evil.example"}, 421),
            ({"Authorization": f"Bearer {token}", "Origin": "http://evil.example"}, 403),
        ):
            body = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
            more = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
            with pytest.raises(urllib.error.HTTPError) as refusal:
                urllib.request.urlopen(urllib.request.Request(url, body, {**more, **headers}), timeout=30)
            assert refusal.value.code == status, headers
            assert token not in refusal.value.read().decode()


async def asked(clients: Clients, method: str = "POST", **headers: str) -> int:
    """The status of one request."""
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    said = {"authorization": "Bearer t", **headers}
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in said.items()]
    await clients({"type": "http", "path": "/mcp", "method": method, "headers": lines}, receive, send)
    return statuses[0]


def behind() -> Clients:
    """Clients of a server that opens the session "given" for whoever has none, and says yes to everything."""

    async def yes(scope: Any, receive: Any, send: Any) -> None:
        opened = [] if "mcp-session-id" in str(scope["headers"]) else [(b"mcp-session-id", b"given")]
        await send({"type": "http.response.start", "status": 200, "headers": opened})

    clients = Clients({"provider": "local"}, Bounds(), token="t", idle_seconds=100)
    clients._app = yes  # type: ignore[assignment]
    return clients


async def test_over_http_a_session_that_was_guessed_or_has_ended_is_not_found() -> None:
    clients = behind()
    assert await asked(clients, mcp_session_id="given") == 404
    assert await asked(clients) == 200
    assert await asked(clients, mcp_session_id="given") == 200
    for version in ("2025-06-18", "2026-07-28"):
        assert await asked(clients, mcp_session_id="guessed", mcp_protocol_version=version) == 404
    await clients._end("given")
    # Not a new sandbox without a word: the client would take its files for lost, or for still there.
    assert await asked(clients, mcp_session_id="given", mcp_protocol_version="2026-07-28") == 404
    assert not clients._clients


async def test_over_http_a_client_that_names_a_version_as_it_opens_its_session_has_one() -> None:
    clients = behind()
    assert await asked(clients, mcp_protocol_version="2025-06-18") == 200
    assert await asked(clients, mcp_session_id="given", mcp_protocol_version="2025-06-18") == 200


async def test_over_http_what_is_no_stream_of_a_session_does_not_shorten_anybodys_patience() -> None:
    clients = behind()
    await asked(clients, "GET", mcp_protocol_version="2026-07-28")
    assert not clients._clients[""].had_stream
    await asked(clients)
    await asked(clients, "GET", mcp_session_id="given")
    assert clients._clients["given"].had_stream


async def test_over_http_an_end_that_takes_long_does_not_keep_the_others_alive() -> None:
    clients, ended = behind(), asyncio.Event()

    async def end() -> None:
        ended.set()

    for name, close in (("stuck", asyncio.Event().wait), ("other", end)):
        clients._clients[name] = SimpleNamespace(gone=lambda _: True, connection=SimpleNamespace(close=close))  # type: ignore[assignment]
    looking = asyncio.create_task(clients._look())
    try:
        await asyncio.wait_for(ended.wait(), 30)
    finally:
        for task in (looking, *clients._ending):
            task.cancel()


@pytest.mark.parametrize("said", ["", " \n"])
def test_an_empty_token_lets_nobody_in(home: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_HOME", str(home))
    (home / "mcp-token").write_text(said)
    with pytest.raises(ValidationError, match="mcp-token is empty"):
        own_token()
    monkeypatch.setenv("LOWTIDE_MCP_TOKEN", "secret\n")
    assert own_token()[0] == "secret"


def test_what_cannot_be_served_is_said_with_the_way_out(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, said in (
            ([str(taken.getsockname()[1])], "cannot be served: Address already in use; 0 takes any"),
            (["0", "--idle", "0"], "say more than 0"),
            (["0"], "remove it, or set another"),
        ):
            home.mkdir(exist_ok=True)
            (home / "mcp-token").write_bytes(b"\xff" if arguments == ["0"] else b"token")
            command = [sys.executable, "-m", "lowtide", "mcp", "--http", *arguments]
            done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=60)
            assert done.returncode == 2, done.stderr
            assert said in done.stderr


def test_print_config_is_what_clients_take(home: Path) -> None:
    import tomllib

    command = [sys.executable, "-m", "lowtide", "--debug", "mcp", "--memory", "1Gi", "--print-config"]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, check=True)
    blocks = re.split(r"^# .*\n", done.stdout, flags=re.M)[1:]
    server = json.loads(blocks[0])["mcpServers"]["lowtide"]
    assert server["args"] == ["-m", "lowtide", "mcp", "--memory", "1Gi"]
    assert server["env"]["LOWTIDE_HOME"] == str(home)
    assert json.loads(blocks[1])["servers"]["lowtide"]["command"] == sys.executable
    assert tomllib.loads(blocks[3])["mcp_servers"]["lowtide"]["args"] == server["args"]
    assert (
        subprocess.run([server["command"], *server["args"]], stdin=subprocess.DEVNULL, timeout=60).returncode
        == 0
    )
    over_http = subprocess.run(
        [*command, "--http", "8765"], env=environment(home), capture_output=True, text=True, check=True
    )
    assert (home / "mcp-token").read_text() in over_http.stdout
    (for_a_shell,) = [line for line in over_http.stdout.splitlines() if line.startswith("claude mcp add")]
    assert (home / "mcp-token").read_text() not in for_a_shell
    assert f"$(cat {home}/mcp-token)" in for_a_shell
