"""The agent's view on Runloop: its real SDK against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.runtime import RunloopRuntime
from lowtide.runtime.base import PORTS, session_tag
from lowtide.runtime.runloop import LEFT_SECONDS
from tests.runloop_emulator import needs_emulator, serving
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture

pytestmark = [*needs_emulator, pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def emulator() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture(scope="module", params=["inside", "url"])
def runtime(emulator: Handle, request: pytest.FixtureRequest) -> Iterator[RunloopRuntime]:
    with RunloopRuntime(config={"transport": request.param}) as made:
        yield made


def there(sid: str) -> list[Sandbox]:
    return Sandbox.list(tags=[session_tag(sid)], provider="runloop").result(SECONDS)


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass


class TestServed(cases.ServedCases):
    kind = RunloopRuntime


def test_it_is_large_has_both_ports_and_runs_its_launch_commands(emulator: Handle) -> None:
    import runloop_api_client

    options = {"launch_commands": ["echo launched > ~/mark"], "blueprint": "runloop/starter"}
    with RunloopRuntime(config={"provider_options": options}) as runtime:
        assert runtime.run_command("cat ~/mark").result(SECONDS).content == "launched\n"
        with runloop_api_client.Runloop() as sdk:
            view = sdk.devboxes.retrieve(str(runtime.sandbox_id))
            blueprint = sdk.blueprints.retrieve(str(view.blueprint_id))
        assert view.launch_parameters.resource_size_request == "LARGE"
        assert blueprint.name == "runloop/starter"
        for port in PORTS:
            assert runtime.sandbox.url(port).result(SECONDS).url


def test_left_when_the_constructor_says_so(emulator: Handle) -> None:
    with RunloopRuntime(rm_all_containers=False) as runtime:
        runtime.run_command("mark=kept").result(SECONDS)
    (left,) = there(runtime.sid)
    emulator.clock.advance(LEFT_SECONDS - 60)
    with RunloopRuntime(sid=runtime.sid, attach_to_existing=True) as again:
        assert again.run_command("echo $mark").result(SECONDS).content == "kept\n"
    assert len(there(runtime.sid)) == 1
    Sandbox.delete(str(left.sandbox_id), provider="runloop").result(SECONDS)


def test_close_has_the_last_word_about_what_is_left(emulator: Handle) -> None:
    leaves, removes = RunloopRuntime(), RunloopRuntime(rm_all_containers=False)
    for runtime in (leaves, removes):
        runtime.connect().result(SECONDS)
    leaves.close(rm_all_containers=False)
    removes.close(rm_all_containers=True)
    assert there(removes.sid) == []
    (left,) = there(leaves.sid)
    Sandbox.delete(str(left.sandbox_id), provider="runloop").result(SECONDS)
