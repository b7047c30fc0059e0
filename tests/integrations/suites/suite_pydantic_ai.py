"""Pydantic AI's own suite for workspace backends, an agent's run, its page, and a kill -9 in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.workspaces import WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from lowtide import Sandbox
from lowtide.integrations.pydantic_ai import LowtideBackend, LowtideWorkspaces
from tests.integrations.suites.cancels import *  # noqa: F403 - the cases that all adapters share
from tests.integrations.suites.cancels import Adapter
from tests.integrations.suites.kills import READY, killed_in_the_middle, page_runs, shown
from tests.integrations.suites.own_home import PROVIDER


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def adapter() -> Adapter:
    async def make() -> LowtideBackend:
        backend = LowtideBackend(provider=PROVIDER)
        try:
            await backend.run(["true"])  # the first use makes it
        except BaseException:
            await backend.stop()
            raise
        return backend

    return Adapter(
        make=make,
        run=lambda backend, command: backend.run(command, shell=True),
        put=LowtideBackend.write_bytes,
        end=LowtideBackend.stop,
    )


class TestBackend(WorkspaceBackendSuite):
    @pytest.fixture
    async def made(self, anyio_backend: str) -> AsyncIterator[list[LowtideBackend]]:
        """The suite itself ends nothing."""
        made: list[LowtideBackend] = []
        yield made
        for backend in made:
            await backend.stop()

    @pytest.fixture
    def backend(self, fresh_backend: Callable[[], LowtideBackend]) -> LowtideBackend:
        return fresh_backend()

    @pytest.fixture
    def fresh_backend(self, made: list[LowtideBackend]) -> Callable[[], LowtideBackend]:
        def fresh() -> LowtideBackend:
            made.append(LowtideBackend(provider=PROVIDER))
            return made[-1]

        return fresh

    @pytest.fixture
    def attach_backend(self) -> Callable[[WorkspaceRef], LowtideBackend]:
        return LowtideBackend

    @pytest.fixture
    def destroy_environment(self) -> Callable[[LowtideBackend], Awaitable[None]]:
        async def destroy(backend: LowtideBackend) -> None:
            assert backend.ref is not None
            await LowtideWorkspaces().destroy(backend.ref)

        return destroy


@pytest.mark.anyio
async def test_the_working_directory_is_not_removed_by_any_of_its_names() -> None:
    async with LowtideBackend(provider=PROVIDER) as backend:
        await backend.run("mkdir -p /tmp/work/here && ln -s /tmp/work /tmp/link", shell=True)
        backend._working_dir = "/tmp/work/here"
        for name in ("/tmp/link/here", "/tmp/link/here/", "//tmp/work", "/tmp/work/here/x/..", "..", "."):
            with pytest.raises(ValueError, match="working directory"):
                await backend.remove(name)
        await backend.remove("/tmp/link")  # only the link
        assert await backend.exists("/tmp/work/here")


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    if len(messages) == 1:
        return ModelResponse([ToolCallPart("sh", {"command": "echo $((6 * 7)) | tee answer"})])
    return ModelResponse([TextPart(messages[-1].parts[0].content)])  # type: ignore[union-attr]


def test_an_agents_runs_go_on_in_the_sandbox_of_its_history_until_it_is_destroyed() -> None:
    workspaces = LowtideWorkspaces({"provider": PROVIDER, "keep_for_seconds": 60})
    agent = Agent(FunctionModel(scripted), capabilities=[workspaces])

    @agent.tool
    async def sh(ctx: RunContext[None], command: str) -> str:
        return (await ctx.workspace.run(command, shell=True)).stdout

    first = agent.run_sync("how much?")
    assert first.output == "42\n"
    ref = first.response.workspace_ref
    assert ref is not None
    (row,) = shown()
    assert ref.id == f"{PROVIDER}/{row['id']}"
    box = Sandbox.from_id(row["id"], provider=PROVIDER).result()
    second = agent.run_sync("and again?", message_history=first.all_messages())
    assert second.response.workspace_ref == ref
    assert box.read_file("answer").result() == b"42\n"
    Sandbox.delete(row["id"], provider=PROVIDER).result()


def test_kept_for_a_later_process_on_request() -> None:
    import asyncio

    async def main() -> None:
        async with LowtideBackend(provider=PROVIDER, keep_for_seconds=60) as backend:
            await backend.write_bytes("/tmp/note", b"kept")
            report = await backend.stop(keep=True)
            assert report is not None
            assert report.outcome == "kept"
            assert backend.ref is not None
        assert await LowtideBackend(backend.ref).read_bytes("/tmp/note") == b"kept"
        await LowtideWorkspaces().destroy(backend.ref)

    asyncio.run(main())


def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("pydantic-ai", tmp_path)


def test_kill_dash_nine_in_the_middle_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        from pydantic_ai import Agent, RunContext
        from pydantic_ai.messages import ModelResponse, ToolCallPart
        from pydantic_ai.models.function import FunctionModel
        from lowtide.integrations.pydantic_ai import LowtideBackend
        agent = Agent(FunctionModel(lambda messages, info: ModelResponse([ToolCallPart("sh", {{"command": {READY!r}}})])))
        @agent.tool
        async def sh(ctx: RunContext[None], command: str) -> str:
            return (await ctx.workspace.run(command, shell=True)).stdout
        agent.run_sync("go", workspace=LowtideBackend())
        """,
        tmp_path,
    )
