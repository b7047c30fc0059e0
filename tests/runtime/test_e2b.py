"""The agent's view on E2B: its real SDK against the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.errors import LowtideError, SandboxFailedError, SandboxNotFoundError, UnsupportedError
from lowtide.runtime import E2BRuntime
from lowtide.runtime.base import new_sid, session_tag
from lowtide.runtime.direct import Direct
from tests.e2b_emulator import needs_emulator, serving
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture

pytestmark = [*needs_emulator, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture(scope="module")
def runtime(emulator: Handle) -> Iterator[E2BRuntime]:
    with E2BRuntime() as made:
        yield made


def there(sid: str) -> list[Sandbox]:
    return Sandbox.list(tags=[session_tag(sid)], provider="e2b").result(SECONDS)


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass


async def test_basic_use(emulator: Handle) -> None:
    runtime = E2BRuntime(sid=new_sid())
    await runtime.connect()
    seen = await runtime.run_command("echo working")
    assert (seen.content, seen.exit_code) == ("working\n", 0)
    await runtime.aclose()
    assert await Sandbox.list(tags=[session_tag(runtime.sid)], provider="e2b") == []


def test_what_it_attached_to_is_left(emulator: Handle) -> None:
    with E2BRuntime() as first:
        with E2BRuntime(sid=first.sid, attach_to_existing=True) as second:
            assert second.sandbox_id == first.sandbox_id
            assert second.run_command("echo hi").result(SECONDS).content == "hi\n"
        assert first.run_command("echo still").result(SECONDS).content == "still\n"
    assert there(first.sid) == []


def test_error_safe_clean_up(emulator: Handle) -> None:
    with pytest.raises(ZeroDivisionError), E2BRuntime() as runtime:
        runtime.run_command("true").result(SECONDS)
        raise ZeroDivisionError
    assert there(runtime.sid) == []
    runtime.close()


def test_a_failed_connect_leaves_nothing(emulator: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Direct, *, attach: bool) -> None:
        raise SandboxFailedError("no", reason="test")

    monkeypatch.setattr(Direct, "open", fail)
    runtime = E2BRuntime()
    with pytest.raises(SandboxFailedError):
        runtime.connect().result(SECONDS)
    assert there(runtime.sid) == []


def test_nothing_to_attach_to(emulator: Handle) -> None:
    with pytest.raises(SandboxNotFoundError):
        E2BRuntime(sid=new_sid(), attach_to_existing=True).connect().result(SECONDS)


def test_code_runs_in_the_service_of_its_own(emulator: Handle) -> None:
    config = {"provider_options": {"template": "code-interpreter-v1"}}
    with E2BRuntime(config=config) as runtime:
        runtime.run_ipython("x = 41").result(SECONDS)
        seen = runtime.run_ipython("print('said'); x + 1").result(SECONDS)
        assert seen.content == "said\n42"
        assert seen.success


def test_there_is_no_server_to_have_an_address(runtime: E2BRuntime) -> None:
    with pytest.raises(UnsupportedError, match="no action server"):
        runtime.server_url().result(SECONDS)


def test_a_sandbox_that_ends_under_a_command_is_said(emulator: Handle) -> None:
    runtime = E2BRuntime()
    runtime.connect().result(SECONDS)
    runtime.run_command("true").result(SECONDS)
    running = runtime.run_command("sleep 600", timeout=600, no_change_timeout=600)
    Sandbox.delete(str(runtime.sandbox_id), provider="e2b").result(SECONDS)
    with contextlib.suppress(LowtideError):
        assert running.result(SECONDS).exit_code != 0
    with pytest.raises(LowtideError):
        runtime.run_command("echo hi").result(SECONDS)
    runtime.close()


def test_a_listener_that_fails_is_told_and_the_session_goes_on(runtime: E2BRuntime) -> None:
    def fail(text: str) -> None:
        raise ZeroDivisionError

    command = "echo a; read line; echo $line"
    with pytest.raises(ZeroDivisionError):
        runtime.run_command(command, session="listened", on_output=fail).result(SECONDS)
    seen = runtime.run_command("b", session="listened", is_input=True).result(SECONDS)
    assert (seen.exit_code, seen.content) == (0, "a\nb\n")
    assert runtime.run_command("echo c", session="listened").result(SECONDS).content == "c\n"
