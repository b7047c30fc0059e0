"""Inspect's self-check of sandboxes, an eval with a scripted model, late keep, its page, and a kill -9 in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import Model, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec, SandboxUnavailableError
from inspect_ai.util._sandbox import self_check

from lowtide import Sandbox
from lowtide.integrations.inspect_ai import TAG, LowtideConfig, LowtideSandboxEnvironment
from tests.integrations.suites.cancels import *  # noqa: F403 - the cases that all adapters share
from tests.integrations.suites.cancels import Adapter
from tests.integrations.suites.kills import READY, killed_in_the_middle, page_runs, shown
from tests.integrations.suites.own_home import PROVIDER


@pytest.fixture
def adapter() -> Adapter:
    async def make() -> dict[str, SandboxEnvironment]:
        return await LowtideSandboxEnvironment.sample_init("check", LowtideConfig(provider=PROVIDER), {})

    async def end(made: dict[str, SandboxEnvironment]) -> None:
        await LowtideSandboxEnvironment.sample_cleanup("check", None, made, False)

    return Adapter(
        make=make,
        run=lambda made, command: made["default"].exec(["sh", "-c", command]),
        put=lambda made, path, data: made["default"].write_file(path, data),
        end=end,
    )


@pytest.fixture
async def sandbox_env() -> AsyncIterator[LowtideSandboxEnvironment]:
    made = await LowtideSandboxEnvironment.sample_init("check", LowtideConfig(provider=PROVIDER), {})
    yield made["default"].as_type(LowtideSandboxEnvironment)
    await LowtideSandboxEnvironment.sample_cleanup("check", None, made, False)


# Root in a local sandbox has no capabilities, so nothing can be given to another user: adduser's chown is refused.
no_chown = pytest.mark.xfail(
    strict=True,
    reason="adduser needs chown, which local sandboxes refuse: E2B's emulator is made of them, too",
)
globals().update({name: check for name, check in vars(self_check).items() if name.startswith("test_")})
test_exec_as_user = no_chown(self_check.test_exec_as_user)


def task() -> Task:
    return Task(
        dataset=[Sample("how much is 6 * 7?", target="42")],
        solver=[use_tools(bash(timeout=60)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("lowtide", LowtideConfig(provider=PROVIDER, keep_for_seconds=60)),
    )


def scripted(command: str) -> Model:
    steps = [
        ModelOutput.for_tool_call("mockllm", "bash", {"command": command}),
        ModelOutput.from_content("mockllm", "42"),
    ]
    for step in steps:
        step.usage = ModelUsage()  # else it is counted, with tables from the network
    return get_model("mockllm/model", custom_outputs=steps, memoize=False)


async def run_eval(tmp_path: Path, command: str = "echo $((6 * 7)) > /tmp/answer", **options: object) -> None:
    def run() -> None:
        (log,) = eval(
            task(),
            model=scripted(command),
            log_dir=str(tmp_path),
            display="none",
            **options,  # type: ignore[arg-type]
        )
        assert log.status == "success", log.error
        assert log.results is not None
        assert log.results.scores[0].metrics["accuracy"].value == 1.0

    await asyncio.to_thread(run)


async def test_an_eval_scores_and_leaves_nothing(tmp_path: Path) -> None:
    await run_eval(tmp_path)
    assert shown() == []


async def test_a_command_that_cannot_be_run_is_told_to_the_model_and_ends_nothing(tmp_path: Path) -> None:
    await run_eval(tmp_path, "echo a\0b")
    assert shown() == []


async def test_no_sandbox_cleanup_keeps_it_and_cli_cleanup_ends_it(tmp_path: Path) -> None:
    await run_eval(tmp_path, sandbox_cleanup=False)
    (row,) = shown()
    assert row["tags"] == [TAG]
    box = await Sandbox.from_id(row["id"], provider=PROVIDER)
    assert await box.read_file("/tmp/answer") == b"42\n"
    await LowtideSandboxEnvironment.cli_cleanup(None)


async def test_a_sample_that_is_cancelled_while_its_sandbox_starts_leaves_nothing() -> None:
    starting = asyncio.create_task(LowtideSandboxEnvironment.sample_init("cancelled", PROVIDER, {}))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with asyncio.timeout(60):
        while await asyncio.to_thread(shown):
            await asyncio.sleep(0.05)


async def test_files_of_a_sandbox_that_is_gone_are_what_inspect_calls_unavailable() -> None:
    """A tool's error that the model is told of; anything else ends the sample."""
    made = await LowtideSandboxEnvironment.sample_init("gone", LowtideConfig(provider=PROVIDER), {})
    here = made["default"].as_type(LowtideSandboxEnvironment)
    await Sandbox.delete(str(here.sandbox.sandbox_id), provider=PROVIDER)
    for call in (here.exec(["true"]), here.read_file("note"), here.write_file("note", "")):
        with pytest.raises(SandboxUnavailableError):
            await call
    await LowtideSandboxEnvironment.sample_cleanup("gone", None, made, False)


async def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("inspect", tmp_path)


async def test_kill_dash_nine_in_the_middle_of_an_eval_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        from inspect_ai import Task, eval
        from inspect_ai.dataset import Sample
        from inspect_ai.model import ModelOutput, ModelUsage, get_model
        from inspect_ai.solver import generate, use_tools
        from inspect_ai.tool import bash
        step = ModelOutput.for_tool_call("mockllm", "bash", {{"command": {READY!r}}})
        step.usage = ModelUsage()
        model = get_model("mockllm/model", custom_outputs=[step])
        task = Task([Sample("x")], solver=[use_tools(bash(timeout=600)), generate()], sandbox="lowtide")
        eval(task, model=model, log_dir="logs", display="none")
        """,
        tmp_path,
    )
