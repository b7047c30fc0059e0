"""mini-swe-agent: its environment protocol, an agent's run, its page, and a kill -9 in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted
from minisweagent.models.test_models import DeterministicModel, make_output

from lowtide.integrations.mini_swe_agent import LowtideEnvironment
from tests.integrations.suites.cancels import interrupted
from tests.integrations.suites.kills import READY, killed_in_the_middle, page_runs
from tests.integrations.suites.own_home import PROVIDER

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat /tmp/answer"
PROMPTS = {"system_template": "You are a helpful assistant.", "instance_template": "{{task}}"}


def test_output_exit_code_time_limit_and_submission() -> None:
    config = {
        "environment_class": "lowtide.integrations.mini_swe_agent.LowtideEnvironment",
        "provider": PROVIDER,
        "env": {"WORD": "set"},
    }
    environment = get_environment(config)
    assert isinstance(environment, LowtideEnvironment)
    with environment:
        done = environment.execute({"command": "echo $WORD; echo err >&2; pwd; exit 3"}, cwd="/tmp")
        assert (done["output"], done["returncode"]) == ("set\nerr\n/tmp\n", 3)
        late = environment.execute({"command": "echo so far; sleep 1000"}, timeout=1)
        assert (late["output"], late["returncode"]) == ("so far\n", -1)
        assert late["extra"]["exception_type"] == "CommandTimeoutError"
        with pytest.raises(Submitted):
            environment.execute({"command": "echo 42 > /tmp/answer; " + SUBMIT})
        assert environment.get_template_vars(task="t")["env"] == {"WORD": "set"}
        assert environment.serialize()["info"]["config"]["environment"]["provider"] == PROVIDER


def test_ctrl_c_in_the_middle_of_a_command_ends_it() -> None:
    # its interactive agent takes that for a pause, and goes on
    with LowtideEnvironment(provider=PROVIDER, timeout=1000) as environment:
        interrupted(lambda command: environment.execute({"command": command}))
        assert environment.execute({"command": "echo next"})["output"] == "next\n"


def test_an_agent_submits_what_it_made_in_the_sandbox() -> None:
    steps = [
        make_output("", [{"command": "echo $((6 * 7)) > /tmp/answer"}]),
        make_output("", [{"command": SUBMIT}]),
    ]
    with LowtideEnvironment(provider=PROVIDER) as environment:
        result = DefaultAgent(DeterministicModel(outputs=steps), environment, **PROMPTS).run(
            "how much is 6 * 7?"
        )
    assert (result["exit_status"], result["submission"]) == ("Submitted", "42\n")


def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("mini-swe-agent", tmp_path)


def test_kill_dash_nine_in_the_middle_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.models.test_models import DeterministicModel, make_output
        from lowtide.integrations.mini_swe_agent import LowtideEnvironment
        model = DeterministicModel(outputs=[make_output("", [{{"command": {READY!r}}}])])
        environment = LowtideEnvironment(timeout=1000)
        DefaultAgent(model, environment, system_template="s", instance_template="t").run("go")
        """,
        tmp_path,
    )
