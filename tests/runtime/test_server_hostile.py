"""The action server against what is wrong, too much or planted: right statuses, and it goes on serving."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lowtide.actionserver.bundle import bundle

KEY = "k" * 32
SECONDS = 60.0


class Server:
    """One action server as a plain process, for what needs no sandbox around it."""

    def __init__(self, place: Path, *, descriptors: int = 1024) -> None:
        self.place, self.work = place, place / "work"
        program = place / bundle().name
        program.write_bytes(bundle().data)
        config = {"key": KEY, "port": 0, "directory": str(place / "own"), "working_dir": str(self.work)}
        limited = f'ulimit -n {descriptors}; exec "$@"'
        ran = subprocess.run(
            ["bash", "-c", limited, "bash", sys.executable, "-I", str(program), "serve"],
            input=json.dumps(config) + "\n",
            env={"PATH": os.environ["PATH"], "HOME": str(place)},
            capture_output=True,
            text=True,
            check=True,
        )
        told = json.loads(ran.stdout)
        self.pid, self.port = told["pid"], told["port"]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def ask(self, method: str, path: str, body: Any = b"", headers: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nX-Session-API-Key: {KEY}\r\nConnection: close\r\n{headers}"
        with self.connect() as connection:
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data)
            return answer_of(connection)

    def action(self, kind: str, timeout: Any = None, **arguments: Any) -> tuple[int, Any]:
        action = {"action": kind, "args": arguments, "timeout": timeout}
        return self.ask("POST", "/execute_action", {"action": action})

    def upload(self, name: str, data: bytes, destination: Path, *, recursive: bool) -> tuple[int, Any]:
        head = f'--B\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        query = f"destination={quote(str(destination))}&recursive={str(recursive).lower()}"
        kind = "Content-Type: multipart/form-data; boundary=B\r\n"
        return self.ask("POST", f"/upload_file?{query}", head.encode() + data + b"\r\n--B--\r\n", kind)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.ask("POST", "/shutdown", {})
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    """Status and body of one answer: to the end of the connection."""
    data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, json.loads(body) if b"application/json" in head else body


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.end()


HALF = "\ud800"
WRONG_ACTIONS: list[tuple[str, dict[str, Any]]] = [
    ("edit", {"command": "insert", "path": "/etc/hostname", "insert_line": [1], "new_str": "x"}),
    ("edit", {"command": "view", "path": "/etc/hostname", "view_range": 5}),
    ("run", {"command": "true", "no_change_timeout": float("inf")}),
    ("run", {"command": f"echo {HALF}"}),
    ("run", {"command": f"echo {HALF}", "is_static": True}),
    ("write", {"path": "half", "content": HALF}),
    ("read", {"path": f"/tmp/{HALF}"}),
    ("list", {"path": f"/tmp/{HALF}"}),
]


@pytest.mark.parametrize(("kind", "arguments"), WRONG_ACTIONS)
def test_an_action_that_makes_no_sense_is_400(server: Server, kind: str, arguments: dict[str, Any]) -> None:
    assert server.action(kind, **arguments)[0] == 400


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 10**400, -1, "1"])
def test_a_time_that_no_clock_knows_is_400(server: Server, timeout: Any) -> None:
    assert server.action("run", timeout, command="echo hi")[0] == 400
    assert server.action("run", timeout, command="echo hi", is_static=True)[0] == 400


def test_half_a_character_leaves_the_session_usable(server: Server) -> None:
    assert server.action("run", command=f"echo {HALF}", session="half")[0] == 400
    assert server.action("run", command="echo whole", session="half")[1]["content"] == "whole\n"


def test_requests_that_make_no_sense_are_400(server: Server) -> None:
    for body in (b"[" * 100_000, b"\xff", b"{"):
        assert server.ask("POST", "/execute_action", body)[0] == 400
    assert server.ask("POST", "/list_files", {"path": f"/tmp/{HALF}"})[0] == 400
    for length in ("²", "-1", "1_0", "9" * 5000):
        with server.connect() as connection:
            connection.sendall(f"GET /alive HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
            assert answer_of(connection)[0] == 400


def test_a_cancel_that_makes_no_sense_is_400(server: Server) -> None:
    assert (
        server.action("run", 0.2, command="sleep 1000", session="busy")[1]["extras"]["metadata"]["exit_code"]
        == -1
    )
    wrong: list[Any] = [
        [],
        "x",
        {"session": []},
        {"grace_seconds": "x"},
        {"grace_seconds": 1e308},
        {"grace_seconds": -1},
    ]
    for body in wrong:
        given = {"session": "busy", **body} if isinstance(body, dict) else body
        assert server.ask("POST", "/cancel", given)[0] == 400
    assert server.ask("POST", "/cancel", {"session": "busy", "grace_seconds": 5})[0] == 200


def archive(make: Callable[[zipfile.ZipFile], None]) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        make(made)
    return bytearray(out.getvalue())


def test_an_archive_that_cannot_be_read_is_400(server: Server, tmp_path: Path) -> None:
    whole = archive(lambda made: made.writestr("x.txt", "hello world " * 100))
    central = whole.find(b"PK\x01\x02")
    corrupt, locked, unknown = bytearray(whole), bytearray(whole), bytearray(whole)
    corrupt[45] ^= 0xFF
    locked[6] |= 1
    locked[central + 8] |= 1
    unknown[8] = unknown[central + 10] = 99
    for data in (corrupt, locked, unknown, b"no archive"):
        assert server.upload("a.zip", bytes(data), tmp_path, recursive=True)[0] == 400
    long = archive(lambda made: made.writestr("a" * 300, "x"))
    assert server.upload("a.zip", bytes(long), tmp_path, recursive=True)[0] == 400
    assert server.upload("n" * 300, b"x", tmp_path, recursive=False)[0] == 400
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".upload")]


def test_an_archive_does_not_leave_its_directory_through_a_link(server: Server, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here/link").symlink_to(tmp_path / "outside")

    def make(made: zipfile.ZipFile) -> None:
        made.writestr("first", "x")
        made.writestr("link/x", "x")

    data = archive(make)
    assert server.upload("a.zip", bytes(data), tmp_path / "here", recursive=True)[0] == 400
    assert not list((tmp_path / "outside").iterdir())
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["link"]


def test_pipes_and_devices_are_refused_and_hold_up_nobody(server: Server, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for kind, arguments in (
        ("read", {}),
        ("edit", {"command": "view"}),
        ("write", {"content": "x"}),
        ("read", {"view_range": [1, 2]}),
    ):
        status, seen = server.action(kind, path=str(tmp_path / "pipe"), **arguments)
        assert (status, seen["extras"]["error_id"]) == (200, "file")
    assert server.action("write", path="/dev/null", content="x")[1]["observation"] == "error"
    for path in (tmp_path / "pipe", "/dev/zero"):
        for raw in ("", "&raw=1"):
            assert server.ask("GET", f"/download_files?path={path}{raw}")[0] == 409


def test_names_that_are_no_text_are_listed_read_and_downloaded(server: Server, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("x")
    name = server.action("list", path=str(tmp_path))[1]["extras"]["files"][0]
    assert server.action("read", path=f"{tmp_path}/{name}")[1]["content"] == "x"
    status, data = server.ask("GET", f"/download_files?path={tmp_path}")
    pieces = data.split(b"\r\n")
    assert status == 200
    assert b"\\xff.txt" in data
    assert pieces[-3:] == [b"0", b"", b""]


def test_a_name_as_long_as_names_may_be_is_written(server: Server, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    assert server.action("write", path=str(path), content="x")[1]["observation"] == "write"
    assert path.read_text() == "x"


def test_a_body_with_a_negative_size_is_not_read_to_its_end(server: Server) -> None:
    with server.connect() as connection:
        head = b"POST /execute_action HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"-1\r\n" + b"x" * 100_000)
        assert answer_of(connection)[0] == 403  # and then it closes, although this end does not


def test_more_connections_than_descriptors_do_not_end_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path, descriptors=64)
    idle = []
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection(("127.0.0.1", server.port), 2.0))
        assert server.ask("GET", "/alive")[0] == 200
        assert server.action("run", command="echo hi")[1]["content"] == "hi\n"
    finally:
        for connection in idle:
            connection.close()
        server.end()


def test_a_connection_with_a_running_command_is_not_given_up_for_strangers(server: Server) -> None:
    body = json.dumps(
        {"action": {"action": "run", "args": {"command": "read line; echo $line", "session": "s"}}}
    )
    with server.connect() as connection, contextlib.ExitStack() as strangers:
        head = f"POST /execute_action HTTP/1.1\r\nX-Session-API-Key: {KEY}\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        for _ in range(1000):  # until it runs
            if server.ask("GET", "/sessions")[1]["sessions"].get("s", {}).get("running"):
                break
        for _ in range(150):
            strangers.enter_context(server.connect())
        assert server.action("run", 0.0, command="through", is_input=True, session="s")[0] == 200
        assert answer_of(connection)[1]["content"] == "through\n"


def test_what_refuses_a_large_body_is_heard(server: Server) -> None:
    with server.connect() as connection:
        head = f"POST /execute_action HTTP/1.1\r\nX-Session-API-Key: {KEY}\r\nContent-Length: {120 << 20}\r\n\r\n"
        connection.sendall(head.encode())
        connection.sendall(b"x" * (8 << 20))
        assert answer_of(connection)[0] == 413


def test_a_command_that_removes_the_servers_files_harms_no_later_one(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        assert server.action("run", command="echo hi")[1]["content"] == "hi\n"
        tidy = f"find {tmp_path} -mindepth 1 -not -path {server.work} -delete"
        assert server.action("run", command=tidy)[1]["observation"] == "run"
        for arguments in (
            {"command": "echo a"},
            {"command": "exit 3"},
            {"command": "echo b", "is_static": True},
        ):
            assert server.action("run", **arguments)[1]["observation"] == "run"
        assert server.action("run", command="echo c")[1]["content"] == "c\n"
        assert server.action("run_ipython", code="1")[0] == 200
    finally:
        server.end()
