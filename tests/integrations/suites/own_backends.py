"""Programs in which an agent runs one long command: in a framework's own sandbox backend, or in lowtide's."""

from __future__ import annotations

import textwrap

AGENTS = {
    "openai-agents": """
        import asyncio
        from agents import RunConfig, Runner
        from agents.sandbox import SandboxAgent, SandboxRunConfig
        from agents.sandbox.capabilities import Shell
        from agents.testing import ScriptedModel, function_call
        {backend}
        calls = [[function_call("exec_command", {{"cmd": {command!r}, "yield_time_ms": 30000}}, call_id=str(n))] for n in range(9)]
        agent = SandboxAgent(name="a", model=ScriptedModel(calls), capabilities=[Shell()])
        config = RunConfig(sandbox=SandboxRunConfig(client=client, options=options), tracing_disabled=True)
        asyncio.run(Runner.run(agent, "go", run_config=config))
        """,
    "pydantic-ai": """
        from pydantic_ai import Agent, RunContext
        from pydantic_ai.messages import ModelResponse, ToolCallPart
        from pydantic_ai.models.function import FunctionModel
        capabilities, workspace = [], {{}}
        {backend}
        model = FunctionModel(lambda messages, info: ModelResponse([ToolCallPart("sh", {{"command": {command!r}}})]))
        agent = Agent(model, capabilities=capabilities)
        @agent.tool
        async def sh(ctx: RunContext[None], command: str) -> str:
            return (await ctx.workspace.run(command, shell=True)).stdout
        agent.run_sync("go", **workspace)
        """,
    "deepagents": """
        from deepagents import create_deep_agent
        from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
        from langchain_core.messages import AIMessage
        {backend}
        class Scripted(GenericFakeChatModel):
            def bind_tools(self, tools, **_):
                return self
        call = AIMessage("", tool_calls=[{{"name": "execute", "args": {{"command": {command!r}}}, "id": "1"}}])
        agent = create_deep_agent(model=Scripted(messages=iter([call])), backend=backend)
        agent.invoke({{"messages": [("user", "go")]}})
        """,
    "smolagents": """
        from smolagents import CodeAgent, Model
        from smolagents.models import ChatMessage
        {backend}
        class Scripted(Model):
            def generate(self, *_, **__):
                return ChatMessage(role="assistant", content="Thought: go.\\n<code>\\nimport os; os.system({command!r})\\n</code>")
        CodeAgent(tools=[], model=Scripted(), verbosity_level=0, **executor).run("go")
        """,
    "google-adk": """
        import asyncio
        {backend}
        async def main():
            await environment.initialize()
            await environment.execute({command!r}, timeout=1000)
        asyncio.run(main())
        """,
}
"""Each framework's agent with a scripted model; the lines at `{backend}` are all that differs."""

ADAPTERS = {
    "openai-agents": """
        from lowtide.integrations.openai_agents import LowtideSandboxClient, LowtideSandboxClientOptions
        client, options = LowtideSandboxClient(), LowtideSandboxClientOptions()""",
    "pydantic-ai": """
        from lowtide.integrations.pydantic_ai import LowtideBackend
        workspace = {"workspace": LowtideBackend()}""",
    "deepagents": """
        from lowtide.integrations.deepagents import LowtideBackend
        backend = LowtideBackend()""",
    "smolagents": """
        from lowtide.integrations.smolagents import LowtideExecutor
        executor = {"executor": LowtideExecutor()}""",
    "google-adk": """
        from lowtide.integrations.google_adk import LowtideEnvironment
        environment = LowtideEnvironment()""",
}

OWN = {
    ("openai-agents", "e2b"): """
        from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
        client, options = E2BSandboxClient(), E2BSandboxClientOptions(sandbox_type="e2b")""",
    ("openai-agents", "daytona"): """
        from agents.extensions.sandbox.daytona import DaytonaSandboxClient, DaytonaSandboxClientOptions
        client, options = DaytonaSandboxClient(), DaytonaSandboxClientOptions()""",
    ("openai-agents", "runloop"): """
        from agents.extensions.sandbox.runloop import RunloopSandboxClient, RunloopSandboxClientOptions
        client, options = RunloopSandboxClient(), RunloopSandboxClientOptions()""",
    ("pydantic-ai", "e2b"): """
        from pydantic_ai_harness.e2b_sandbox import E2BSandbox
        capabilities = [E2BSandbox()]""",
    ("pydantic-ai", "daytona"): """
        from pydantic_ai_harness.daytona_sandbox import DaytonaSandbox
        capabilities = [DaytonaSandbox()]""",
    ("pydantic-ai", "modal"): """
        from pydantic_ai_harness.modal_sandbox import ModalSandbox
        capabilities = [ModalSandbox()]""",
    ("deepagents", "daytona"): """
        from daytona import Daytona
        from langchain_daytona import DaytonaSandbox
        backend = DaytonaSandbox(sandbox=Daytona().create())""",
    ("deepagents", "modal"): """
        import modal
        from langchain_modal import ModalSandbox
        app = modal.App.lookup("app", create_if_missing=True)
        backend = ModalSandbox(sandbox=modal.Sandbox.create(app=app))""",
    ("deepagents", "runloop"): """
        import os
        from langchain_runloop import RunloopProvider
        backend = RunloopProvider(api_key=os.environ["RUNLOOP_API_KEY"]).get_or_create()""",
    ("smolagents", "e2b"): """
        executor = {"executor_type": "e2b"}""",
    ("google-adk", "e2b"): """
        from google.adk.integrations.e2b import E2BEnvironment
        environment = E2BEnvironment()""",
    ("google-adk", "daytona"): """
        from google.adk.integrations.daytona import DaytonaEnvironment
        environment = DaytonaEnvironment()""",
}
"""As their own quickstarts make them, with every default."""


def program(framework: str, service: str, own: bool, command: str) -> str:
    """The text of the program whose agent runs `command` on `service`."""
    backend = OWN[framework, service] if own else ADAPTERS[framework]
    return textwrap.dedent(AGENTS[framework].format(backend=backend.strip(), command=command))
