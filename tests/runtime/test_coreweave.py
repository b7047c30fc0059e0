"""The agent's view on CoreWeave: its SDK's stubs against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.errors import SandboxNotFoundError
from lowtide.runtime import CoreWeaveRuntime
from lowtide.runtime.base import new_sid, session_tag
from tests.coreweave_emulator import needs_emulator, serving
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture

pytestmark = [*needs_emulator, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture(scope="module")
def runtime(emulator: Handle) -> Iterator[CoreWeaveRuntime]:
    with CoreWeaveRuntime() as made:
        yield made


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass


def test_attach_share_close_gone(emulator: Handle) -> None:
    with CoreWeaveRuntime() as first:
        first.run_command("mark=seen").result(SECONDS)
        with CoreWeaveRuntime(sid=first.sid, attach_to_existing=True) as second:
            assert second.run_command("echo $mark").result(SECONDS).content == "seen\n"
        assert first.run_command("echo still").result(SECONDS).content == "still\n"
        assert first.server_url().result(SECONDS).url.startswith("http://127.0.0.1:")
    assert Sandbox.list(tags=[session_tag(first.sid)], provider="coreweave").result(SECONDS) == []


def test_nothing_to_attach_to(emulator: Handle) -> None:
    with pytest.raises(SandboxNotFoundError):
        CoreWeaveRuntime(sid=new_sid(), attach_to_existing=True).connect().result(SECONDS)
