"""The ground: who may come in, and that everything ends with the process, however it ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowtide.emulators
from lowtide.emulators.backing import Backing, destroy_all, local_provider
from lowtide.emulators.ground import Settings
from lowtide.emulators.handle import Handle
from lowtide.errors import ResourceExhaustedError, ValidationError

from .conftest import options_of, processes_with


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def eventually(check: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, f"not in {seconds} s: {what}"
        time.sleep(0.1)


def test_an_address_other_machines_can_reach_needs_the_flag() -> None:
    with pytest.raises(ValidationError, match="loopback"):
        Settings(names=("e2b",), host="0.0.0.0").checked()
    assert Settings(names=("e2b",), host="0.0.0.0", allow_remote=True).checked()


@pytest.mark.parametrize("names", [(), ("e2c",)])
def test_unknown_emulators_are_refused_before_anything_starts(names: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="e2b"):
        lowtide.emulators.start(*names)


def test_calls_without_the_generated_key_are_refused(e2b: Handle) -> None:
    url = e2b.urls["e2b"] + "/v2/sandboxes"
    assert ask(url)[0] == 401
    assert ask(url, **{"X-API-KEY": "e2b_" + "0" * 40})[0] == 401
    assert ask(url, **{"X-API-KEY": e2b.environment["E2B_API_KEY"]})[0] == 200


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_a_web_page_cannot_reach_it_even_with_the_key(e2b: Handle, headers: dict[str, str]) -> None:
    key = {"X-API-KEY": e2b.environment["E2B_API_KEY"]}
    assert ask(e2b.urls["e2b"] + "/v2/sandboxes", **key, **headers)[0] == 403


def test_the_admin_endpoint_has_its_own_token(e2b: Handle) -> None:
    url = e2b._admin["url"] + "/state"
    assert ask(url)[0] == 401
    assert ask(url, Authorization=f"Bearer {e2b.environment['E2B_API_KEY']}")[0] == 401
    assert ask(url, Authorization=f"Bearer {e2b._admin['token']}")[0] == 200


def test_the_admin_endpoint_says_what_is_wrong(e2b: Handle) -> None:
    with pytest.raises(ValidationError, match="no fault"):
        e2b.faults.add("no-such-fault")
    with pytest.raises(ValidationError, match="forward"):
        e2b.clock.advance(-5)


def test_the_proxy_wants_its_token_and_passes_other_hosts_on(tmp_path: Path) -> None:
    with lowtide.emulators.start("e2b", home=tmp_path) as handle:
        proxy = handle.environment["HTTPS_PROXY"]
        login, _, address = proxy.removeprefix("http://").partition("@")
        host, _, port = address.partition(":")
        with socket.create_server(("127.0.0.1", 0)) as other:
            target = f"127.0.0.1:{other.getsockname()[1]}"
            with socket.create_connection((host, int(port)), timeout=30) as refused:
                refused.sendall(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode())
                assert b" 407 " in refused.recv(4096)
            with socket.create_connection((host, int(port)), timeout=30) as passed:
                basic = base64.b64encode(login.encode()).decode()
                passed.sendall(
                    f"CONNECT {target} HTTP/1.1\r\nProxy-Authorization: Basic {basic}\r\n\r\n".encode()
                )
                peer, _ = other.accept()
                with peer:
                    assert b" 200 " in passed.recv(4096)
                    passed.sendall(b"ping")
                    assert peer.recv(16) == b"ping"
                    peer.sendall(b"pong")
                    assert passed.recv(16) == b"pong"
                    # Neither side is read faster than the other takes it: nothing piles up in the emulator.
                    for giver, taker in ((passed, peer), (peer, passed)):
                        given = _until_full(giver)
                        assert given < 32 << 20
                        taken = 0
                        while taken < given:
                            taken += len(taker.recv(1 << 20))
                        assert taken == given


def _until_full(sock: socket.socket) -> int:
    """Send until nothing is taken for a second; how many bytes were."""
    sock.settimeout(1.0)
    sent, piece = 0, bytes(1 << 16)
    with contextlib.suppress(TimeoutError):
        while sent < 64 << 20:
            sent += sock.send(piece)
    sock.settimeout(30)
    return sent


def start_with_sleepers(home: Path, count: int = 2) -> tuple[Handle, str]:
    """An emulator with sandboxes that each run something we can see from outside."""
    sdk = pytest.importorskip("e2b")
    mark = f"987{uuid.uuid4().int % 10**12}"
    handle = lowtide.emulators.start("e2b", home=home, plain=True)
    for _ in range(count):
        sandbox = sdk.Sandbox.create(**options_of(handle))
        sandbox.commands.run(f"sleep {mark}", background=True, timeout=0)
    eventually(lambda: len(processes_with(mark)) >= count, "the sleepers run")
    return handle, mark


def test_closing_takes_every_sandbox_with_it(tmp_path: Path) -> None:
    handle, mark = start_with_sleepers(tmp_path)
    handle.close()
    assert processes_with(mark) == []
    assert list((tmp_path / "emulators").iterdir()) == []
    handle.close()  # twice is fine


def test_sigterm_takes_every_sandbox_with_it(tmp_path: Path) -> None:
    handle, mark = start_with_sleepers(tmp_path)
    handle.process.send_signal(signal.SIGTERM)
    assert handle.process.wait(60) == 0
    assert processes_with(mark) == []
    assert list((tmp_path / "emulators").iterdir()) == []
    handle.close()


@pytest.mark.crash
def test_kill_dash_nine_takes_every_sandbox_with_it(tmp_path: Path) -> None:
    handle, mark = start_with_sleepers(tmp_path)
    os.kill(handle.pid, signal.SIGKILL)
    handle.process.wait(30)
    eventually(lambda: processes_with(mark) == [], "the sandboxes of the killed emulator end")
    eventually(lambda: list((tmp_path / "emulators").iterdir()) == [], "its state goes, too")
    handle.close()


@pytest.mark.crash
def test_the_next_start_sweeps_what_emulator_and_reaper_both_left(tmp_path: Path) -> None:
    handle, mark = start_with_sleepers(tmp_path)
    (directory,) = (tmp_path / "emulators").iterdir()
    reapers = [
        pid
        for pid in processes_with(str(directory))
        if b"reaper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(reapers) == 1
    for pid in (*reapers, handle.pid):
        os.kill(pid, signal.SIGKILL)
    handle.process.wait(30)
    handle.close()
    time.sleep(1)
    assert processes_with(mark), "nobody is left who could have ended them"
    with lowtide.emulators.start("e2b", home=tmp_path):
        eventually(lambda: processes_with(mark) == [], "the next emulator ends them")
        eventually(lambda: not directory.exists(), "and removes their state")


@pytest.mark.crash
def test_a_killed_owner_takes_its_emulator_with_it(tmp_path: Path) -> None:
    text = (
        "import lowtide.emulators, sys, time\n"
        f"handle = lowtide.emulators.start('e2b', home={str(tmp_path)!r})\n"
        "print(handle.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "the emulator ends")
    eventually(lambda: list((tmp_path / "emulators").iterdir()) == [], "and leaves nothing")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_limit_of_sandboxes_holds(tmp_path: Path) -> None:
    sdk = pytest.importorskip("e2b")
    with lowtide.emulators.start("e2b", home=tmp_path, plain=True, limit=2) as handle:
        options: dict[str, Any] = {**options_of(handle), "retries": 0}
        first, _ = (sdk.Sandbox.create(**options) for _ in range(2))
        with pytest.raises(sdk.RateLimitException):
            sdk.Sandbox.create(**options)
        first.kill()
        sdk.Sandbox.create(**options)


def two_free_ports() -> int:
    """Below those that the kernel gives to whoever asks for any: nobody takes them in between."""
    for base in range(20_000 + os.getpid() % 5_000, 32_000, 2):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in (base, base + 1):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return base
    raise AssertionError("no two free ports")


def test_ports_follow_the_base(tmp_path: Path) -> None:
    base = two_free_ports()
    with lowtide.emulators.start("e2b", home=tmp_path, port_base=base) as handle:
        assert handle.urls["e2b"].endswith(f":{base}")
        assert handle.environment["HTTPS_PROXY"].endswith(f":{base + 1}")


def test_emulate_runs_a_command_with_the_environment_and_ends_after_it(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from lowtide.cli import main; main()",
        "emulate",
        "e2b",
        "--",
        sys.executable,
        "-c",
    ]
    code = "import os, sys; print(os.environ['E2B_API_KEY'][:4], os.environ['SSL_CERT_FILE']); sys.exit(7)"
    environment = {**os.environ, "LOWTIDE_HOME": str(tmp_path)}
    done = subprocess.run([*command, code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("e2b_ ")
    assert list((tmp_path / "emulators").iterdir()) == []


def test_emulate_prints_what_to_export_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    environment = {**os.environ, "LOWTIDE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "from lowtide.cli import main; main()", "emulate", "e2b", "--json"]
    serving = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    described = json.loads(serving.stdout.readline())
    assert described["environment"]["E2B_API_KEY"]
    serving.send_signal(signal.SIGINT)
    assert serving.wait(60) == 0
    serving.stdout.close()
    assert list((tmp_path / "emulators").iterdir()) == []


def test_creates_under_way_at_the_end_leave_nothing(tmp_path: Path) -> None:
    async def end_amid_creates() -> tuple[bool, list[str]]:
        backing = Backing(tmp_path, limit=20)
        creating = [asyncio.ensure_future(backing.create()) for _ in range(6)]
        while backing.count < 6:
            await asyncio.sleep(0)
        assert not any(one.done() for one in creating)  # asked for, and none of them there yet
        nothing_left = await backing.aclose()
        await asyncio.wait(creating)
        made = [one.exception() for one in creating]  # seen: their sandboxes were ended under them
        assert len(made) == 6
        later = local_provider(tmp_path)
        try:
            return nothing_left, [info.sandbox_id async for info in later.list({})]
        finally:
            await later.aclose()

    try:
        assert asyncio.run(end_amid_creates()) == (True, [])
        assert processes_with(str(tmp_path)) == []
    finally:
        assert asyncio.run(destroy_all(tmp_path))


def test_an_emulator_that_ends_while_it_is_asked_for_sandboxes_leaves_nothing(tmp_path: Path) -> None:
    sdk = pytest.importorskip("e2b")
    handle = lowtide.emulators.start("e2b", home=tmp_path, plain=True)
    options: dict[str, Any] = {**options_of(handle), "retries": 0}
    stopped = threading.Event()

    def keep_creating() -> None:
        while not stopped.is_set():
            try:
                sdk.Sandbox.create(**options)
            except Exception:
                return

    creators = [threading.Thread(target=keep_creating) for _ in range(6)]
    for creator in creators:
        creator.start()
    eventually(lambda: handle.state()["backing"] >= 3, "creates are under way")
    handle.close()
    stopped.set()
    for creator in creators:
        creator.join(120)
    assert list((tmp_path / "emulators").iterdir()) == []
    assert processes_with(str(tmp_path)) == []


def test_a_command_ends_with_a_killed_emulator(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    program = f"import os, pathlib, time; pathlib.Path({str(noted)!r}).write_text(str(os.getpid())); time.sleep(300)"
    command = [sys.executable, "-c", "from lowtide.cli import main; main()", "emulate", "e2b", "--"]
    emulating = subprocess.Popen([*command, sys.executable, "-c", program])
    try:
        until = time.monotonic() + 60
        while not (noted.exists() and noted.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        emulating.kill()
        emulating.wait()
    until = time.monotonic() + 20
    while processes_alive(int(noted.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)


async def test_what_the_machine_cannot_do_is_a_refusal_that_every_service_can_pass_on(tmp_path: Path) -> None:
    backing = Backing(tmp_path, limit=1)
    sandboxes = tmp_path / "local" / "sandboxes"
    try:
        sandboxes.parent.mkdir(exist_ok=True)
        sandboxes.write_text("no directory, as on a disk that is full")
        with pytest.raises(ResourceExhaustedError):
            await backing.create()
        assert backing.count == 0
        sandboxes.unlink()
        await backing.destroy(await backing.create())
    finally:
        assert await backing.aclose()


def processes_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "script", ["trap '' TERM; {0}", "{0}; true"], ids=["does not heed", "a shell's child"]
)
def test_what_a_command_started_ends_with_a_killed_emulator(tmp_path: Path, script: str) -> None:
    mark = f"lowtide-left-{uuid.uuid4().hex}"
    work = f"exec 3>&1; sh -c 'echo started >&3; while :; do sleep 0.2; done' {mark}"
    emulate = [sys.executable, "-c", "from lowtide.cli import main; main()", "emulate", "e2b", "--"]
    with subprocess.Popen(
        [*emulate, "sh", "-c", script.format(work)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert processes_with(mark)
        process.kill()
        process.wait()
        until = time.monotonic() + 30
        while (left := processes_with(mark)) and time.monotonic() < until:
            time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def test_the_log_shows_each_call_and_nothing_secret(tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(
        "from e2b import Sandbox\nSandbox.create(metadata={'secret-name': 'secret-value'}).kill()\n"
    )
    command = [sys.executable, "-m", "lowtide", "emulate", "e2b", "--log", "--", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stderr.splitlines()]
    assert [line[:2] + line[4:7] for line in lines] == [
        ["e2b", "201", "1", "alive", "POST"],
        ["e2b", "204", "0", "alive", "DELETE"],
    ]
    assert "secret" not in done.stderr
    assert "e2b_" not in done.stderr
