"""The agent's view on Modal: the real SDK against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.runtime import ModalRuntime
from lowtide.runtime.base import session_tag
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


class TestServed(cases.ServedCases):
    kind = ModalRuntime
    scheme = "https"


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
