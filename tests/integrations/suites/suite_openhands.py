"""OpenHands: its remote workspace, a conversation whose agent runs in the sandbox, a server that fails, and a kill -9."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openhands.sdk import LLM, Agent, Conversation
from openhands.sdk.tool import Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

from lowtide.errors import SandboxFailedError
from lowtide.integrations.openhands import LowtideWorkspace
from tests.integrations.suites.kills import READY, killed_in_the_middle
from tests.integrations.suites.own_home import PROVIDER

# A model in the sandbox, where the agent is: it answers with a command, and to that command's output that it has finished.
MODEL = """
import http.server, json
class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, given = "terminal", {"command": "echo made > made.txt"}
        if any(message["role"] == "tool" for message in asked["messages"]):
            name, given = "finish", {"message": "done"}
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "scripted",
            "choices": [{"index": 0, "finish_reason": "tool_calls",
                         "message": {"role": "assistant", "content": "", "tool_calls": [call]}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
print("up", flush=True)
http.server.HTTPServer(("127.0.0.1", 9900), Model).serve_forever()
"""


@pytest.fixture(scope="module")
def workspace() -> Iterator[LowtideWorkspace]:
    options = {"environment_variables": {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}, "tags": ["shared"]}
    with LowtideWorkspace(provider=PROVIDER, sandbox_options=options, ready_seconds=240) as made:
        yield made


def test_commands_run_in_the_working_directory_without_the_key(workspace: LowtideWorkspace) -> None:
    done = workspace.execute_command("pwd; env; exit 3")
    assert done.exit_code == 3
    assert done.stdout.startswith("/workspace\n")
    assert str(workspace.api_key) not in done.stdout


def test_files_go_in_and_out(workspace: LowtideWorkspace, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\0data\xff")
    assert workspace.file_upload(tmp_path / "in", "/workspace/file").success
    assert workspace.file_download("/workspace/file", tmp_path / "out").success
    assert (tmp_path / "out").read_bytes() == b"\0data\xff"


def test_git_changes_are_those_of_the_agents_work_alone(workspace: LowtideWorkspace) -> None:
    workspace.execute_command("mkdir repo && cd repo && git init -q . && echo a > new.txt")
    assert [str(change.path) for change in workspace.git_changes("/workspace/repo")] == ["new.txt"]


def test_a_conversation_whose_agent_works_in_the_sandbox(workspace: LowtideWorkspace) -> None:
    model = workspace.sandbox.exec(["python3", "-c", MODEL])
    assert next(iter(model.stdout.lines())).strip() == "up"
    llm = LLM(
        model="openai/scripted", base_url="http://127.0.0.1:9900", api_key=SecretStr("none"), stream=False
    )
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
    conversation = Conversation(agent=agent, workspace=workspace)
    try:
        conversation.send_message("make a file")
        conversation.run()
    finally:
        conversation.close()
    done = workspace.execute_command("cat made.txt")
    assert done.stdout == "made\n", done


def test_a_server_that_does_not_come_up_is_an_error_with_its_words_and_nothing_is_left() -> None:
    options = {"environment_variables": {"PATH": "/nowhere"}}
    with pytest.raises(SandboxFailedError, match=r"127: .*needs openhands-agent-server"):
        LowtideWorkspace(provider=PROVIDER, sandbox_options=options)


def test_kill_dash_nine_in_the_middle_of_a_run_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        from lowtide.integrations.openhands import LowtideWorkspace
        LowtideWorkspace(ready_seconds=240).execute_command({READY!r}, timeout=1000)
        """,
        tmp_path,
    )
