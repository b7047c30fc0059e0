"""The action server's HTTP contract, spoken by a plain client as agents' programs speak it."""

from __future__ import annotations

import http.client
import io
import json
import secrets
import socket
import time
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from lowtide.runtime import LocalRuntime
from lowtide.runtime.served import DIRECTORY, Served

ANSWER_SECONDS = 120.0


class Caller:
    def __init__(self, runtime: LocalRuntime) -> None:
        self.runtime = runtime
        assert isinstance(runtime._backend, Served)
        self.key = runtime._backend._key
        self.address = urlsplit(runtime.server_url().result(ANSWER_SECONDS).url).netloc

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = "right",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        given = dict(headers or {})
        if key is not None:
            given["X-Session-API-Key"] = self.key if key == "right" else key
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers["Content-Type"]
            return answer.status, json.loads(data) if kind == "application/json" else data
        finally:
            connection.close()

    def action(self, kind: str, timeout: float | None = None, **arguments: Any) -> tuple[int, Any]:
        return self(
            "POST", "/execute_action", {"action": {"action": kind, "args": arguments, "timeout": timeout}}
        )

    def upload(self, name: str, data: bytes, **query: str) -> tuple[int, Any]:
        boundary = secrets.token_hex(8)
        body = (
            (
                f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
                "Content-Type: application/octet-stream\r\n\r\n"
            ).encode()
            + data
            + f"\r\n--{boundary}--\r\n".encode()
        )
        path = "/upload_file?" + "&".join(f"{k}={quote(v)}" for k, v in query.items())
        return self("POST", path, body, headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})


@pytest.fixture(scope="module")
def call() -> Iterator[Caller]:
    with LocalRuntime() as runtime:
        yield Caller(runtime)


@pytest.fixture
def folder() -> str:
    return f"/tmp/h-{secrets.token_hex(4)}"


def test_alive_and_info_need_no_key(call: Caller) -> None:
    assert call("GET", "/alive", key=None) == (200, {"status": "ok"})
    status, info = call("GET", "/server_info", key=None)
    assert status == 200
    assert info["uptime"] > 0
    assert set(info["resources"]) == {"cpu_percent", "memory", "disk", "io"}
    assert info["resources"]["memory"]["rss"] > 1 << 20


@pytest.mark.parametrize("key", [None, "", "wrong", "ä"])
def test_everything_else_is_refused_without_the_key(call: Caller, key: str | None) -> None:
    for method, path in (
        ("POST", "/execute_action"),
        ("POST", "/upload_file?destination=/tmp"),
        ("GET", "/download_files?path=/etc"),
        ("POST", "/list_files"),
        ("GET", "/vscode/connection_token"),
        ("POST", "/shutdown"),
        ("GET", "/no/such/path"),
    ):
        assert call(method, path, {}, key=key)[0] == 403
    assert call("GET", "/alive")[0] == 200


def test_the_key_is_nowhere_a_command_can_look(call: Caller) -> None:
    begin, end = call.key[:10], call.key[10:20]  # in two, so that no command line of this test holds it
    script = (
        f"printf %s%s {begin} {end} >/tmp/pattern; env | grep -c -f /tmp/pattern; "
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | grep -a -c -f /tmp/pattern; "
        f"grep -ra -l -f /tmp/pattern {DIRECTORY} /tmp/*.pyz | wc -l; "
        # The server's own memory, which processes of the same user may usually read.
        "p=$(pgrep -f 'actionserver.*serve' | head -1); "
        "dd if=/proc/$p/mem of=/dev/null bs=1 count=1 2>&1 | grep -ci permission"
    )
    status, seen = call.action("run", command=script, is_static=True)
    assert status == 200
    assert seen["content"].split() == ["0", "0", "0", "1"], seen


def test_a_run_in_the_shape_clients_know(call: Caller) -> None:
    status, seen = call.action("run", command="echo hi", thought="", is_input=False, invented_later=True)
    assert status == 200
    assert seen["observation"] == "run"
    assert seen["content"] == "hi\n"
    assert seen["extras"]["command"] == "echo hi"
    assert seen["success"] is True
    metadata = seen["extras"]["metadata"]
    assert metadata["exit_code"] == 0
    for name in ("pid", "username", "hostname", "working_dir", "py_interpreter_path", "prefix", "suffix"):
        assert name in metadata


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b"[]",
        b'{"action": {"action": "fly", "args": {}}}',
        b'{"action": {"action": "run", "args": {"command": 7}}}',
        b'{"action": {"action": "upload", "args": {"source": "a", "destination": "b"}}}',
    ],
)
def test_what_makes_no_sense_is_400(call: Caller, body: bytes) -> None:
    status, answer = call("POST", "/execute_action", body)
    assert status == 400
    assert answer["detail"]


def test_unknown_paths_and_methods(call: Caller) -> None:
    assert call("GET", "/nothing")[0] == 404
    assert call("GET", "/execute_action")[0] == 405


def test_a_file_goes_up_into_a_new_directory_and_replaces_the_old(call: Caller, folder: str) -> None:
    for content in (b"one", b"\0\r\n--two"):
        assert call.upload("ä b.bin", content, destination=f"{folder}/new")[0] == 200
        status, data = call("GET", f"/download_files?path={quote(folder)}/new/{quote('ä b.bin')}&raw=1")
        assert (status, data) == (200, content)


def test_a_directory_goes_up_as_a_zip_and_comes_down_as_one(call: Caller, folder: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("sub/x.txt", "x" * 100_000)
        archive.writestr("y.txt", "y")
    assert call.upload("d.zip", packed.getvalue(), destination=folder, recursive="true")[0] == 200
    assert call("POST", "/list_files", {"path": folder}) == (200, ["sub/", "y.txt"])
    status, data = call("GET", f"/download_files?path={folder}")
    assert status == 200
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("sub/x.txt") == b"x" * 100_000
    status, data = call("GET", f"/download_files?path={folder}/y.txt")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["y.txt"]
    # A zip that is not to be unpacked stays one.
    assert call.upload("kept.zip", packed.getvalue(), destination=folder)[0] == 200
    assert "kept.zip" in call("POST", "/list_files", {"path": folder})[1]


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/abs.txt", "a/../../out.txt"])
def test_a_zip_that_would_leave_its_directory_is_refused_whole(call: Caller, folder: str, name: str) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("first.txt", "1")
        archive.writestr(name, "2")
    status, answer = call.upload("d.zip", packed.getvalue(), destination=folder, recursive="true")
    assert status == 400
    assert "outside" in answer["detail"]
    assert call("POST", "/list_files", {"path": folder}) == (200, [])


def test_statuses_of_paths(call: Caller, folder: str) -> None:
    assert call.upload("x", b"x", destination="relative/path")[0] == 400
    assert call.upload("x", b"x", destination="")[0] == 400
    assert call("GET", "/download_files?path=relative")[0] == 400
    assert call("GET", f"/download_files?path={folder}/missing")[0] == 404
    assert call("GET", "/download_files?path=/tmp&raw=1")[0] == 409
    assert call.upload("x", b"x", destination="/etc/hostname/below")[0] == 409
    assert call("POST", "/list_files", {"path": f"{folder}/missing"}) == (200, [])
    assert call("POST", "/list_files", {"path": 3})[0] == 400


def test_requests_that_are_too_large_are_refused(call: Caller) -> None:
    host, _, port = call.address.partition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        head = f"POST /execute_action HTTP/1.1\r\nX-Session-API-Key: {call.key}\r\nContent-Length: 999999999999\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(4096)
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(b"GET /alive HTTP/1.1\r\nX-Long: " + b"x" * (70 << 10) + b"\r\n\r\n")
        assert b" 431 " in connection.recv(4096)
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(b"\x16\x03\x01 not http at all\r\n\r\n")
        assert b" 400 " in connection.recv(4096)
    assert call("GET", "/alive")[0] == 200


def test_a_large_upload_arrives_whole(call: Caller, folder: str) -> None:
    data = secrets.token_bytes(1 << 20) * 24
    assert call.upload("big", data, destination=folder)[0] == 200
    status, came = call("GET", f"/download_files?path={folder}/big&raw=1")
    assert status == 200
    assert came == data


def test_idle_time_grows_and_starts_anew_with_an_action(call: Caller) -> None:
    call.action("run", command="true")
    time.sleep(0.6)
    idle = call("GET", "/server_info", key=None)[1]["idle_time"]
    assert idle >= 0.5
    call.action("run", command="true")
    assert call("GET", "/server_info", key=None)[1]["idle_time"] < idle


def test_no_editor_no_token(call: Caller) -> None:
    assert call("GET", "/vscode/connection_token") == (200, {"token": None})


def test_files_are_served_while_a_command_runs(call: Caller) -> None:
    session = secrets.token_hex(4)
    running = call.runtime.run_command("sleep 20", session=session, timeout=60)
    while call("GET", "/sessions")[1]["sessions"].get(session, {}).get("running") is None:
        time.sleep(0.05)
    began = time.monotonic()
    assert call.action("read", path="/etc/hostname")[0] == 200
    assert time.monotonic() - began < 15
    status, answer = call("POST", "/cancel", {"session": session})
    assert (status, answer) == (200, {"cancelled": True})
    assert running.result(ANSWER_SECONDS).exit_code == 130
    assert call("POST", "/cancel", {"session": session})[0] == 409


def test_sessions_are_listed_and_closed(call: Caller) -> None:
    call.action("run", command="cd /usr; sleep 1000 & echo $!", session="to-close")
    listed = call("GET", "/sessions")[1]["sessions"]["to-close"]
    assert listed["working_dir"] == "/usr"
    assert call("POST", "/close_session", {"session": "to-close"})[0] == 200
    assert call("POST", "/close_session", {"session": "to-close"})[0] == 404
    left = call.action("run", command="pgrep -fc '^sleep 1000$' || true", is_static=True)[1]["content"]
    assert left.strip() == "0"


@pytest.mark.slow
def test_a_gigabyte_of_output_in_bounded_memory(call: Caller) -> None:
    status, seen = call.action(
        "run", timeout=280, command="yes 0123456789abcdef | head -c 1000000000; echo; echo END"
    )
    assert status == 200
    assert seen["extras"]["metadata"]["exit_code"] == 0, seen["extras"]
    assert seen["content"].endswith("END\n")
    assert seen["extras"]["metadata"]["dropped_bytes"] > 990_000_000
    assert len(seen["content"]) < 1 << 20
    peak = call.action(
        "run", command="grep VmHWM /proc/$(pgrep -f 'actionserver.*serve' | head -1)/status", is_static=True
    )
    assert int(peak[1]["content"].split()[1]) < 200_000  # kB; uploads of this module count too


def test_the_editor_starts_when_its_token_is_asked_for() -> None:
    with LocalRuntime() as runtime:
        script = "mkdir -p /usr/local/bin && printf '#!/bin/sh\\necho \"$@\" >/tmp/editor-arguments; exec sleep 1000\\n' >/usr/local/bin/openvscode-server && chmod +x /usr/local/bin/openvscode-server"
        assert runtime.run_command(script).result(ANSWER_SECONDS).exit_code == 0
        url = runtime.editor_url().result(ANSWER_SECONDS)
        assert url is not None
        token = url.partition("tkn=")[2].partition("&")[0]
        said = runtime.run_command("sleep 0.5; cat /tmp/editor-arguments").result(ANSWER_SECONDS).content
        assert "--port=4445" in said
        assert token not in said
