"""What runs in a sandbox, and what is to be built, cannot hold the emulator up, fill it, or spoil an answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import re
import resource
import shlex
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lowtide.cli.commands import emulate
from lowtide.emulators import dockerfile
from lowtide.emulators.daytona.shell import Command, Shell
from lowtide.emulators.dockerfile import CannotBuild
from lowtide.emulators.ground import AnsweredCall
from lowtide.emulators.handle import Handle
from lowtide.providers.base import STDERR, STDOUT
from lowtide.testing import emulator
from tests.emulators.test_build import building

STRANGE = r"mkdir n; touch n/ok n/$'\xff' /dev/shm/never; touch -d @99999999999999 /dev/shm/never"
"""A name that is not UTF-8, and a time that no calendar has (where the file system is a tmpfs, or XFS)."""


def test_no_name_and_no_time_of_a_file_spoils_the_list_it_is_in_on_e2b(create: Callable[..., Any]) -> None:
    sandbox = create()
    sandbox.commands.run(STRANGE)
    assert {one.name for one in sandbox.files.list("n")} == {"ok", "\ufffd"}
    assert [one.name for one in sandbox.files.list("/dev/shm")] == ["never"]
    watching = sandbox.files.watch_dir("n")
    sandbox.commands.run(r"touch n/$'\xfe'")
    assert {event.name for event in watching.get_new_events()} == {"\ufffd"}


def test_no_name_and_no_time_of_a_file_spoils_the_list_it_is_in_on_daytona(
    daytona_create: Callable[..., Any],
) -> None:
    sandbox = daytona_create()
    sandbox.process.exec(STRANGE)
    assert {one.name for one in sandbox.fs.list_files("n")} == {"ok", "\ufffd"}
    assert sandbox.fs.list_files("/dev/shm")[0].modified_at.startswith("9999-12-31")
    assert [Path(one).name for one in sandbox.fs.search_files("n", "*").files] == ["ok", "\ufffd"]


def test_a_line_of_a_session_that_never_ends_is_not_held() -> None:
    command, piece = Command("", echo=False), "ä".encode() * 20_001
    sent, pieces = b"", []
    started = time.process_time()
    for number in range(1000):  # 40 MB: held together and copied each time, that takes most of a minute
        command.take(STDOUT, piece[number % 2 :])
        sent += piece[number % 2 :] if number < 9 else b""
        if number < 9 and (kept := command.log.piece(len(pieces))) is not None:
            pieces.append(kept[1])
    assert time.process_time() - started < 5
    assert sent.startswith(b"".join(pieces[:4]))
    assert len(b"".join(pieces[:4])) > 200_000
    shorter = Command("", echo=False)
    for _ in range(4):
        shorter.take(STDOUT, piece)
    first = shorter.log.piece(0)
    assert first is not None
    first[1].decode()  # no character is cut in two
    shorter.close_stream(STDOUT)
    assert shorter.log.texts()["stdout"].encode() == piece * 4 + b"\n"


@pytest.mark.parametrize("printed", [b"x" * 100, b"7" * 5000 + b"\n", b"\n"])
def test_a_command_that_prints_its_own_mark_ends_itself_and_nothing_else(printed: bytes) -> None:
    shell, command, after = Shell("s"), Command("", echo=False), Command("", echo=False)
    shell._queue += [command, after]
    for stream in (STDOUT, STDERR):
        shell._take(stream, command.mark.encode() + printed)
    assert command.exit_code == -1
    for stream in (STDOUT, STDERR):
        shell._take(stream, after.mark.encode() + b"3\n")
    assert after.exit_code == 3


def test_what_a_command_of_the_emulators_own_prints_has_a_bound(tmp_path: Path) -> None:
    async def check() -> None:
        async with building(tmp_path) as (backing, _):
            made = await backing.create()
            printed = await backing.run(made, ("head", "-c", str(64 << 20), "/dev/zero"))
            assert printed == (0, bytes(1 << 20))

    asyncio.run(check())


def test_a_log_of_carriage_returns_has_the_bound_of_a_log_of_lines(tmp_path: Path) -> None:
    kept: list[str] = []

    async def check() -> None:
        async with building(tmp_path) as (_, builder):
            steps = dockerfile.steps("FROM x\nRUN head -c 2000000 /dev/zero | tr '\\0' '\\r'")
            await builder.build(steps, log=lambda text: kept.extend(text.splitlines()))

    asyncio.run(check())
    assert len(kept) < 500_000


@pytest.mark.parametrize(
    "line",
    [
        "RUN " + "[" * 100_000,
        "RUN " + "--a=b " * 150_000 + "true",
        "COPY " + "--a=b " * 150_000 + "a b",
        "ENV A=" + "${A:-" * 8_000,
        "ENV A=" + "x" * 300_000,
        "FROM " + "'a'\\b\"c\"" * 40_000,
    ],
    ids=lambda line: line[:10],
)
def test_no_recipe_takes_long_to_read(line: str) -> None:
    started = time.process_time()
    assert len(list(dockerfile.steps(f"FROM x\n{line}"))) == 2
    assert time.process_time() - started < 1


@pytest.mark.parametrize("word", ["ENV", "ARG"])
def test_variables_of_variables_have_a_bound(word: str) -> None:
    # Twice as long with each of 24 lines: 160 MB where nothing stops it.
    with pytest.raises(CannotBuild, match="variables come to more than"):
        list(dockerfile.steps(f"FROM x\n{word} A=aaaaaaaaaa\n" + f"{word} A=$A$A\n" * 24))


def test_words_are_split_as_a_shell_splits_them() -> None:
    chosen = random.Random(7)
    for _ in range(20_000):
        text = "".join(chosen.choices("ab=$ \t'\"\\", k=chosen.randrange(12)))
        try:
            expected: list[str] | None = shlex.split(text)
        except ValueError:
            expected = None
        if expected is not None:
            assert dockerfile._split(text) == expected, text
            continue
        with pytest.raises(CannotBuild):
            dockerfile._split(text)


def test_a_path_is_one_line_of_the_log_and_says_nothing_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = AnsweredCall(
        provider="e2b", operation="GET /\x1b[2J\nforged\u202e", status=401, seconds=0.1, alive=0
    )
    emulate._show_call(call)
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().err)  # our own colours
    assert shown.endswith("GET /?[2J?forged?\n")
    assert shown.count("\n") == 1


@contextlib.contextmanager
def unfriendly_proxy() -> Iterator[tuple[str, list[bytes]]]:
    """It takes what it is sent and hangs up."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as at_end:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    heard.append(caller.recv(1000))
                    caller.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        at_end.callback(server.shutdown, socket.SHUT_RDWR)
        yield f"127.0.0.1:{server.getsockname()[1]}", heard


def connect(handle: Handle, target: str) -> bytes:
    proxy = urlsplit(handle.environment["HTTPS_PROXY"])
    login = base64.b64encode(f"{proxy.username}:{proxy.password}".encode()).decode()
    with socket.create_connection((proxy.hostname, proxy.port), 10) as caller:
        caller.sendall(f"CONNECT {target} HTTP/1.1\r\nProxy-Authorization: Basic {login}\r\n\r\n".encode())
        return caller.recv(100)


def test_the_proxy_answers_where_no_way_leads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with emulator("e2b", home=tmp_path) as handle:
        for target in (f"{'a' * 64}.invalid:443", "a..b:443"):
            assert connect(handle, target).startswith(b"HTTP/1.1 502"), target
    with unfriendly_proxy() as (address, heard):
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@{address}")
        with emulator("e2b", home=tmp_path) as handle:
            assert connect(handle, "example.invalid:443").startswith(b"HTTP/1.1 502")
    assert b"Basic " + base64.b64encode(b"me:p@ss") in heard[0]
    assert not os.listdir(tmp_path / "emulators")


BOTH = """
import e2b, modal
sandbox = e2b.Sandbox.create()
print(sandbox.commands.run("echo one").stdout, end="")
sandbox.kill()
box = modal.Sandbox.create("sleep", "100", app=modal.App.lookup("app", create_if_missing=True))
print(box.exec("echo", "two").stdout.read(), end="")
box.terminate()
"""


def test_nothing_that_is_meant_for_here_goes_to_a_proxy_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_script: Callable[..., Any]
) -> None:
    pytest.importorskip("e2b")
    pytest.importorskip("modal")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with unfriendly_proxy() as (address, heard):
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{address}")
        with emulator("e2b", "modal", plain=True, home=tmp_path) as handle:
            done = run_script(BOTH, handle.environment)
    assert (done.stdout, heard) == ("one\ntwo\n", []), done.stderr


class Service:
    """The few calls about builds, as an SDK makes them."""

    def __init__(self, handle: Handle, name: str) -> None:
        found = handle.environment
        self.key = (
            {"X-API-KEY": found["E2B_API_KEY"]}
            if name == "e2b"
            else {
                "Authorization": f"Bearer {found['DAYTONA_API_KEY' if name == 'daytona' else 'RUNLOOP_API_KEY']}"
            }
        )
        self.url, self.name = handle.urls[name] + ("/api" if name == "daytona" else ""), name

    def refused(self, method: str, path: str, body: Any = None) -> int:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            self.call(method, path, body)
        return refusal.value.code

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        head = {**self.key, "Content-Type": "application/json"}
        asked = urllib.request.Request(self.url + path, method=method, data=data, headers=head)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked, timeout=20) as answer:
            told = answer.read()
        return json.loads(told) if told else None

    def build(self, name: str, command: str) -> str:
        if self.name == "daytona":
            build = {"dockerfileContent": f"FROM x\nRUN {command}"}
            return str(self.call("POST", "/snapshots", {"name": name, "buildInfo": build})["id"])
        if self.name == "runloop":
            asked = {"name": name, "dockerfile": f"FROM x\nRUN {command}"}
            return str(self.call("POST", "/v1/blueprints", asked)["id"])
        made = self.call("POST", "/v3/templates", {"name": name})
        steps = {"steps": [{"type": "RUN", "args": [command]}]}
        self.call("POST", f"/v2/templates/{made['templateID']}/builds/{made['buildID']}", steps)
        return str(made["templateID"])

    def delete(self, made: str) -> None:
        if self.name == "runloop":
            self.call("POST", f"/v1/blueprints/{made}/delete", {})
        else:
            self.call("DELETE", f"/{'snapshots' if self.name == 'daytona' else 'templates'}/{made}")


def test_a_build_that_is_deleted_ends_and_gives_its_place_to_others(tmp_path: Path) -> None:
    with emulator("e2b", "daytona", "runloop", plain=True, home=tmp_path) as handle:
        services = [Service(handle, name) for name in ("e2b", "daytona", "runloop", "daytona")]
        made = [one.build(f"endless-{at}", f"sleep {3600 + at}") for at, one in enumerate(services)]
        services[1].build("short", "true")
        for service, one in zip(services, made, strict=True):
            service.delete(one)
        until = time.monotonic() + 20
        while services[1].call("GET", "/snapshots/short")["state"] != "active":
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_snapshot_whose_build_failed_cannot_be_activated(daytona: Handle) -> None:
    service, until = Service(daytona, "daytona"), time.monotonic() + 20
    made = service.build(f"failed-{os.getpid()}", "exit 3")
    while service.call("GET", f"/snapshots/{made}")["state"] != "build_failed":
        assert time.monotonic() < until
        time.sleep(0.05)
    for word in ("activate", "deactivate"):  # a sandbox would be made, from nothing
        assert service.refused("POST", f"/snapshots/{made}/{word}", {}) == 400
    service.delete(made)


def test_files_of_a_template_for_which_there_is_no_room_are_refused_as_such(tmp_path: Path) -> None:
    with emulator("e2b", plain=True, home=tmp_path) as handle:
        service = Service(handle, "e2b")
        made = service.call("POST", "/v3/templates", {"name": "one"})
        link = service.call("GET", f"/templates/{made['templateID']}/files/abc")["url"].removeprefix(
            service.url
        )
        resource.prlimit(handle.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        assert service.refused("PUT", link, "x" * (2 << 20)) == 507
        assert not list(tmp_path.glob("emulators/*/uploads/*"))


def test_a_volume_that_has_grown_too_large_is_not_held_in_memory(
    daytona: Handle, daytona_create: Callable[..., Any], daytona_client: Any
) -> None:
    sdk = pytest.importorskip("daytona")
    volume = daytona_client.volume.get(f"volume-{daytona_create.mark}", create=True)  # type: ignore[attr-defined]
    mount = sdk.VolumeMount(volume_id=volume.id, mount_path="/home/daytona/data")
    box = daytona_create(volumes=[mount])
    box.process.exec("echo kept > /home/daytona/data/file")
    second = daytona_create(volumes=[mount])
    assert second.process.exec("cat /home/daytona/data/file").result == "kept\n"
    box.process.exec("truncate -s 1G /home/daytona/data/large")  # a gigabyte for tar, and nothing on the disk
    before = peak(daytona.pid)
    other = daytona_create(volumes=[mount])
    assert peak(daytona.pid) - before < 700 << 20
    assert other.process.exec("cat /home/daytona/data/file; ls /home/daytona/data").result.split() == [
        "kept",
        "file",
    ]


def peak(pid: int) -> int:
    """The most memory that it has had, in bytes."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) << 10


def test_an_interpreters_line_without_an_end_is_ended_and_long_texts_arrive_whole(
    daytona_create: Callable[..., Any],
) -> None:
    run = daytona_create().code_interpreter.run_code
    assert len(run("print('x' * 3_000_000)", timeout=60).stdout) == 3_000_001
    endless = "import __main__, os\nfor _ in range(100): os.write(__main__.told.fileno(), b'x' * 100_000)"
    ended = run(endless, timeout=20)
    assert ended.error is not None
    assert "has ended" in ended.error.value
    assert run("print(1)", timeout=60).stdout == "1\n"


def test_the_log_of_a_command_has_a_bound(daytona_create: Callable[..., Any]) -> None:
    sdk = pytest.importorskip("daytona")
    box = daytona_create()
    box.process.create_session("one")
    text = "echo first; yes 0123456789abcde | head -c 40000000; echo last"
    asked = sdk.SessionExecuteRequest(command=text, run_async=True)
    command = box.process.execute_session_command("one", asked).cmd_id
    until = time.monotonic() + 60
    while box.process.get_session_command("one", command).exit_code is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    logs = box.process.get_session_command_logs("one", command)
    assert 8 << 20 <= len(logs.stdout) <= 17 << 20
    assert logs.stdout.endswith("0123456789abcde\nlast\n")
    assert "bytes are not kept" in logs.stdout.partition("\n")[0]


def test_what_is_kept_of_an_output_is_its_end() -> None:
    from lowtide.emulators.kept_output import KeptOutput

    kept, whole = KeptOutput(), random.Random(7).randbytes(30 << 20)
    for at in range(0, len(whole), 700_001):
        kept.add(whole[at : at + 700_001])
    assert kept.size == len(whole)
    assert 8 << 20 <= kept.size - kept.first <= 16 << 20
    assert kept.read(0, len(whole)) == whole[kept.first :]
    for at in (kept.first, kept.first + 1, kept.size - (9 << 20), kept.size - 10):
        at = max(at, kept.first)
        assert kept.read(at, 1 << 20) == whole[at : at + (1 << 20)]
    assert kept.read(kept.size, 10) == b""
    kept.close()


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        told = repr(self.headers.get("Cookie")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.send_header("Set-Cookie", "lowtide-preview-1=mine")
        self.send_header("Set-Cookie", "theirs=1")
        self.end_headers()
        self.wfile.write(told)
    do_POST = do_GET
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), Handler).serve_forever()
"""


def test_a_preview_serves_no_page_of_another_sandbox(daytona_create: Callable[..., Any]) -> None:
    box = daytona_create()
    box.fs.upload_file(SERVER.encode(), "server.py")
    box.process.exec("setsid python3 server.py >/dev/null 2>&1 </dev/null &")
    link = box.create_signed_preview_url(3000, expires_in_seconds=600)
    at = urlsplit(link.url)
    cookie = {"Cookie": f"lowtide-preview-{at.port}={link.token}; lowtide-preview-9=others; own=1"}

    def ask(method: str = "GET", **headers: str) -> tuple[int, str, list[str]]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"http://{at.netloc}/", headers={**cookie, **sent}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers.get_all("Set-Cookie") or []
        except urllib.error.HTTPError as error:
            with error:
                return error.code, "", []

    until = time.monotonic() + 60
    while ask()[0] == 502:
        assert time.monotonic() < until
        time.sleep(0.1)
    here, other = f"http://{at.netloc}", f"http://{at.hostname}:9"
    for headers in (
        {"Origin": here, "Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Site": "none", "Sec_Fetch_Dest": "document"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "document"},  # a link there
    ):
        assert ask(**headers)[0] == 200, headers
    for method, headers in (
        ("POST", {"Origin": other, "Sec_Fetch_Site": "same-site"}),
        ("GET", {"Origin": other}),
        ("GET", {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "image"}),
        ("GET", {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "iframe"}),
        ("POST", {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "document"}),
    ):
        assert ask(method, **headers)[0] == 401, (method, headers)
    assert ask() == (200, "'own=1'", ["theirs=1"])  # no sandbox sees, or sets, what opens another one
    assert ask("POST", X_Daytona_Preview_Token=box.get_preview_link(3000).token, Origin=other)[0] == 200
