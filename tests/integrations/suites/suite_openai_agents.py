"""The OpenAI Agents SDK with a scripted model: files, commands, terminals, pause and resume, and a kill -9 in the middle."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from agents import RunConfig, Runner
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.entries import File
from agents.sandbox.session import SandboxSession
from agents.sandbox.session.pty_types import PTY_PROCESSES_MAX
from agents.sandbox.snapshot import LocalSnapshotSpec
from agents.testing import ScriptedModel, assistant_message, function_call

from lowtide.integrations.openai_agents import LowtideSandboxClient, LowtideSandboxClientOptions
from tests.integrations.suites.cancels import *  # noqa: F403 - the cases that all adapters share
from tests.integrations.suites.cancels import Adapter
from tests.integrations.suites.kills import READY, killed_in_the_middle, page_runs, shown
from tests.integrations.suites.own_home import PROVIDER


@pytest.fixture(params=["exec", "terminal"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    client = LowtideSandboxClient()

    async def make() -> SandboxSession:
        session = await client.create(options=options())
        try:
            await session._inner._prepare_backend_workspace()
        except BaseException:
            await client.delete(session)  # as the SDK's runner does
            raise
        return session

    async def run(session: SandboxSession, command: str) -> None:
        if request.param == "exec":
            await session.exec(command)
        else:
            await session.pty_exec_start(command, yield_time_s=30)

    return Adapter(
        make=make,
        run=run,
        put=lambda session, path, data: session.write(Path(f"/workspace/{path}"), io.BytesIO(data)),
        end=client.delete,
    )


def options(**sandbox: Any) -> LowtideSandboxClientOptions:
    return LowtideSandboxClientOptions(provider=PROVIDER, sandbox=sandbox)


def outputs(model: ScriptedModel) -> list[str]:
    call = model.last_call
    assert call is not None
    items = [
        item for item in call.input if isinstance(item, dict) and item.get("type") == "function_call_output"
    ]
    return [str(item["output"]) for item in items]


async def test_an_agent_reads_its_manifest_and_runs_commands_and_leaves_nothing() -> None:
    model = ScriptedModel(
        [
            [function_call("exec_command", {"cmd": "cat task.txt; echo $((6 * 7)); id -un"}, call_id="1")],
            [assistant_message("done")],
        ]
    )
    agent = SandboxAgent(
        name="a",
        model=model,
        default_manifest=Manifest(entries={"task.txt": File(content=b"the task\n")}),
        capabilities=[Shell()],
    )
    config = SandboxRunConfig(client=LowtideSandboxClient(), options=options())
    result = await Runner.run(agent, "go", run_config=RunConfig(sandbox=config, tracing_disabled=True))
    assert result.final_output == "done"
    assert "the task" in outputs(model)[0]
    assert "42" in outputs(model)[0]
    assert shown() == []


async def test_a_command_goes_on_beyond_its_call_and_takes_input_on_a_terminal() -> None:
    async with await LowtideSandboxClient().create(options=options()) as session:
        started = await session.pty_exec_start(
            "echo begin; read word; echo got $word; sleep 1; exit 5", tty=True, yield_time_s=1
        )
        assert started.exit_code is None
        assert b"begin" in started.output
        written = await session.pty_write_stdin(
            session_id=started.process_id, chars="hello\n", yield_time_s=1
        )
        output, code = written.output, written.exit_code
        while code is None:
            more = await session.pty_write_stdin(session_id=started.process_id, chars="", yield_time_s=1)
            output, code = output + more.output, more.exit_code
        assert b"got hello" in output
        assert code == 5
        quiet = await session.pty_exec_start("sleep 1000", yield_time_s=0.3)
        assert quiet.process_id is not None
        await session.pty_terminate_all()
        assert (await session.exec("pgrep -fc '^sleep 1000'; true")).stdout == b"0\n"
        as_user = await session.exec("id -u", user="1000" if PROVIDER == "local" else "root")
        assert as_user.stdout.strip() in (b"1000", b"0")
    await LowtideSandboxClient().delete(session)
    assert shown() == []


async def test_what_a_command_prints_without_end_is_cut_in_the_middle_and_says_so() -> None:
    client = LowtideSandboxClient()
    async with await client.create(options=options()) as session:
        flood = "echo begin; head -c 20000000 /dev/zero | tr '\\0' x; echo end; exec sleep 1000"
        update = await session.pty_exec_start(flood, yield_time_s=0.3)
        output = update.output
        assert len(output) < 2 << 20
        while not output.endswith(b"end\n"):
            assert update.process_id is not None
            update = await session.pty_write_stdin(session_id=update.process_id, chars="", yield_time_s=5)
            assert len(update.output) < 2 << 20
            output += update.output
        assert output.startswith(b"begin\n")
        left_out = sum(map(int, re.findall(rb"\n\[\xe2\x80\xa6 (\d+) bytes left out", output)))
        assert left_out + output.count(b"x") == 20000000
    await client.delete(session)


async def test_commands_begun_at_once_are_no_more_than_the_sdk_allows() -> None:
    client = LowtideSandboxClient()
    async with await client.create(options=options()) as session:
        begun = (
            session.pty_exec_start("exec sleep 1000", yield_time_s=0.3) for _ in range(PTY_PROCESSES_MAX + 6)
        )
        await asyncio.gather(*begun)
        count = await session.exec("pgrep -fc '^sleep 1000'")
        assert int(count.stdout) == PTY_PROCESSES_MAX
    await client.delete(session)


async def test_a_workspace_comes_back_from_its_snapshot_in_a_new_sandbox(tmp_path: Path) -> None:
    client = LowtideSandboxClient()
    first = await client.create(options=options(), snapshot=LocalSnapshotSpec(base_path=tmp_path))
    async with first:
        await first.exec("echo saved > note; mkdir -p d; ln -s note d/link")
    await client.delete(first)
    assert shown() == []
    payload = json.loads(json.dumps(client.serialize_session_state(first.state)))
    again = await client.resume(client.deserialize_session_state(payload))
    async with again:
        assert (await again.exec("cat note; readlink d/link")).stdout == b"saved\nnote\n"
        assert again.state.sandbox_id != payload["sandbox_id"]
    await client.delete(again)


async def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("openai-agents", tmp_path)


async def test_kill_dash_nine_in_the_middle_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        import asyncio
        from agents import RunConfig, Runner
        from agents.sandbox import SandboxAgent, SandboxRunConfig
        from agents.sandbox.capabilities import Shell
        from agents.testing import ScriptedModel, function_call
        from lowtide.integrations.openai_agents import LowtideSandboxClient
        calls = [[function_call("exec_command", {{"cmd": {READY!r}, "yield_time_ms": 30000}}, call_id=str(n))] for n in range(9)]
        agent = SandboxAgent(name="a", model=ScriptedModel(calls), capabilities=[Shell()])
        config = RunConfig(sandbox=SandboxRunConfig(client=LowtideSandboxClient()), tracing_disabled=True)
        asyncio.run(Runner.run(agent, "go", run_config=config))
        """,
        tmp_path,
    )
