"""Daytona on its bad days: the real SDK against the emulator, with the faults the service has."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.daytona_emulator import needs_emulator, serving

from lowtide import Sandbox, Session
from lowtide.emulators.handle import Handle
from lowtide.engine import engine
from lowtide.errors import (
    AuthenticationError,
    SandboxError,
    SandboxFailedError,
    SandboxGone,
    SandboxNotFoundError,
    UnsupportedError,
    ValidationError,
)
from lowtide.lifecycle.lease import LeaseState, Outcome
from lowtide.lifecycle.leases import lifecycle
from lowtide.providers import registry
from lowtide.providers.base import SandboxState
from lowtide.providers.daytona import DaytonaProvider, lookup

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

ANSWER = 120.0


@pytest.fixture(scope="module")
def emulator() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture(autouse=True)
def _no_faults(emulator: Handle) -> Iterator[None]:
    yield
    emulator.faults.clear()


@pytest.fixture
def provider(emulator: Handle) -> DaytonaProvider:
    found = registry.provider("daytona")
    assert isinstance(found, DaytonaProvider)
    return found


def run(work: Any) -> Any:
    return engine().run(work, ANSWER)


def shown(emulator: Handle, sandbox_id: str | None) -> dict[str, Any] | None:
    """What the service itself has on one sandbox."""
    everything = emulator.state()["emulators"]["daytona"]
    return next((one for one in everything if one.get("id", one.get("sandbox_id")) == sandbox_id), None)


def gone(provider: DaytonaProvider, sandbox_id: str | None) -> bool:
    assert sandbox_id is not None
    try:
        run(provider.get(sandbox_id))
    except SandboxNotFoundError:
        return True
    return False


def creates(emulator: Handle) -> int:
    return len(emulator.calls("create"))


# Once, and all of it


@pytest.mark.parametrize("script", ["exit 4", "sleep 1; exit 4"], ids=["short", "long"])
def test_a_first_command_whose_answer_is_lost_is_sent_again_and_runs_once(
    emulator: Handle, script: str
) -> None:
    with Sandbox.run(provider="daytona") as box:
        match = {"operation": "execute", "sandbox_id": _id(box)}
        fault = emulator.faults.add("exec-dropped", seconds=0.1, count=3, match=match)
        script = f"echo x >> /tmp/count; echo out; echo err >&2; {script}"
        result = box.exec(["sh", "-c", script]).result(ANSWER)
        assert emulator.faults.hits(fault) == 3
        assert (result.returncode, result.stdout, result.stderr) == (4, "out\n", "err\n")
        time.sleep(0.5)  # were it started again, it would have run by now
        assert box.read_file("/tmp/count").result(ANSWER) == b"x\n"


def test_a_command_whose_terminal_drops_again_and_again_runs_once(emulator: Handle) -> None:
    with Sandbox.run(provider="daytona") as box:
        match = {"operation": "terminal", "sandbox_id": _id(box)}
        fault = emulator.faults.add("exec-dropped", seconds=0.1, count=4, match=match)
        script = (
            "echo x >> /tmp/count; cat; echo err >&2; while [ ! -e /tmp/go ]; do sleep 0.05; done; exit 4"
        )
        process = box.exec(["sh", "-c", script], stdin=b"out\n")
        _eventually(lambda: emulator.faults.hits(fault) == 4)
        box.write_file("/tmp/go", b"").result(ANSWER)
        result = process.result(ANSWER)
        assert (result.returncode, result.stdout, result.stderr) == (4, "out\n", "err\n")
        assert box.read_file("/tmp/count").result(ANSWER) == b"x\n"


def test_no_byte_is_lost_and_none_comes_twice_in_50_mb_across_ten_drops(emulator: Handle) -> None:
    with Sandbox.run(provider="daytona") as box:
        match = {"operation": "terminal", "sandbox_id": _id(box)}
        fault = emulator.faults.add("exec-dropped", after_bytes=4 << 20, count=10, match=match)
        script = "echo x >> /tmp/count; seq 1000000 7250000; echo end >&2; exit 4"
        result = box.exec(["sh", "-c", script]).result(ANSWER)
        assert emulator.faults.hits(fault) == 10
        assert (result.returncode, result.stderr) == (4, "end\n")
        whole = b"".join(b"%d\n" % number for number in range(1000000, 7250001))
        assert len(whole) > 50_000_000
        assert result.stdout_bytes == whole
        assert box.read_file("/tmp/count").result(ANSWER) == b"x\n"


def test_the_first_command_is_one_call_later_ones_none_and_nothing_is_left(emulator: Handle) -> None:
    def asked() -> list[str]:
        return [call["operation"] for call in emulator.calls() if call.get("sandbox_id") == box.sandbox_id]

    with Sandbox.run(provider="daytona") as box:
        box.start().result(ANSWER)
        assert box.exec(["echo", "first"]).result(ANSWER).stdout == "first\n"
        assert asked() == ["execute"]
        for n in range(20):
            assert box.exec(["echo", str(n)]).result(ANSWER).stdout == f"{n}\n"
        assert asked() == ["execute", "create-and-connect"]
        assert box.exec(["ls", "-A", "/tmp"]).result(ANSWER).stdout == ""
        assert "LOWTIDE_FIRST" not in box.exec(["env"]).result(ANSWER).stdout


def test_no_key_is_on_a_command_line_or_in_an_environment(emulator: Handle) -> None:
    """As the sandbox's own user sees it, while commands run and a channel is open."""
    look = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null"
    with Sandbox.run(provider="daytona") as box:
        seen = b"".join(
            box.exec(["sh", "-c", look]).result(ANSWER).stdout_bytes for _ in range(2)
        )  # through the first request, and through a terminal
        assert b"serve\0" in seen
        assert b"LOWTIDE_FIRST" not in seen.replace(b"unset LOWTIDE_FIRST", b"").replace(
            b"$LOWTIDE_FIRST", b""
        )
        provider = registry.provider("daytona")
        assert isinstance(provider, DaytonaProvider)
        key = provider._ways[_id(box)].key
        assert key.hex().encode() not in seen
        assert key not in seen
        assert base64.b64encode(b"LOWTIDE1")[:10] not in seen


def test_output_is_told_while_a_command_goes_on(emulator: Handle) -> None:
    with Sandbox.run(provider="daytona") as box:
        process = box.exec(["sh", "-c", "echo one; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo two"])
        said = iter(process.stdout)
        assert next(said) == "one\n"
        assert process.poll() is None
        box.write_file("/tmp/go", b"").result(ANSWER)
        assert next(said) == "two\n"
        assert process.result(ANSWER).returncode == 0


def _id(box: Sandbox) -> str:
    assert box.sandbox_id is not None
    return box.sandbox_id


def test_output_is_whole_and_the_command_runs_once_when_its_log_breaks(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    with Sandbox.run(provider="daytona") as box:
        script = (
            "echo x >> /tmp/count; i=0; while [ $i -lt 30 ]; do echo line $i; i=$((i+1)); sleep 0.1; done"
        )
        process = box.exec(["sh", "-c", script])
        seen = iter(process.stdout)
        text = next(seen)
        for _ in range(3):
            _eventually(lambda: run(_cut_websockets(provider)) >= 1)  # it may be on its way back
            text += next(seen)
        text += "".join(seen)
        assert text == "".join(f"line {n}\n" for n in range(30))
        assert process.result(ANSWER).returncode == 0
        assert box.read_file("/tmp/count").result(ANSWER) == b"x\n"


async def _cut_websockets(provider: DaytonaProvider) -> int:
    """Pull the cable: abort every connection that is in use now."""
    session: Any = (await provider._connection.session())[0]
    connector = session.connector
    cut = 0
    for protocol in list(connector._acquired):
        if protocol.transport is not None:
            protocol.transport.abort()
            cut += 1
    return cut


def test_input_is_delivered_once_when_the_connection_breaks(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    with Sandbox.run(provider="daytona") as box:
        process = box.exec(["cat"], stdin=True)
        assert process.stdin is not None
        pieces = [f"piece {n}\n".encode() * 2000 for n in range(20)]
        for number, piece in enumerate(pieces):
            process.stdin.write(piece).result(ANSWER)
            if number % 7 == 3:
                run(_cut_websockets(provider))
        process.stdin.close().result(ANSWER)
        assert process.result(ANSWER).stdout_bytes == b"".join(pieces)


def test_a_sandbox_that_ends_under_a_command_is_said_to_be_gone(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    with Sandbox.run(provider="daytona") as box:
        box.exec(["true"]).result(ANSWER)
        running = box.exec(["sh", "-c", "echo up; exec sleep 1000"])
        next(iter(running.stdout))
        emulator.faults.add("gone-mid-command", seconds=0.3)
        _eventually(lambda: run(_cut_websockets(provider)) >= 1)  # it meets the next connection
        with pytest.raises(SandboxGone):
            running.result(ANSWER)


# Creating


def test_create_carries_name_labels_and_the_dead_mans_switch(emulator: Handle) -> None:
    with Session({"provider": "daytona", "tags": ("a-tag",)}) as session:
        box = session.sandbox(provider_options={"labels": {"my-session": "42"}})
        box.start().result(ANSWER)
        lease = run(lifecycle().leases(states={LeaseState.LIVE}, tags=("a-tag",)))[0]
        detail = run(_detail(lease.sandbox_id))
        assert detail.name == lease.lease_id
        assert detail.labels["lowtide-lease"] == lease.lease_id
        assert detail.labels["lowtide-session"] == session.session_id
        assert detail.labels["lowtide-tag-a-tag"] == "1"
        assert detail.labels["my-session"] == "42"
        assert detail.auto_stop_interval == 5
        assert detail.auto_delete_interval == 0
        assert detail.auto_destroy_at is not None


async def _detail(sandbox_id: str) -> Any:
    found = registry.provider("daytona")
    assert isinstance(found, DaytonaProvider)
    return await lookup.detail(found._connection, sandbox_id)


@pytest.mark.parametrize("fault", ["create-dropped", "create-lost"])
def test_a_create_whose_answer_is_lost_is_found_by_name(
    emulator: Handle, provider: DaytonaProvider, fault: str
) -> None:
    before = creates(emulator)
    emulator.faults.add(fault)
    with Sandbox.run(provider="daytona", tags=[fault]) as box:
        assert box.exec(["echo", "same one"]).result(ANSWER).stdout == "same one\n"
        assert len(Sandbox.list(tags=[fault], provider="daytona").result(ANSWER)) == 1
    assert creates(emulator) - before == 1, "asked once, found again, not asked twice"
    assert gone(provider, box.sandbox_id)


def test_a_create_that_ends_in_an_error_state_leaves_nothing(emulator: Handle) -> None:
    emulator.faults.add("create-error-state")
    with pytest.raises(SandboxFailedError) as caught:
        Sandbox.run(provider="daytona", tags=["error-state"]).wait(ANSWER)
    assert caught.value.provider == "daytona"
    _eventually(lambda: Sandbox.list(tags=["error-state"], provider="daytona").result(ANSWER) == [])


def test_a_create_that_times_out_after_it_was_made_is_found_again(
    emulator: Handle, provider: DaytonaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.providers.daytona.provider.CREATE_SECONDS", 1.0)
    emulator.faults.add("start-slow", seconds=3.0)
    with Sandbox.run(provider="daytona") as box:
        assert box.exec(["echo", "late"]).result(ANSWER).stdout == "late\n"
    assert gone(provider, box.sandbox_id)


def test_a_401_while_its_start_is_awaited_leaves_nothing(emulator: Handle, provider: DaytonaProvider) -> None:
    emulator.faults.add("start-slow", seconds=4.0)
    fault = emulator.faults.add("stale-token", match={"operation": "get"})
    with pytest.raises(AuthenticationError):
        Sandbox.run(provider="daytona", tags=["stale"])
    assert emulator.faults.hits(fault) == 1
    _eventually(lambda: Sandbox.list(tags=["stale"], provider="daytona").result(ANSWER) == [])
    (lease,) = [row for row in run(lifecycle().leases(states=list(LeaseState))) if row.tags == ("stale",)]
    _eventually(lambda: run(lifecycle().ledger.get(lease.lease_id)).state is LeaseState.GONE)
    assert lease.sandbox_id is None or gone(provider, lease.sandbox_id)


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"resources": {"limits": {"memory": "1Gi"}}}, UnsupportedError),
        ({"resources": {"limits": {"memory": "300Mi"}}, "container_image": "python:3.12"}, UnsupportedError),
        ({"provider_options": {"labels": {"lowtide-lease": "x"}}}, ValidationError),
        ({"provider_options": {"snapshot": "s"}, "container_image": "python:3.12"}, ValidationError),
    ],
    ids=["limits-without-image", "part-of-a-gib", "our-labels", "snapshot-and-image"],
)
def test_what_daytona_could_only_refuse_is_refused_before_it_is_asked(
    emulator: Handle, keywords: dict[str, Any], error: type[Exception]
) -> None:
    before = creates(emulator)
    with pytest.raises(error):
        Sandbox.run(provider="daytona", **keywords).wait(ANSWER)
    assert creates(emulator) == before


# Attaching


def test_attach_by_id_by_name_and_by_label(provider: DaytonaProvider) -> None:
    options = {"labels": {"thing": "attach-me"}}
    with Sandbox.run(provider="daytona", provider_options=options) as box:
        by_id = run(provider.get(box.sandbox_id or ""))
        by_name = run(provider.get(by_id.labels["lowtide-lease"]))
        by_label = run(provider.attach(labels={"thing": "attach-me"}))
        assert by_id.sandbox_id == by_name.sandbox_id == by_label.sandbox_id == box.sandbox_id
        again = Sandbox.from_id(by_id.labels["lowtide-lease"], provider="daytona").result(ANSWER)
        assert again.sandbox_id == box.sandbox_id
        assert again.exec(["echo", "in"]).result(ANSWER).stdout == "in\n"


def test_attaching_to_what_is_not_there_is_an_error_and_makes_nothing(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    before = creates(emulator)
    for missing in ("no-such-name", "00000000-0000-4000-8000-000000000000", "../sandbox", ".."):
        with pytest.raises(SandboxNotFoundError):
            Sandbox.from_id(missing, provider="daytona").result(ANSWER)
    with pytest.raises(SandboxNotFoundError):
        run(provider.attach(labels={"thing": "nobody"}))
    assert creates(emulator) == before


# Ending


def test_destroying_what_is_gone_is_false(provider: DaytonaProvider) -> None:
    with Sandbox.run(provider="daytona") as box:
        assert run(provider.destroy(box.sandbox_id or "")) is True
        assert run(provider.destroy(box.sandbox_id or "")) is False
    assert run(provider.destroy("no-such-one")) is False


def test_a_delete_during_another_change_is_asked_again(emulator: Handle, provider: DaytonaProvider) -> None:
    box = Sandbox.run(provider="daytona")
    fault = emulator.faults.add("kill-fails", status=409, count=3)
    assert box.stop().result(ANSWER).outcome is Outcome.DESTROYED
    assert emulator.faults.hits(fault) == 3
    assert gone(provider, box.sandbox_id)


def test_a_delete_that_was_accepted_and_did_not_happen_is_asked_again(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    box = Sandbox.run(provider="daytona")
    emulator.faults.add("kill-ignored")
    assert box.stop().result(ANSWER).outcome is Outcome.DESTROYED
    assert gone(provider, box.sandbox_id)


def test_a_list_that_lags_is_not_taken_for_an_answer(emulator: Handle, provider: DaytonaProvider) -> None:
    emulator.faults.add("list-lags", seconds=3600, count=None)
    before = len(emulator.calls("list"))
    box = Sandbox.run(provider="daytona")
    assert box.stop().result(ANSWER).outcome is Outcome.DESTROYED
    assert gone(provider, box.sandbox_id)
    assert len(emulator.calls("list")) == before


def test_a_key_that_may_not_delete_stops_it_which_ends_an_ephemeral_one(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    box = Sandbox.run(provider="daytona")
    emulator.faults.add("kill-fails", status=403, count=None)
    assert box.stop().result(ANSWER).outcome is Outcome.DESTROYED
    assert gone(provider, box.sandbox_id)


def test_a_key_that_may_not_delete_says_so_and_the_lease_stays(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    box = Sandbox.run(provider="daytona", provider_options={"auto_delete_minutes": -1})
    fault = emulator.faults.add("kill-fails", status=403, count=None)
    with pytest.raises(AuthenticationError, match="stopped instead"):
        box.stop().result(ANSWER)
    assert run(provider.get(box.sandbox_id or "")).state is SandboxState.STOPPED
    row = run(lifecycle().lease_for(provider, box.sandbox_id or ""))
    assert row.state is LeaseState.ENDING
    assert emulator.faults.hits(fault) >= 1
    emulator.faults.clear()
    assert box.stop().result(ANSWER).outcome is Outcome.DESTROYED


def test_a_kill_that_hangs_is_bounded_and_kept_in_the_ledger(
    emulator: Handle, provider: DaytonaProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.providers.daytona.destroy.CALL_SECONDS", 1.0)
    box = Sandbox.run(provider="daytona")
    emulator.faults.add("kill-hangs", seconds=4.0)
    assert box.stop().result(ANSWER).outcome in (Outcome.DESTROYED, Outcome.ALREADY_GONE)
    assert gone(provider, box.sandbox_id)


# The lifetime


def test_renewal_moves_the_end_and_without_it_the_sandbox_ends(
    emulator: Handle, provider: DaytonaProvider
) -> None:
    box = Sandbox.run(provider="daytona")
    sandbox_id = box.sandbox_id or ""
    for _ in range(3):
        emulator.clock.advance(200)
        run(provider.renew(sandbox_id, 300.0))
    assert not gone(provider, sandbox_id)
    emulator.clock.advance(301)
    assert gone(provider, sandbox_id)
    with pytest.raises(SandboxNotFoundError):
        run(provider.renew(sandbox_id, 300.0))
    assert box.stop().result(ANSWER).outcome is Outcome.ALREADY_GONE


def test_a_long_renewal_also_moves_the_end_by_idleness(emulator: Handle, provider: DaytonaProvider) -> None:
    with Sandbox.run(provider="daytona") as box:
        run(provider.renew(box.sandbox_id or "", 7200.0))
        emulator.clock.advance(3600)
        assert run(provider.get(box.sandbox_id or "")).state is SandboxState.RUNNING


# Ports, code, states


def test_a_preview_link_needs_its_token(emulator: Handle) -> None:
    with Sandbox.run(provider="daytona") as box:
        box.write_file("/tmp/www/index.html", b"served").result(ANSWER)
        server = box.exec(["python3", "-m", "http.server", "8123", "-d", "/tmp/www"])
        url = box.url(8123).result(ANSWER)
        assert "X-Daytona-Preview-Token" in url.headers

        def fetched(headers: dict[str, str]) -> bytes | int:
            request = urllib.request.Request(url.url + "/index.html", headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                return error.code

        _eventually(lambda: fetched(dict(url.headers)) == b"served")
        assert fetched({}) in (401, 403)
        server.cancel()


def test_the_interpreter_keeps_its_state(provider: DaytonaProvider) -> None:
    with Sandbox.run(provider="daytona") as box:
        sandbox_id = box.sandbox_id or ""

        def code(text: str, seconds: float | None = None) -> Any:
            return run(
                provider.run_code(sandbox_id, text, language="python", context=None, timeout_seconds=seconds)
            )

        code("x = 41")
        assert code("print(x + 1)").stdout == "42\n"
        failed = code("1/0")
        assert failed.error is not None
        assert failed.error["name"] == "ZeroDivisionError"
        with pytest.raises(TimeoutError):
            code("import time; time.sleep(60)", 1.0)
        with pytest.raises(UnsupportedError):
            run(provider.run_code(sandbox_id, "1", language="r", context=None, timeout_seconds=None))


def test_stop_start_and_archive_keep_files(provider: DaytonaProvider) -> None:
    options = {"auto_delete_minutes": 60, "user": "root"}
    with Sandbox.run(provider="daytona", provider_options=options) as box:
        sandbox_id = box.sandbox_id or ""
        box.write_file("/opt/kept", b"still here").result(ANSWER)
        run(provider.stop(sandbox_id))
        run(provider.stop(sandbox_id))
        assert run(provider.get(sandbox_id)).state is SandboxState.STOPPED
        with pytest.raises(SandboxError, match="start it first"):
            box.exec(["true"]).result(ANSWER)
        run(provider.start(sandbox_id))
        assert box.read_file("/opt/kept").result(ANSWER) == b"still here"
        run(provider.archive(sandbox_id))
        run(provider.start(sandbox_id))
        assert box.exec(["cat", "/opt/kept"]).result(ANSWER).stdout == "still here"


# The caller's own process


def test_an_alarm_of_the_callers_own_still_rings(emulator: Handle) -> None:
    program = """
import signal, time
rang = []
signal.signal(signal.SIGALRM, lambda *_: rang.append(time.monotonic()))
signal.setitimer(signal.ITIMER_REAL, 6.0)
began = time.monotonic()
from lowtide import Sandbox
with Sandbox.run(provider="daytona") as box:
    assert box.exec(["echo", "hi"], timeout_seconds=60).result(60).stdout == "hi\\n"
    handler = signal.getsignal(signal.SIGALRM)
    assert handler.__name__ == "<lambda>"
while not rang and time.monotonic() - began < 60:
    time.sleep(0.05)
assert rang and rang[0] - began >= 5.9, rang
print("rang")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=ANSWER)
    assert done.stdout == "rang\n", done.stderr


def test_closing_leaves_no_descriptor_no_thread_and_no_task(emulator: Handle) -> None:
    program = """
import asyncio, json, os, threading
from lowtide.providers.base import Labels, ProcessSpec, SandboxSpec
from lowtide.providers.daytona import DaytonaProvider

def held():
    return sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}"))

async def main():
    before = held()
    provider = DaytonaProvider.connect(os.environ)
    for n in range(3):
        spec = SandboxSpec(labels=Labels(lease_id=f"fd-{os.getpid()}-{n}", ledger_id="l", owner="o"), lifetime_seconds=300)
        info = await provider.create(spec)
        for _ in range(3):
            handle = await provider.start_process(info.sandbox_id, ProcessSpec(argv=("echo", "hi")))
            async for _ in handle.output(): pass
            assert await handle.wait() == 0
            await handle.aclose()
        assert [c async for c in provider.read_file(info.sandbox_id, "/etc/hostname")]
        await provider.destroy(info.sandbox_id)
    await provider.aclose()
    await provider.aclose()
    await asyncio.get_running_loop().shutdown_default_executor()  # the loop's own, as for a look-up of names
    left = [x for x in held() if x not in before]
    tasks = [t.get_coro().__qualname__ for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    print(json.dumps({"descriptors": left, "tasks": tasks, "threads": threads}))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=ANSWER)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"descriptors": [], "tasks": [], "threads": []}
    assert "Unclosed" not in done.stderr


def test_nothing_but_use_imports_the_sdk() -> None:
    program = """
import sys
import lowtide
assert not any(name.startswith(("daytona", "lowtide.providers.daytona")) for name in sys.modules)
from lowtide.providers.daytona import DaytonaProvider
provider = DaytonaProvider.connect({"DAYTONA_API_KEY": "k"})
provider.account, provider.credentials(), repr(provider._access)
import asyncio
asyncio.run(provider.aclose())
heavy = [name for name in sys.modules if name.split(".")[0] in ("daytona", "pydantic", "aiohttp", "httpx")]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=ANSWER)


def test_no_key_is_said_with_what_to_set_and_keys_are_never_shown() -> None:
    with pytest.raises(AuthenticationError, match="DAYTONA_API_KEY"):
        DaytonaProvider.connect({})
    with pytest.raises(ValidationError, match="known:"):
        DaytonaProvider.connect({"DAYTONA_API_KEY": "k"}, {"keys": "x"})
    provider = DaytonaProvider.connect({"DAYTONA_API_KEY": "very-secret", "DAYTONA_TARGET": "eu"})
    assert "very-secret" not in repr(provider._access) + provider.account
    again = DaytonaProvider.connect(provider.credentials())
    assert again.account == provider.account
    other = DaytonaProvider.connect({"DAYTONA_API_KEY": "another"})
    assert other.account != provider.account


def test_a_wrong_key_is_an_authentication_error(emulator: Handle) -> None:
    async def ask() -> None:
        url = emulator.environment["DAYTONA_API_URL"]
        provider = DaytonaProvider.connect({"DAYTONA_API_KEY": "wrong", "DAYTONA_API_URL": url})
        try:
            with pytest.raises(AuthenticationError):
                await provider.get("anything")
        finally:
            await provider.aclose()

    asyncio.run(ask())


def _eventually(check: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
