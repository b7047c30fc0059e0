"""The unmodified E2B SDK against the emulator: what its users do all day."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowtide.emulators
from lowtide.emulators.handle import Handle

sdk = pytest.importorskip("e2b")
Create = Callable[..., Any]

QUICKSTART = """
from e2b_code_interpreter import Sandbox

sbx = Sandbox.create()
execution = sbx.run_code("print('hello world')")
print(execution.logs)

files = sbx.files.list("/")
print(files)
sbx.kill()
"""


@pytest.mark.parametrize(
    "plain", [pytest.param(True, id="urls", marks=pytest.mark.newcomer), pytest.param(False, id="proxy")]
)
def test_the_quickstart_runs_unmodified(tmp_path: Path, run_script: Callable[..., Any], plain: bool) -> None:
    pytest.importorskip("ipykernel")
    with lowtide.emulators.start("e2b", home=tmp_path / "home", plain=plain) as handle:
        done = run_script(QUICKSTART, handle.environment)
        assert done.returncode == 0, done.stderr
        assert "hello world" in done.stdout
        assert "EntryInfo(name='home'" in done.stdout
        assert handle.state()["backing"] == 0


def test_get_host_and_download_url_work_unmodified_through_the_proxy(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    text = """
import time, urllib.request
import httpx
from e2b import Sandbox
with Sandbox.create() as sbx:
    sbx.files.write("index.html", "from inside")
    sbx.commands.run("python3 -m http.server 8001", background=True)
    for _ in range(100):
        answer = httpx.get("https://" + sbx.get_host(8001) + "/index.html")
        if answer.status_code == 200:
            break
        assert answer.status_code == 502 and "port is not open" in answer.text, answer.text
        time.sleep(0.1)
    print(answer.text)
    print(urllib.request.urlopen(sbx.download_url("index.html")).read().decode())
    assert sbx.get_host(8001).endswith(".invalid")
"""
    with lowtide.emulators.start("e2b", home=tmp_path / "home") as handle:
        done = run_script(text, handle.environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["from inside", "from inside"]


def test_commands_have_exit_codes_and_two_streams(create: Create) -> None:
    sandbox = create()
    done = sandbox.commands.run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(sdk.CommandExitException) as raised:
        sandbox.commands.run("echo partial; exit 3")
    assert (raised.value.exit_code, raised.value.stdout) == (3, "partial\n")
    assert sandbox.commands.run("whoami; pwd").stdout == "user\n/home/user\n"


def test_the_pid_is_the_one_inside_and_a_kill_is_for_that_process_alone(create: Create) -> None:
    sandbox = create()
    command = sandbox.commands.run("sleep 300 & echo child $!; wait", background=True)
    child = next(out for out, _, _ in command if out).split()[1]
    assert command.pid in [process.pid for process in sandbox.commands.list()]
    assert command.kill()
    with pytest.raises(sdk.CommandExitException):
        sandbox.commands.run(f"kill -0 {command.pid}")
    sandbox.commands.run(f"kill -0 {child}")  # as on the service: what it started lives on


def test_a_command_timeout_ends_the_stream_and_the_process(create: Create) -> None:
    sandbox = create()
    command = sandbox.commands.run("sleep 300", timeout=1, background=True)
    with pytest.raises(sdk.TimeoutException):
        command.wait()
    until = time.monotonic() + 30
    while sandbox.commands.list() and time.monotonic() < until:
        time.sleep(0.1)
    assert sandbox.commands.list() == []


def test_a_terminal_can_be_left_joined_and_resized(create: Create) -> None:
    sandbox = create()
    terminal = sandbox.pty.create(sdk.PtySize(rows=24, cols=80), cwd="/tmp")
    terminal.disconnect()
    again = sandbox.pty.connect(terminal.pid)
    sandbox.pty.resize(terminal.pid, sdk.PtySize(rows=30, cols=123))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; pwd; exit\n")
    seen: list[bytes] = []
    assert again.wait(on_pty=seen.append).exit_code == 0
    assert b"30 123" in b"".join(seen)
    assert b"/tmp" in b"".join(seen)


def test_sudo_runs_as_root_with_streams_and_exit_codes(create: Create) -> None:
    sandbox = create()
    assert sandbox.commands.run("sudo whoami").stdout == "root\n"
    assert sandbox.commands.run("echo in | sudo tee /etc/by-root; cat /etc/by-root").stdout == "in\nin\n"
    with pytest.raises(sdk.CommandExitException) as raised:
        sandbox.commands.run("sudo sh -c 'exit 5'")
    assert raised.value.exit_code == 5
    assert sandbox.commands.run("whoami", user="root").stdout == "root\n"


def test_files_of_any_size_come_back_as_they_went(create: Create) -> None:
    sandbox = create()
    data = uuid.uuid4().bytes * (200_000)
    sandbox.files.write("deep/er/data.bin", data)
    assert bytes(sandbox.files.read("deep/er/data.bin", format="bytes")) == data
    size = sandbox.commands.run("stat -c %s deep/er/data.bin").stdout.strip()
    assert size == str(len(data))
    with pytest.raises(sdk.FileNotFoundException):
        sandbox.files.read("missing")


def test_hostile_paths_do_no_harm_to_the_emulator(create: Create) -> None:
    sandbox = create()
    sandbox.commands.run("mkfifo pipe; ln -s /dev/zero endless; ln -s loop loop; mkdir -m 000 closed")
    with pytest.raises(sdk.SandboxException):
        sandbox.files.read("pipe")
    with pytest.raises(sdk.SandboxException):
        sandbox.files.write("pipe", "x")
    with pytest.raises(sdk.SandboxException):
        sandbox.files.read("loop")
    assert "closed" in [entry.name for entry in sandbox.files.list(".", depth=3)]
    assert sandbox.files.write("after", "still there").path == "/home/user/after"


def test_watching_sees_what_happened_and_in_which_order(create: Create) -> None:
    sandbox = create()
    sandbox.files.make_dir("watched")
    watch = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.commands.run(
        "mkdir -p watched/a/b; echo x > watched/a/b/file; mv watched/a/b/file watched/moved; rm watched/moved"
    )
    events = [(event.type.value, event.name) for event in watch.get_new_events()]
    assert ("create", "a") in events
    assert ("create", "moved") in events
    assert events[-1] == ("remove", "moved")
    watch.stop()


def test_a_signed_url_opens_one_file_of_one_sandbox_and_expires(create: Create, e2b: Handle) -> None:
    first, second = create(), create()
    first.files.write("secret.txt", "first")
    second.files.write("secret.txt", "second")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert opener.open(first.download_url("secret.txt")).read() == b"first"
    assert opener.open(second.download_url("secret.txt", use_signature_expiration=600)).read() == b"second"
    for url in (
        first.download_url("secret.txt", use_signature_expiration=-10),
        first.download_url("secret.txt").replace("secret.txt", "other.txt"),
    ):
        with pytest.raises(urllib.error.HTTPError):
            opener.open(url)


def test_the_lifetime_ends_the_sandbox_when_the_clock_moves(tmp_path: Path) -> None:
    with lowtide.emulators.start("e2b", home=tmp_path, plain=True) as handle:
        url = handle.urls["e2b"]
        options = {"api_key": handle.environment["E2B_API_KEY"], "api_url": url, "sandbox_url": url}
        short = sdk.Sandbox.create(timeout=1000, **options)
        long = sdk.Sandbox.create(timeout=2000, **options)
        handle.clock.advance(500)
        assert short.is_running()
        long.set_timeout(5000)
        handle.clock.advance(2000)
        assert not short.is_running()
        assert long.is_running()
        assert handle.state()["backing"] == 1
        with pytest.raises(sdk.SandboxNotFoundException):
            short.set_timeout(60)
        handle.clock.advance(5000)
        assert handle.state()["backing"] == 0


def test_auto_pause_keeps_files_and_processes_and_wakes_on_connect(tmp_path: Path) -> None:
    with lowtide.emulators.start("e2b", home=tmp_path, plain=True) as handle:
        url = handle.urls["e2b"]
        options = {"api_key": handle.environment["E2B_API_KEY"], "api_url": url, "sandbox_url": url}
        sandbox = sdk.Sandbox.create(timeout=1000, lifecycle={"on_timeout": "pause"}, **options)
        sandbox.files.write("kept.txt", "kept")
        command = sandbox.commands.run("sleep 4000", background=True, timeout=0)
        handle.clock.advance(1001)
        assert sandbox.get_info().state == sdk.SandboxState.PAUSED
        assert not sandbox.is_running()
        handle.clock.advance(100_000)  # a paused sandbox has no lifetime
        sandbox.connect()
        assert sandbox.files.read("kept.txt") == "kept"
        assert command.pid in [process.pid for process in sandbox.commands.list()]
        assert sandbox.pause() is True
        assert sandbox.pause() is False
        assert sandbox.kill() is True
        assert sandbox.kill() is False
        assert handle.state()["backing"] == 0


def test_a_pause_without_memory_keeps_the_files_alone(create: Create, options: dict[str, Any]) -> None:
    sandbox = create()
    boot = sandbox.files.read("/proc/sys/kernel/random/boot_id")
    for turn in range(3):
        sandbox.commands.run(f"echo {turn} >> turns; rm -rf /tmp/here; sudo touch /srv/by-root-{turn}")
        sandbox.commands.run("sleep 4000", background=True, timeout=0)
        assert sandbox.pause(mode="filesystem")
        sandbox.connect()
        assert sandbox.commands.list() == []
    assert sandbox.files.read("turns") == "0\n1\n2\n"
    assert sandbox.commands.run("ls /srv").stdout.split() == [f"by-root-{turn}" for turn in range(3)]
    assert sandbox.files.read("/proc/sys/kernel/random/boot_id") != boot


def test_snapshots_and_forks_are_copies(create: Create, options: dict[str, Any]) -> None:
    sandbox = create()
    sandbox.files.write("state", "before")
    snapshot = sandbox.create_snapshot(name="mine", **options)
    sandbox.files.write("state", "after")
    fork = sandbox.fork(**options)[0]
    copy = create("mine")
    try:
        assert copy.files.read("state") == "before"
        assert fork.files.read("state") == "after"
        fork.files.write("state", "forked")
        assert sandbox.files.read("state") == "after"
    finally:
        fork.kill()
        assert sdk.Sandbox.delete_snapshot(snapshot.snapshot_id, **options)


def test_the_same_idempotency_key_makes_one_sandbox(
    create: Create, e2b: Handle, options: dict[str, Any]
) -> None:
    key = uuid.uuid4().hex
    first = create(idempotency_key=key, metadata={"job": key})
    again = create(idempotency_key=key, metadata={"job": key})
    assert first.sandbox_id == again.sandbox_id
    listed = sdk.Sandbox.list(query=sdk.SandboxQuery(metadata={"job": key}), **options).next_items()
    assert [info.sandbox_id for info in listed] == [first.sandbox_id]


def test_sandboxes_do_not_share_processes_files_or_ports(create: Create) -> None:
    first, second = create(), create()
    first.commands.run("echo mine > /tmp/mine; python3 -m http.server 8123", background=True)
    second.commands.run("python3 -m http.server 8123 & sleep 1; kill $!")  # the same port is free here
    assert not second.files.exists("/tmp/mine")
    assert "8123" not in second.commands.run("ps -e -o args || cat /proc/[0-9]*/cmdline").stdout


def test_run_code_has_rich_results_contexts_and_restart(options: dict[str, Any]) -> None:
    pytest.importorskip("ipykernel")
    interpreter = pytest.importorskip("e2b_code_interpreter")
    sandbox = interpreter.Sandbox.create(**options)
    try:
        assert sandbox.run_code("x = 41; x + 1").text == "42"
        html = sandbox.run_code("from IPython.display import HTML; HTML('<b>rich</b>')")
        assert html.results[0].html == "<b>rich</b>"
        png = sandbox.run_code("class P:\n    def _repr_png_(self): return b'\\x89PNG..'\nP()")
        assert png.results[0].png
        failed = sandbox.run_code("print('partial'); 1/0")
        assert failed.logs.stdout == ["partial\n"]
        assert failed.error.name == "ZeroDivisionError"
        context = sandbox.create_code_context(cwd="/tmp")
        assert sandbox.run_code("import os; os.getcwd()", context=context).text == "/tmp"
        assert sandbox.run_code("x", context=context).error.name == "NameError"
        sandbox.run_code("y = 1", context=context)
        sandbox.restart_code_context(context)
        assert sandbox.run_code("y", context=context).error.name == "NameError"
        assert sandbox.run_code("x").text == "41"
        assert sandbox.run_code("import os; os.environ['K']", envs={"K": "v"}).text == "v"
        assert sandbox.run_code("import os; 'K' in os.environ").text == "False"
        sandbox.remove_code_context(context)
        inside = sandbox.run_code("open('/home/user/by-code', 'w').write('ok')")
        assert inside.error is None
        assert sandbox.files.read("by-code") == "ok"
    finally:
        sandbox.kill()
