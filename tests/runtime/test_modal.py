"""The agent's view on Modal: the real SDK against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.errors import SandboxFailedError, SandboxNotFoundError
from lowtide.runtime import ModalRuntime
from lowtide.runtime.base import new_sid, session_tag
from lowtide.runtime.served import Served
from tests.modal_emulator import needs_emulator, serving
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture

pytestmark = [*needs_emulator, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Handle]:
    yield from serving(plain=False)  # the certificates of its tunnels


@pytest.fixture(scope="module", params=["inside", "url"])
def runtime(emulator: Handle, request: pytest.FixtureRequest) -> Iterator[ModalRuntime]:
    with ModalRuntime(config={"transport": request.param}) as made:
        yield made


def there(sid: str) -> list[Sandbox]:
    return Sandbox.list(tags=[session_tag(sid)], provider="modal").result(SECONDS)


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass


async def test_basic_use(emulator: Handle) -> None:
    runtime = ModalRuntime(sid=new_sid())
    await runtime.connect()
    seen = await runtime.run_command("echo working")
    assert (seen.content, seen.exit_code) == ("working\n", 0)
    await runtime.aclose()
    assert await Sandbox.list(tags=[session_tag(runtime.sid)], provider="modal") == []


def test_it_is_terminated_whatever_is_asked(
    emulator: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOWTIDE_KEEP", "always")
    runtime = ModalRuntime(keep="always", config={"workspace_mount": "/srv"})
    runtime.connect().result(SECONDS)
    (made,) = (
        one for one in emulator.state()["sandboxes"]["modal"] if one["name"] == runtime.sandbox.lease_id
    )
    assert (made["timeout_seconds"], made["ports"]) == (3600, [4444, 4445])
    runtime.close()
    assert there(runtime.sid) == []
    assert "keeps no sandbox" in caplog.text
    assert "is not mounted" in caplog.text


def test_error_safe_clean_up(emulator: Handle) -> None:
    with pytest.raises(ZeroDivisionError), ModalRuntime() as runtime:
        runtime.run_command("true").result(SECONDS)
        raise ZeroDivisionError
    assert there(runtime.sid) == []
    runtime.close()


def test_a_failed_connect_leaves_nothing(emulator: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Served) -> None:
        raise SandboxFailedError("no", reason="test")

    monkeypatch.setattr(Served, "_reach", fail)
    runtime = ModalRuntime()
    with pytest.raises(SandboxFailedError):
        runtime.connect().result(SECONDS)
    assert there(runtime.sid) == []


def test_nothing_to_attach_to(emulator: Handle) -> None:
    with pytest.raises(SandboxNotFoundError):
        ModalRuntime(sid=new_sid(), attach_to_existing=True).connect().result(SECONDS)


def test_the_server_has_an_address(runtime: ModalRuntime) -> None:
    assert runtime.server_url().result(SECONDS).url.startswith("https")
