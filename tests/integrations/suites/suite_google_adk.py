"""Google ADK: its environment protocol, its page, and a kill -9 in the middle."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import NoReturn

import pytest
from google.adk.tools.environment import EnvironmentToolset

from lowtide import Sandbox
from lowtide.integrations.google_adk import LowtideEnvironment
from tests.integrations.suites.cancels import *  # noqa: F403 - the cases that all adapters share
from tests.integrations.suites.cancels import Adapter
from tests.integrations.suites.kills import READY, killed_in_the_middle, open_leases, page_runs
from tests.integrations.suites.own_home import PROVIDER


@pytest.fixture
def adapter() -> Adapter:
    async def make() -> LowtideEnvironment:
        environment = LowtideEnvironment(provider=PROVIDER)
        await environment.initialize()
        return environment

    async def put(environment: LowtideEnvironment, path: str, data: bytes) -> None:
        await environment.write_file(Path(path), data)

    return Adapter(make=make, run=LowtideEnvironment.execute, put=put, end=LowtideEnvironment.close)


async def test_commands_files_time_limit_and_end() -> None:
    environment = LowtideEnvironment(provider=PROVIDER)
    await environment.initialize()
    await environment.initialize()
    try:
        done = await environment.execute("pwd; echo err >&2; exit 3")
        assert (done.exit_code, done.stdout, done.stderr) == (3, f"{environment.working_dir}\n", "err\n")
        late = await environment.execute("echo so far; sleep 1000", timeout=1)
        assert (late.timed_out, late.stdout) == (True, "so far\n")
        await environment.write_file(Path("d/f"), "text")
        assert await environment.read_file(environment.working_dir / "d/f") == b"text"
        with pytest.raises(FileNotFoundError):
            await environment.read_file(Path("nowhere"))
    finally:
        await environment.close()
        await environment.close()


async def test_an_initialize_that_is_cancelled_leaves_nothing_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = LowtideEnvironment(provider=PROVIDER, tags=["half-way"])
    first = environment._sandbox
    await first

    def cancelled(*_: object, **__: object) -> NoReturn:
        raise asyncio.CancelledError

    monkeypatch.setattr(first, "exec", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await environment.initialize()
    await first.stop()  # under way
    assert await Sandbox.list(tags=["half-way"], provider=PROVIDER) == []
    await environment.initialize()
    await environment.close()


async def test_a_toolset_that_was_closed_and_is_used_again_gets_a_new_sandbox_and_so_does_a_copy() -> None:
    toolset = EnvironmentToolset(environment=LowtideEnvironment(provider=PROVIDER))
    copies = [copy.deepcopy(toolset), pickle.loads(pickle.dumps(toolset))]
    for one in (toolset, toolset, *copies):
        execute = (await one.get_tools())[0]
        ran = await execute.run_async(args={"command": "mkdir /tmp/made && echo new"}, tool_context=None)
        assert "new" in str(ran), ran
        assert len(open_leases()) == 1
        await one.close()
        assert open_leases() == []


async def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("google-adk", tmp_path)


async def test_kill_dash_nine_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        import asyncio
        from lowtide.integrations.google_adk import LowtideEnvironment
        async def main():
            environment = LowtideEnvironment()
            await environment.initialize()
            await environment.execute({READY!r})
        asyncio.run(main())
        """,
        tmp_path,
    )
