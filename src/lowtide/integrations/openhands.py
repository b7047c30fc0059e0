"""OpenHands: a lowtide sandbox with OpenHands' own agent server in it, as the workspace of a conversation.

    with LowtideWorkspace(provider="e2b") as workspace:
        conversation = Conversation(agent=agent, workspace=workspace)

Needs ``openhands-sdk`` (Python 3.12 and later), and in the sandbox's image ``openhands-agent-server``. The server
listens on the sandbox's own loopback with a key made for this sandbox, and is reached through the sandbox: no
address of it is public.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import httpx
from openhands.sdk.workspace import RemoteWorkspace
from pydantic import Field, PrivateAttr

from lowtide import errors
from lowtide.backoff import backoff
from lowtide.sandbox import Sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from openhands.sdk.workspace.models import CommandResult

    from lowtide.lifecycle.lease import EndReport
    from lowtide.process import Process
    from lowtide.providers.base import Url

PORT = 8000
_LAST_WORDS = 2_000

# The image's own program where it has one, else the module; exec, so that what is ended is the server itself. The
# key comes on standard input: a variable of the sandbox would be seen by every command the agent runs. What the server
# writes for itself goes into a directory beside the agent's work.
_START = """
read -r OH_SESSION_API_KEYS_0 && export OH_SESSION_API_KEYS_0
mkdir -p "$1" "$HOME/.openhands-agent-server" && cd "$HOME/.openhands-agent-server" || exit 1
if command -v openhands-agent-server >/dev/null; then set -- openhands-agent-server; else set -- python3 -m openhands.agent_server; fi
exec "$@" --host 127.0.0.1 --port {port}
"""


class LowtideWorkspace(RemoteWorkspace):
    """One sandbox, made with the workspace and ended with its ``with`` block, `cleanup()`, or this process.

    `sandbox_options` are the keywords of `lowtide.Sandbox` (resources, network, keep, tags, …). An agent that calls a
    model needs the network where the agent runs, which is the sandbox: name the model's host in
    ``network=["api.example.com"]``.
    """

    working_dir: str = Field(default="/workspace", description="Where the agent works, in the sandbox.")
    host: str = Field(default="", description="Set when the server is up.")
    provider: str | None = Field(
        default=None, description="One of lowtide's providers; None: the default one."
    )
    container_image: str | None = Field(default=None, description="An image that has openhands-agent-server.")
    sandbox_options: dict[str, Any] = Field(
        default_factory=dict, description="More keywords of lowtide.Sandbox."
    )
    ready_seconds: float = Field(default=120.0, gt=0.0, description="How long the server may take to be up.")

    _sandbox: Sandbox | None = PrivateAttr(default=None)
    _server: Process | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Make the sandbox and start the server. Whatever fails on the way leaves nothing behind."""
        options = {**self.sandbox_options, "provider": self.provider, "container_image": self.container_image}
        sandbox = Sandbox.run(**{key: value for key, value in options.items() if value is not None})
        try:
            key = secrets.token_hex(32)
            start = ["sh", "-c", _START.format(port=PORT), "sh", self.working_dir]
            server = sandbox.exec(start, stdin=f"{key}\n".encode())
            object.__setattr__(self, "host", sandbox._call(_address).result())
            object.__setattr__(self, "api_key", key)
            super().model_post_init(context)
            self._sandbox, self._server = sandbox, server
            self._wait_until_up(server)
        except BaseException:
            sandbox.stop(graceful_shutdown_seconds=0.0).exception()
            raise

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox itself: for its files, its ports, its id."""
        if self._sandbox is None:
            raise errors.SandboxGone("the workspace's sandbox was never made", reason="stopped")
        return self._sandbox

    def _wait_until_up(self, server: Process) -> None:
        deadline = time.monotonic() + self.ready_seconds
        for delay in backoff(0.05, 1.0):
            if server.done():
                raise self._not_up(server)
            try:
                if httpx.get(f"{self.host}/health", timeout=5.0).is_success:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() + delay > deadline:
                raise self._not_up(server)
            time.sleep(delay)

    def _not_up(self, server: Process) -> errors.SandboxFailedError:
        said = ""
        if server.done() and server.exception() is None:
            result = server.result()
            said = f" and ended with {result.returncode}: {(result.stderr or result.stdout)[-_LAST_WORDS:].strip()}"
        return errors.SandboxFailedError(
            f"the agent server did not come up{said or f' within {self.ready_seconds:g} seconds'}. The sandbox's image "
            "needs openhands-agent-server",
            reason="agent-server",
            provider=self._sandbox.provider if self._sandbox is not None else self.provider,
            sandbox_id=self._sandbox.sandbox_id if self._sandbox is not None else None,
        )

    def execute_command(
        self, command: str, cwd: str | Path | None = None, timeout: float = 30.0
    ) -> CommandResult:
        """A command of bash, in the working directory unless `cwd` says another."""
        return super().execute_command(command, cwd or self.working_dir, timeout)

    def pause(self) -> None:
        """Stop its processes where they are."""
        self.sandbox.pause().result()

    def resume(self) -> None:
        """Let them go on."""
        self.sandbox.resume().result()

    def cleanup(self) -> EndReport | None:
        """End the sandbox, or keep it where its ``keep`` says always. Any number of times."""
        self.reset_client()
        return None if self._sandbox is None else self._sandbox.stop().result()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._send_completion_callback(exc_type, exc_val)
        self.reset_client()
        if self._sandbox is not None:
            self._sandbox.__exit__(exc_type, exc_val, exc_tb)


async def _address(provider: Any, sandbox_id: str) -> str:
    """On this machine's loopback where the provider can: the SDK's event socket takes no headers of a preview link."""
    forward = getattr(provider, "forward", None)
    if forward is None:
        address: Url = await provider.url(sandbox_id, PORT)
        return address.url
    host, port = await forward(sandbox_id, PORT)
    return f"http://{host}:{port}"
