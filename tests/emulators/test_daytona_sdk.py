"""The Daytona emulator as the unmodified SDK sees it."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lowtide.emulators.handle import Handle

sdk = pytest.importorskip("daytona")
Create = Callable[..., Any]


def fetched(
    url: str, headers: dict[str, str] | None = None, method: str = "GET", data: bytes | None = None
) -> tuple[int, bytes]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers or {}, method=method, data=data)
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)
    return found


# ---------------------------------------------------------------- the control plane


def test_a_sandbox_runs_and_is_found_by_id_name_and_label(
    daytona_create: Create, daytona_client: Any
) -> None:
    box = daytona_create(name=f"box-{daytona_create.mark}", env_vars={"COLOUR": "green"})
    assert box.state == sdk.SandboxState.STARTED
    assert box.process.exec("echo $COLOUR $USER").result == "green daytona\n"
    assert daytona_client.get(box.id).id == box.id
    assert daytona_client.get(box.name).id == box.id
    query = sdk.ListSandboxesQuery(labels={"test": daytona_create.mark})
    assert [one.id for one in daytona_client.list(query)] == [box.id]
    query = sdk.ListSandboxesQuery(labels={"test": daytona_create.mark, "other": "x"})
    assert list(daytona_client.list(query)) == []


def test_a_name_is_unique_until_its_sandbox_is_deleted(daytona_create: Create, daytona_client: Any) -> None:
    name = f"box-{daytona_create.mark}"
    first = daytona_create(name=name)
    with pytest.raises(sdk.DaytonaConflictError):
        daytona_create(name=name)
    first.delete(timeout=0)
    with pytest.raises(sdk.DaytonaNotFoundError):
        daytona_client.get(name)
    assert daytona_create(name=name).id != first.id


def test_lists_come_in_pages_by_cursor(daytona_create: Create, daytona_client: Any) -> None:
    made = {daytona_create().id for _ in range(5)}
    query = sdk.ListSandboxesQuery(labels={"test": daytona_create.mark}, limit=2)
    listed = [one.id for one in daytona_client.list(query)]
    assert len(listed) == 5
    assert set(listed) == made
    stopped = daytona_client.get(listed[0])
    stopped.stop(timeout=0)
    states = sdk.ListSandboxesQuery(labels={"test": daytona_create.mark}, states=[sdk.SandboxState.STOPPED])
    assert [one.id for one in daytona_client.list(states)] == [stopped.id]


def test_stop_keeps_the_files_and_ends_the_processes(daytona_create: Create) -> None:
    box = daytona_create()
    box.fs.upload_file(b"kept", "kept.txt")
    box.process.exec("setsid sleep 1000 > /dev/null 2>&1 &")
    box.stop(timeout=0)
    box.refresh_data()  # the SDK may write an older answer over the event that it has waited for
    assert box.state == sdk.SandboxState.STOPPED
    with pytest.raises(sdk.DaytonaError):
        box.process.exec("true")
    box.start(timeout=0)
    assert box.fs.download_file("kept.txt") == b"kept"
    assert box.process.exec("pgrep -c sleep || true").result.strip() == "0"
    box.stop(timeout=0)
    box.archive()
    wait_for(lambda: (box.refresh_data(), box.state == sdk.SandboxState.ARCHIVED)[1])
    box.start(timeout=0)
    assert box.fs.download_file("kept.txt") == b"kept"


def test_pause_keeps_the_processes(daytona_create: Create) -> None:
    box = daytona_create(auto_stop_interval=0)
    box.process.exec("(while :; do date +%N >> ticks; sleep 0.1; done) > /dev/null 2>&1 &")
    wait_for(lambda: box.process.exec("cat ticks 2>/dev/null | wc -l").result.strip() not in ("0", ""))
    box.pause()
    box.refresh_data()  # the SDK may write an older answer over the event that it has waited for
    assert box.state == sdk.SandboxState.PAUSED
    box.start(timeout=0)
    before = int(box.process.exec("wc -l < ticks").result)
    wait_for(lambda: int(box.process.exec("wc -l < ticks").result) > before)
    box.pause()
    box.delete(timeout=0, wait=True)


def test_delete_is_not_idempotent_and_frees_everything(daytona_create: Create, daytona: Handle) -> None:
    box = daytona_create()
    box.delete(timeout=0, wait=True)
    with pytest.raises(sdk.DaytonaNotFoundError):
        box.delete(timeout=0)
    with pytest.raises(sdk.DaytonaNotFoundError):
        box.process.exec("true")


def test_delete_during_a_change_is_a_conflict(
    daytona_create: Create, daytona: Handle, daytona_client: Any
) -> None:
    daytona.faults.add("start-slow", match={"test": daytona_create.mark}, seconds=2)
    name = f"slow-{daytona_create.mark}"
    with pytest.raises(sdk.DaytonaTimeoutError):
        daytona_client.create(
            sdk.CreateSandboxFromSnapshotParams(name=name, labels={"test": daytona_create.mark}), timeout=1
        )
    with pytest.raises(sdk.DaytonaConflictError):
        daytona_client.get(name).delete(timeout=0)
    wait_for(lambda: daytona_client.get(name).state == sdk.SandboxState.STARTED)
    daytona_client.get(name).delete(timeout=0, wait=True)


def test_a_sandbox_from_an_image_is_built_with_logs(daytona_create: Create, daytona_client: Any) -> None:
    image = sdk.Image.base("python:3.12-slim").env({"FROM_IMAGE": "yes"})
    lines: list[str] = []
    box = daytona_client.create(
        sdk.CreateSandboxFromImageParams(
            image=image,
            resources=sdk.Resources(cpu=2, memory=2, disk=5),
            labels={"test": daytona_create.mark},
        ),
        timeout=0,
        on_snapshot_create_logs=lines.append,
    )
    assert (box.cpu, box.memory, box.disk) == (2, 2, 5)
    assert "FROM python:3.12-slim" in "".join(lines)
    assert box.process.exec("echo $FROM_IMAGE").result == "yes\n"


def test_labels_visibility_and_resources_change(daytona_create: Create) -> None:
    box = daytona_create()
    assert box.set_labels({"test": daytona_create.mark, "a": "b"})["a"] == "b"
    box.resize(sdk.Resources(cpu=2, memory=3))
    box.refresh_data()
    assert (box.cpu, box.memory, box.labels["a"]) == (2, 3, "b")
    with pytest.raises(sdk.DaytonaBadRequestError):
        box.resize(sdk.Resources(cpu=1))


def test_a_snapshot_of_a_sandbox_makes_others(daytona_create: Create, daytona_client: Any) -> None:
    box = daytona_create()
    box.fs.upload_file(b"original", "file.txt")
    name = f"snap-{daytona_create.mark}"
    box.create_snapshot(name, timeout=0)
    box.fs.upload_file(b"changed", "file.txt")
    assert daytona_create(snapshot=name).fs.download_file("file.txt") == b"original"
    snapshot = daytona_client.snapshot.get(name)
    assert snapshot.name in [one.name for one in daytona_client.snapshot.list().items]
    daytona_client.snapshot.delete(snapshot)
    with pytest.raises(sdk.DaytonaBadRequestError):
        daytona_create(snapshot=name)


def test_a_fork_has_the_files_and_keeps_its_parent(daytona_create: Create) -> None:
    box = daytona_create()
    box.fs.upload_file(b"here", "file.txt")
    fork = box.fork(timeout=0)
    assert fork.id != box.id
    assert fork.fs.download_file("file.txt") == b"here"
    with pytest.raises(sdk.DaytonaBadRequestError):
        box.delete(timeout=0)
    fork.delete(timeout=0, wait=True)
    box.delete(timeout=0, wait=True)


def test_a_volume_outlives_its_sandboxes(daytona_create: Create, daytona_client: Any) -> None:
    volume = daytona_client.volume.get(f"volume-{daytona_create.mark}", create=True)
    mount = sdk.VolumeMount(volume_id=volume.id, mount_path="/home/daytona/data")
    first = daytona_create(volumes=[mount])
    first.fs.upload_file(b"shared", "/home/daytona/data/deep/file.txt")
    second = daytona_create(volumes=[mount])
    assert second.fs.download_file("/home/daytona/data/deep/file.txt") == b"shared"
    with pytest.raises(Exception, match="in use"):  # older SDKs pass their client's own error through
        daytona_client.volume.delete(volume)
    first.delete(timeout=0, wait=True)
    second.delete(timeout=0, wait=True)
    third = daytona_create(volumes=[mount])
    assert third.fs.download_file("/home/daytona/data/deep/file.txt") == b"shared"
    third.delete(timeout=0, wait=True)
    daytona_client.volume.delete(volume)


def test_a_preview_link_needs_its_token(daytona_create: Create) -> None:
    box = daytona_create()
    box.process.exec("echo hello > index.html; setsid python3 -m http.server 3000 > /dev/null 2>&1 &")
    link = box.get_preview_link(3000)
    token = {"X-Daytona-Preview-Token": link.token}
    wait_for(lambda: fetched(link.url, token)[0] == 200)
    assert fetched(f"{link.url}/index.html", token) == (200, b"hello\n")
    assert fetched(link.url)[0] == 401
    assert fetched(link.url, {"X-Daytona-Preview-Token": "wrong"})[0] == 401
    signed = box.create_signed_preview_url(3000, expires_in_seconds=60)
    httpx = pytest.importorskip("httpx")
    with httpx.Client(trust_env=False) as web:
        assert web.get(f"{signed.url}/index.html").text == "hello\n"
        page = signed.url.partition("?")[0] + "index.html"
        assert web.get(page).text == "hello\n"  # by the cookie, as a browser fetches what a page names
        assert fetched(page)[0] == 401
        box.expire_signed_preview_url(3000, signed.token)
        assert web.get(signed.url).status_code == 401
    if hasattr(box, "set_public"):  # not in older SDKs
        box.set_public(True)
        assert fetched(link.url)[0] == 200


def test_signed_file_urls_work_without_a_key(daytona_create: Create, daytona: Handle) -> None:
    box = daytona_create()
    box.fs.upload_file(b"secret", "a b.txt")
    url = box.download_url("a b.txt", ttl_seconds=600)
    assert fetched(url) == (200, b"secret")
    assert fetched(url.replace("a+b.txt", "other.txt"))[0] == 401
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="n"\r\n\r\nnew\r\n--x--\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    assert fetched(box.upload_url("up.txt"), form, "POST", body)[0] == 200
    assert box.fs.download_file("up.txt") == b"new"
    box.rotate_signing_key()
    assert fetched(url)[0] == 401


def test_a_wrong_key_is_refused(daytona: Handle) -> None:
    config = sdk.DaytonaConfig(api_key="wrong", api_url=daytona.environment["DAYTONA_API_URL"])
    with pytest.raises(sdk.DaytonaAuthenticationError):
        sdk.Daytona(config).get("anything")


# ---------------------------------------------------------------- commands


def test_exec_merges_the_streams_and_counts_as_a_shell_does(daytona_create: Create) -> None:
    box = daytona_create()
    done = box.process.exec("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.result) == (3, "out\nerr\n")
    assert box.process.exec("pwd; echo $A", cwd="/tmp", env={"A": "b"}).result == "/tmp\nb\n"
    with pytest.raises(sdk.DaytonaBadRequestError):
        box.process.exec("true", cwd="/missing")
    done = box.process.code_run("import sys; print(sys.argv[1:])", sdk.CodeRunParams(argv=["x"]))
    assert done.result == "['x']\n"
    assert box.process.code_run("1/0").exit_code == 1


def test_exec_timeout_ends_the_whole_tree(daytona_create: Create) -> None:
    box = daytona_create()
    with pytest.raises(sdk.DaytonaTimeoutError):
        box.process.exec("setsid sleep 1000 & sleep 1000", timeout=1)
    assert box.process.exec("pgrep -c sleep || true").result.strip() == "0"


def test_a_session_keeps_its_state_and_its_streams_apart(daytona_create: Create) -> None:
    box = daytona_create()
    box.process.create_session("s")
    with pytest.raises(sdk.DaytonaConflictError):
        box.process.create_session("s")

    def run(command: str) -> Any:
        return box.process.execute_session_command("s", sdk.SessionExecuteRequest(command=command))

    assert run("cd /tmp; export A=5; f() { echo called; }").exit_code == 0
    done = run("pwd; echo $A; f; echo bad >&2; (exit 7)")
    assert (done.exit_code, done.stdout, done.stderr) == (7, "/tmp\n5\ncalled\n", "bad\n")
    assert run("printf 'no newline'").stdout == "no newline\n"  # the daemon keeps lines
    assert run("cat").stdout == ""  # what is waited for has no input
    assert run("echo '").exit_code != 0
    assert run("cat << 'END'\nit's \"quoted\" $A\nEND").stdout == 'it\'s "quoted" $A\n'
    assert run("exit 9").exit_code == 9
    with pytest.raises(sdk.DaytonaError) as caught:
        run("true")
    assert caught.value.status_code == 410
    box.process.delete_session("s")
    with pytest.raises(sdk.DaytonaNotFoundError):
        box.process.get_session("s")


def test_a_commands_log_is_followed_while_it_runs_and_after(daytona_create: Create) -> None:
    box = daytona_create()
    box.process.create_session("s")
    text = "for i in 1 2 3; do echo o$i; echo e$i >&2; done; read line; echo got $line"
    request = sdk.SessionExecuteRequest(command=text, run_async=True, suppress_input_echo=True)
    command = box.process.execute_session_command("s", request)
    assert box.process.get_session_command("s", command.cmd_id).exit_code is None

    async def follow() -> tuple[str, str]:
        out: list[str] = []
        err: list[str] = []

        async def answer() -> None:
            while "o3" not in "".join(out):
                await asyncio.sleep(0.02)
            await asyncio.to_thread(box.process.send_session_command_input, "s", command.cmd_id, "hello")

        task = asyncio.create_task(answer())
        await box.process.get_session_command_logs_async("s", command.cmd_id, out.append, err.append)
        task.cancel()
        return "".join(out), "".join(err)

    assert asyncio.run(follow()) == ("o1\no2\no3\ngot hello\n", "e1\ne2\ne3\n")
    assert asyncio.run(follow()) == ("o1\no2\no3\ngot hello\n", "e1\ne2\ne3\n")
    logs = box.process.get_session_command_logs("s", command.cmd_id)
    assert (logs.stdout, logs.stderr) == ("o1\no2\no3\ngot hello\n", "e1\ne2\ne3\n")
    with pytest.raises(sdk.DaytonaError) as caught:
        box.process.send_session_command_input("s", command.cmd_id, "late")
    assert caught.value.status_code == 410


def test_a_long_log_comes_whole(daytona_create: Create) -> None:
    box = daytona_create()
    box.process.create_session("s")
    done = box.process.execute_session_command("s", sdk.SessionExecuteRequest(command="seq 400000"))
    assert done.stdout == "".join(f"{n}\n" for n in range(1, 400001))


def test_a_session_ends_with_what_it_started(daytona_create: Create) -> None:
    box = daytona_create()
    box.process.create_session("s")
    request = sdk.SessionExecuteRequest(command="setsid sleep 1000", run_async=True)
    box.process.execute_session_command("s", request)
    wait_for(lambda: box.process.exec("pgrep -c sleep || true").result.strip() == "1")
    box.process.delete_session("s")
    assert box.process.exec("pgrep -c sleep || true").result.strip() == "0"


def test_a_terminal_is_a_terminal(daytona_create: Create) -> None:
    box = daytona_create()
    size = sdk.PtySize(cols=100, rows=30)
    terminal = box.process.create_pty_session(id="t", envs={"A": "b"}, pty_size=size)
    terminal.send_input("tty && stty size && echo A=$A && exit 5\n")
    seen = bytearray()
    ended = terminal.wait(on_data=seen.extend, timeout=30)
    assert ended.exit_code == 5
    assert b"/dev/pts/" in seen
    assert b"30 100" in seen
    assert b"A=b" in seen
    other = box.process.create_pty_session(id="u")
    assert other.resize(sdk.PtySize(cols=90, rows=20)).cols == 90
    assert "u" in [one.id for one in box.process.list_pty_sessions()]
    box.process.kill_pty_session("u")
    with pytest.raises(sdk.DaytonaNotFoundError):
        box.process.get_pty_session_info("u")


def test_the_interpreter_keeps_variables_per_context(daytona_create: Create) -> None:
    box = daytona_create()
    run = box.code_interpreter.run_code
    assert run("x = 41").error is None
    done = run("import os, sys\nprint(x + 1)\nprint('e', file=sys.stderr)\nos.system('echo child')\n")
    assert "42\n" in done.stdout
    assert "child\n" in done.stdout
    assert done.stderr == "e\n"
    context = box.code_interpreter.create_context(cwd="/tmp")
    assert (
        run("import os; print(os.getcwd(), os.environ['A'])", context=context, envs={"A": "b"}).stdout
        == "/tmp b\n"
    )
    failed = run("print(x)", context=context)
    assert failed.error.name == "NameError"
    assert [one.id for one in box.code_interpreter.list_contexts()] == [context.id]
    box.code_interpreter.delete_context(context)
    with pytest.raises(sdk.DaytonaTimeoutError):
        run("import time; time.sleep(100)", timeout=1)
    assert run("print(x)").stdout == "41\n"  # interrupted, not lost


# ---------------------------------------------------------------- files and git


def test_files_go_up_and_down_in_order(daytona_create: Create) -> None:
    box = daytona_create()
    names = ["plain.txt", "deep/er/file with space.txt", 'quo"te.txt', "ünï.txt"]
    box.fs.upload_files([sdk.FileUpload(source=name.encode(), destination=name) for name in names])
    asked = [sdk.FileDownloadRequest(source=name) for name in [*names, "missing.txt"]]
    answers = box.fs.download_files(asked)
    assert [one.result for one in answers[:-1]] == [name.encode() for name in names]
    assert answers[-1].result is None
    assert answers[-1].error_details.code == "FILE_NOT_FOUND"
    with pytest.raises(sdk.DaytonaFileNotFoundError):
        box.fs.download_file("missing.txt")
    big = bytes(range(256)) * 40_000
    box.fs.upload_file(big, "/tmp/big")
    assert box.fs.download_file("/tmp/big") == big
    with pytest.raises(sdk.DaytonaError) as caught:
        box.fs.upload_file(b"x", "/usr/bin/nope/file")
    assert caught.value.status_code == 400
    assert b"processor" in box.fs.download_file("/proc/cpuinfo")


def test_files_are_listed_moved_and_removed(daytona_create: Create) -> None:
    box = daytona_create()
    box.fs.create_folder("a/b", "750")
    box.fs.upload_file(b"12345", "a/b/c.txt")
    info = box.fs.get_file_info("a/b")
    assert (info.is_dir, info.permissions, info.owner) == (True, "0750", "daytona")
    assert [one.name for one in box.fs.list_files("a/b")] == ["c.txt"]
    box.fs.set_file_permissions("a/b/c.txt", mode="600")
    assert box.fs.get_file_info("a/b/c.txt").mode == "-rw-------"
    box.fs.move_files("a/b/c.txt", "a/d.txt")
    with pytest.raises(sdk.DaytonaFileNotFoundError):
        box.fs.get_file_info("a/b/c.txt")
    with pytest.raises(sdk.DaytonaBadRequestError):
        box.fs.delete_file("a")
    box.fs.delete_file("a", recursive=True)
    assert "a" not in [one.name for one in box.fs.list_files(".")]


def test_files_are_searched_and_replaced(daytona_create: Create) -> None:
    box = daytona_create()
    box.fs.upload_file(b"one\nTODO two\n", "p/x.py")
    box.fs.upload_file(b"TODO three\n", "p/q/y.txt")
    found = box.fs.find_files("p", "TODO")
    assert sorted((match.file, match.line, match.content) for match in found) == [
        ("/home/daytona/p/q/y.txt", 1, "TODO three"),
        ("/home/daytona/p/x.py", 2, "TODO two"),
    ]
    assert box.fs.search_files("p", "*.py").files == ["/home/daytona/p/x.py"]
    changed = box.fs.replace_in_files(["p/x.py", "p/none"], "TODO", "DONE")
    assert [one.success for one in changed] == [True, False]
    assert box.fs.download_file("p/x.py") == b"one\nDONE two\n"


def test_git_works_in_the_sandbox(daytona_create: Create) -> None:
    box = daytona_create()
    git = box.git
    git.init("repo", initial_branch="main")
    git.configure_user("Ada", "ada@example.com", scope="local", path="repo")
    assert git.get_config("user.name", scope="local", path="repo") == "Ada"
    box.fs.upload_file(b"1\n", "repo/a.txt")
    assert [(f.name, str(f.worktree.value)) for f in git.status("repo").file_status] == [
        ("a.txt", "Untracked")
    ]
    git.add("repo", ["a.txt"])
    first = git.commit("repo", "first\n\nwith a body", "Ada", "ada@example.com")
    assert len(first.sha) == 40
    git.create_branch("repo", "feature")
    assert git.branches("repo").current == "feature"
    with pytest.raises(sdk.DaytonaConflictError):
        git.create_branch("repo", "main")
    git.clone("/home/daytona/repo", "copy", branch="main")
    box.fs.upload_file(b"2\n", "copy/b.txt")
    git.add("copy", ["."])
    git.commit("copy", "second", "Ada", "ada@example.com")
    assert git.status("copy").ahead == 1
    git.push("copy")
    git.checkout_branch("repo", "main")
    assert box.process.exec("cat b.txt", cwd="repo").result == "2\n"
    git.delete_branch("repo", "feature")
    with pytest.raises(sdk.DaytonaNotFoundError):
        git.status("nowhere")


def test_what_is_not_there_says_so(daytona_create: Create) -> None:
    box = daytona_create()
    box.process.exec("mkdir repo")
    with pytest.raises(sdk.DaytonaError, match="not available"):
        box.create_lsp_server("typescript", "repo").start()
    with pytest.raises(sdk.DaytonaError, match="not available"):
        box.computer_use.start()


def test_a_language_server_answers_where_the_machine_has_one(daytona_create: Create) -> None:
    pytest.importorskip("pylsp")
    box = daytona_create()
    box.process.exec("mkdir repo")
    box.fs.upload_file(b"import os\n\ndef double(x):\n    return 2 * x\n\nos.getc\n", "repo/a.py")
    server = box.create_lsp_server("python", "repo")
    server.start()
    server.did_open("a.py")
    assert "double" in [one.name for one in server.document_symbols("a.py")]
    found = server.completions("a.py", sdk.LspCompletionPosition(line=5, character=7))
    assert any(one.label.startswith("getcwd") for one in found.items)
    box.process.exec("ln -s /dev/zero repo/endless.py")
    with pytest.raises(sdk.DaytonaError, match=r"too large|not a"):
        server.did_open("endless.py")
    server.did_close("a.py")
    server.stop()
    with pytest.raises(sdk.DaytonaError, match="not running"):
        server.document_symbols("a.py")


# ---------------------------------------------------------------- the async SDK


async def test_the_async_sdk_hears_of_changes_by_events(
    daytona_create: Create, daytona: Handle, daytona_settings: Any
) -> None:
    async with sdk.AsyncDaytona(daytona_settings) as client:
        parameters = sdk.CreateSandboxFromSnapshotParams(labels={"test": daytona_create.mark})  # type: ignore[attr-defined]
        box = await client.create(parameters)
        async with asyncio.timeout(30):
            while not client._event_dispatcher.is_connected:
                await asyncio.sleep(0.02)
        calls = len(daytona.calls("get"))
        await box.stop()
        assert len(daytona.calls("get")) - calls <= 3  # told, not polled
        await box.refresh_data()  # the SDK may write an older answer over the event that it has waited for
        assert box.state == sdk.SandboxState.STOPPED
        await box.start()
        assert (await box.process.exec("echo again")).result == "again\n"
        await box.delete(wait=True)


def test_null_bytes_of_a_session_are_kept(daytona_create: Create) -> None:
    sandbox = daytona_create()
    sandbox.process.create_session("z")
    asked = sdk.SessionExecuteRequest(command="printf 'a\\0b\\n'")
    assert sandbox.process.execute_session_command("z", asked).stdout == "a\0b\n"


def test_a_session_command_of_five_megabytes_runs(daytona_create: Create) -> None:
    sandbox = daytona_create()
    sandbox.process.create_session("long")
    asked = sdk.SessionExecuteRequest(command=f"text={'x' * 5_000_000}; echo ${{#text}}")
    assert sandbox.process.execute_session_command("long", asked).stdout == "5000000\n"


def test_a_search_ends_when_its_caller_leaves(daytona: Handle, daytona_create: Create) -> None:
    sandbox = daytona_create()
    sandbox.process.exec("mkfifo pipe && ln -s /dev/zero endless")
    url = f"{daytona.urls['daytona']}/toolbox/{sandbox.id}/files/find?path=/&pattern=no-such-text-anywhere"
    key = daytona.environment["DAYTONA_API_KEY"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(url, headers={"Authorization": f"Bearer {key}"}, timeout=0.5, trust_env=False)
    until = time.monotonic() + 20
    while "searching" in (left := sandbox.process.exec(COUNT_SEARCHES).result):
        assert time.monotonic() < until, left
        time.sleep(0.1)


COUNT_SEARCHES = """for p in /proc/[0-9]*; do
  tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q 'What run[s] inside the sandbox for one question' && echo searching
done; true"""
