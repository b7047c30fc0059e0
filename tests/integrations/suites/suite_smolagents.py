"""smolagents: the cases its own suite has for remote executors, an agent's run, its page, and a kill -9 in the middle."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from smolagents import CodeAgent, FinalAnswerTool, Model, Tool
from smolagents.models import ChatMessage, MessageRole
from smolagents.utils import AgentError

from lowtide import Sandbox
from lowtide.integrations.smolagents import LowtideExecutor
from tests.integrations.suites.cancels import interrupted
from tests.integrations.suites.kills import READY, killed_in_the_middle, page_runs
from tests.integrations.suites.own_home import PROVIDER


def own_cases() -> Any:
    """The class with the cases that all its executors share: in its source distribution, without the markers it imports."""
    package = ModuleType("smolagents_tests")
    package.__path__ = [os.environ["LOWTIDE_SUITE_TESTS"]]
    utils, markers = ModuleType(f"{package.__name__}.utils"), ModuleType(f"{package.__name__}.utils.markers")
    vars(markers)["require_run_all"] = lambda case: case
    sys.modules |= {module.__name__: module for module in (package, utils, markers)}
    return importlib.import_module(
        f"{package.__name__}.test_remote_executors"
    ).CommonDockerExecutorIntegration


class TestOwnCases(own_cases()):  # type: ignore[misc]
    @pytest.fixture
    def custom_executor(self) -> Iterator[LowtideExecutor]:
        with LowtideExecutor(provider=PROVIDER) as made:
            yield made


class Scripted(Model):
    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def generate(self, *_: Any, **__: Any) -> ChatMessage:
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: go.\n<code>\n{self.code}\n</code>")


@pytest.fixture
def executor() -> Iterator[LowtideExecutor]:
    with LowtideExecutor(provider=PROVIDER) as made:
        yield made


def test_an_executor_that_could_not_be_made_leaves_nothing() -> None:
    with pytest.raises(AgentError, match="pip could not install"):
        LowtideExecutor(["no such package"], provider=PROVIDER, tags=["half-way"])
    assert Sandbox.list(tags=["half-way"], provider=PROVIDER).result(60) == []


def test_state_final_answer_and_variables(executor: LowtideExecutor) -> None:
    executor.send_tools({"final_answer": FinalAnswerTool()})
    assert executor("x = 20\nprint('hi')").logs == "hi\n"
    assert executor("x + 1").output == "21"
    answer = executor("final_answer({'k': [x, (1, 2)], 's': {3}})")
    assert answer.is_final_answer
    assert answer.output == {"k": [20, (1, 2)], "s": {3}}
    executor.send_variables({"sent": {"a": (1, 2)}, "none": None})
    assert executor("print(sent['a'], none)").logs == "(1, 2) None\n"


@pytest.mark.parametrize("code", ["1 / 0", "raise BaseException('x')", "import sys; sys.exit(3)", "def f(:"])
def test_what_the_code_raises_is_an_agent_error_and_the_state_stays(
    executor: LowtideExecutor, code: str
) -> None:
    executor("kept = 1")
    with pytest.raises(AgentError):
        executor(code)
    assert executor("kept").output == "1"


def test_out_of_time_is_an_agent_error() -> None:
    with LowtideExecutor(provider=PROVIDER, timeout_seconds=1) as made, pytest.raises(AgentError):
        made("import time; time.sleep(1000)")


def test_ctrl_c_in_the_middle_of_a_step_ends_it(executor: LowtideExecutor) -> None:
    executor("kept = 1")
    interrupted(lambda command: executor(f"import os; os.system({command!r})"))
    assert executor("1 + 1").output == "2"


def test_cleanup_is_calm(executor: LowtideExecutor) -> None:
    executor("1")
    executor.cleanup()
    executor.cleanup()


def test_an_agent_with_a_tool_of_its_own(executor: LowtideExecutor) -> None:
    class Twice(Tool):
        name = "twice"
        description = "Twice a number."
        inputs = {"n": {"type": "integer", "description": "the number"}}  # noqa: RUF012
        output_type = "integer"

        def forward(self, n: int) -> int:
            return 2 * n

    agent = CodeAgent(
        tools=[Twice()], model=Scripted("final_answer(twice(21))"), executor=executor, verbosity_level=0
    )
    assert agent.run("how much is twice 21?") == 42


def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("smolagents", tmp_path)


def test_kill_dash_nine_in_the_middle_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        from smolagents import CodeAgent, Model
        from smolagents.models import ChatMessage
        from lowtide.integrations.smolagents import LowtideExecutor
        class Scripted(Model):
            def generate(self, *_, **__):
                return ChatMessage(role="assistant", content="Thought: go.\\n<code>\\nimport os; os.system({READY!r})\\n</code>")
        CodeAgent(tools=[], model=Scripted(), executor=LowtideExecutor(), verbosity_level=0).run("go")
        """,
        tmp_path,
    )
