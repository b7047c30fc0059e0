"""A runtime's life on the local provider: connect, attach, keep, close, and every way in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide import Sandbox
from lowtide.errors import (
    SandboxError,
    SandboxFailedError,
    SandboxNotFoundError,
    SandboxTimeoutError,
    ValidationError,
)
from lowtide.lifecycle.lease import Outcome
from lowtide.runtime import LocalRuntime
from lowtide.runtime.actions import Action, Observation, Run, RunObservation
from lowtide.runtime.base import new_sid, session_tag
from lowtide.runtime.events import read_transcript
from lowtide.runtime.served import Served

ANSWER_SECONDS = 120.0


def there(sid: str) -> list[str | None]:
    found = Sandbox.list(tags=[session_tag(sid)], provider="local").result(ANSWER_SECONDS)
    return [sandbox.sandbox_id for sandbox in found]


async def test_the_six_steps_in_async_code() -> None:
    async with LocalRuntime() as runtime:
        seen = await runtime.run_command("echo $((6*7))")
        assert (seen.content, seen.exit_code) == ("42\n", 0)
        assert there_now(await Sandbox.list(tags=[session_tag(runtime.sid)])) == [runtime.sandbox_id]
    assert await Sandbox.list(tags=[session_tag(runtime.sid)]) == []


def there_now(found: list[Sandbox]) -> list[str | None]:
    return [sandbox.sandbox_id for sandbox in found]


def test_close_any_number_of_times() -> None:
    runtime = LocalRuntime()
    assert runtime.close() is None  # never connected
    runtime = LocalRuntime()
    runtime.connect().result(ANSWER_SECONDS)
    report = runtime.close()
    assert report is not None
    assert report.outcome is Outcome.DESTROYED
    assert runtime.close() == report
    assert there(runtime.sid) == []
    with pytest.raises(SandboxError, match="closed"):
        runtime.run_command("ls").result(ANSWER_SECONDS)
    with pytest.raises(SandboxError, match="closed"):
        runtime.connect().result(ANSWER_SECONDS)


def test_close_is_silent_about_what_is_already_gone() -> None:
    runtime = LocalRuntime()
    runtime.connect().result(ANSWER_SECONDS)
    assert runtime.sandbox_id is not None
    Sandbox.delete(runtime.sandbox_id, provider="local").result(ANSWER_SECONDS)
    report = runtime.close()
    assert report is not None
    assert report.outcome is Outcome.ALREADY_GONE


def test_close_is_bounded_when_the_server_hangs() -> None:
    runtime = LocalRuntime()
    runtime.connect().result(ANSWER_SECONDS)
    runtime.run_command("(sleep 0.3; kill -STOP $(pgrep -f 'actionserver.*serve')) & disown").result(
        ANSWER_SECONDS
    )
    time.sleep(1.0)
    began = time.monotonic()
    runtime.close()
    assert time.monotonic() - began < 5.0 + 30.0
    assert there(runtime.sid) == []


def test_many_close_at_once() -> None:
    runtimes = [LocalRuntime() for _ in range(3)]
    lowtide.results([runtime.connect() for runtime in runtimes])
    lowtide.results([runtime.aclose() for runtime in runtimes])
    assert [there(runtime.sid) for runtime in runtimes] == [[], [], []]


@pytest.mark.parametrize("step", ["_bring", "_launch", "_reach"])
@pytest.mark.parametrize(
    "problem", [SandboxFailedError("no", reason="test"), OSError("broken"), TimeoutError()]
)
def test_a_connect_that_fails_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str, problem: Exception
) -> None:
    async def fail(self: Served) -> None:
        raise problem

    monkeypatch.setattr(Served, step, fail)
    runtime = LocalRuntime()
    with pytest.raises((type(problem), SandboxTimeoutError)):
        runtime.connect().result(ANSWER_SECONDS)
    assert there(runtime.sid) == []
    assert runtime.close() is None


def test_an_image_without_python_is_said() -> None:
    runtime = LocalRuntime(config={"environment_variables": {"PATH": "/nonexistent"}})
    with pytest.raises(SandboxFailedError, match=r"Python 3\.9"):
        runtime.connect().result(ANSWER_SECONDS)
    assert there(runtime.sid) == []


def test_one_deadline_for_all_of_connect() -> None:
    runtime = LocalRuntime(config={"connect_timeout_seconds": 0.02})
    with pytest.raises(SandboxTimeoutError, match=r"0\.02 seconds"):
        runtime.connect().result(ANSWER_SECONDS)
    assert there(runtime.sid) == []


async def test_a_cancelled_connect_leaves_nothing() -> None:
    runtime = LocalRuntime()

    async def use() -> None:
        async with runtime:
            pass

    task = asyncio.create_task(use())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await runtime.aclose()
    assert await Sandbox.list(tags=[session_tag(runtime.sid)]) == []


def test_attach_shares_the_shell_and_leaves_the_sandbox() -> None:
    with LocalRuntime(sid="Ünusual / session id") as first:
        first.run_command("cd /usr; mark=seen").result(ANSWER_SECONDS)
        for keywords in ({"sid": first.sid, "attach_to_existing": True}, {"sandbox_id": first.sandbox_id}):
            with LocalRuntime(**keywords) as second:  # type: ignore[arg-type]
                assert second.sandbox_id == first.sandbox_id
                assert second.run_command("echo $mark; pwd").result(ANSWER_SECONDS).content == "seen\n/usr\n"
        assert first.run_command("echo still here").result(ANSWER_SECONDS).content == "still here\n"


def test_attach_to_nothing_is_an_error_and_creates_nothing() -> None:
    sid = new_sid()
    with pytest.raises(SandboxNotFoundError, match="no sandbox"):
        LocalRuntime(sid=sid, attach_to_existing=True).connect().result(ANSWER_SECONDS)
    with pytest.raises(SandboxNotFoundError):
        LocalRuntime(sandbox_id="lt-no-such").connect().result(ANSWER_SECONDS)
    assert there(sid) == []


def test_attach_to_a_plain_sandbox_starts_a_server_there() -> None:
    with Sandbox.run(provider="local") as sandbox:
        with LocalRuntime(sandbox_id=sandbox.sandbox_id) as runtime:
            assert runtime.run_command("echo hi").result(ANSWER_SECONDS).content == "hi\n"
        assert sandbox.exec(["true"]).result(ANSWER_SECONDS).returncode == 0


def test_a_second_process_attaches_by_id() -> None:
    with LocalRuntime() as runtime:
        runtime.run_command("mark=from-the-first").result(ANSWER_SECONDS)
        script = (
            "import sys; from lowtide.runtime import LocalRuntime\n"
            "with LocalRuntime(sandbox_id=sys.argv[1]) as r: print(r.run_command('echo $mark').result().content)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(runtime.sandbox_id)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "from-the-first\n\n", done.stderr
        assert runtime.run_command("echo $mark").result(ANSWER_SECONDS).content == "from-the-first\n"


def test_kept_on_failure_with_its_server_running() -> None:
    sid = new_sid()
    with pytest.raises(ZeroDivisionError), LocalRuntime(sid=sid, keep="on-failure") as runtime:
        runtime.run_command("mark=kept").result(ANSWER_SECONDS)
        raise ZeroDivisionError
    assert there(sid) == [runtime.sandbox_id]
    with LocalRuntime(sid=sid, attach_to_existing=True) as again:
        assert again.run_command("echo $mark").result(ANSWER_SECONDS).content == "kept\n"
    assert there(sid) == [runtime.sandbox_id]
    Sandbox.delete(str(runtime.sandbox_id), provider="local").result(ANSWER_SECONDS)


def test_an_exception_in_the_block_ends_the_sandbox_and_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), LocalRuntime() as runtime:
        raise ZeroDivisionError
    assert there(runtime.sid) == []


def test_events_go_to_a_callable_or_an_object() -> None:
    class Stream:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def add_event(self, event: Any) -> None:
            self.events.append(event)

    stream, plain = Stream(), []  # type: ignore[var-annotated]
    for target, events in ((stream, stream.events), (plain.append, plain)):
        with LocalRuntime(event_stream=target) as runtime:
            seen = runtime.run_command("echo hi").result(ANSWER_SECONDS)
        assert events[0] == Run(command="echo hi")
        assert events[1] == seen
        assert isinstance(events[0], Action)
        assert isinstance(events[1], Observation)
    with pytest.raises(ValidationError):
        LocalRuntime(event_stream=3)


def test_a_transcript_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    with LocalRuntime(transcript=path) as runtime:
        runtime.run_command("cd /tmp; n=1").result(ANSWER_SECONDS)
        runtime.write("note.txt", "text\n").result(ANSWER_SECONDS)
        runtime.run_command("cat note.txt; echo $n; hostname").result(ANSWER_SECONDS)
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["action", "observation"] * 3
    assert all(line["version"] == 1 for line in lines)
    assert len(list(read_transcript(path))) == 3
    with LocalRuntime() as runtime:
        steps = runtime.replay(path).result(ANSWER_SECONDS)
    then, now = steps[2][0].observation, steps[2][1]
    assert isinstance(then, RunObservation)
    assert isinstance(now, RunObservation)
    assert then.content.splitlines()[:2] == now.content.splitlines()[:2] == ["text", "1"]


def test_a_mounted_workspace_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    LocalRuntime(config={"workspace_mount": "/home/me/project"})
    assert "mounting a workspace is not supported" in caplog.text


def test_nothing_says_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with LocalRuntime() as runtime:
        assert isinstance(runtime._backend, Served)
        key = runtime._backend._key
        assert len(key) == 64
        assert key not in repr(runtime)
        with pytest.raises(ValidationError) as caught:
            runtime.run_command("a\0b").result(ANSWER_SECONDS)
        assert key not in str(caught.value)
    assert key not in caplog.text
    with LocalRuntime() as other:
        assert isinstance(other._backend, Served)
        assert other._backend._key != key


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="known are"):
        LocalRuntime(config={"imagee": "x"})
    with pytest.raises(ValidationError, match="transport"):
        LocalRuntime(config={"transport": "pigeon"})


CRASH = """
import sys, time
from lowtide.runtime import LocalRuntime
runtime = LocalRuntime(sid=sys.argv[1])
runtime.connect().result()
runtime.run_command("sleep 1000 & echo up").result()
print(runtime.sandbox_id, flush=True)
if sys.argv[2] == "exit":
    sys.exit(3)
time.sleep(100)
"""


@pytest.mark.crash
@pytest.mark.parametrize("how", ["exit", "SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_however_its_process_ends_nothing_is_left(how: str) -> None:
    sid = new_sid()
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH, sid, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    sandbox_id = process.stdout.readline().strip()
    assert sandbox_id
    if how != "exit":
        assert there(sid) == [sandbox_id]
        os.kill(process.pid, getattr(signal, how))
    process.wait(60)
    deadline = time.monotonic() + 30.0
    while there(sid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert there(sid) == []
