"""Google ADK: a lowtide sandbox as an agent's environment. Needs the extra ``lowtide[google-adk]``.

ADK's `BaseEnvironment` is experimental: it may change between its releases.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.adk.environment import BaseEnvironment, ExecutionResult

from lowtide import errors
from lowtide.sandbox import Sandbox

if TYPE_CHECKING:
    from typing import Unpack

    from lowtide.defaults import SandboxOptions


class LowtideEnvironment(BaseEnvironment):
    """One sandbox between `initialize()` and `close()`; `options` are the keywords of `lowtide.Sandbox`."""

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        self._options = options
        self._sandbox = Sandbox(**options)
        self._working_dir: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        """An agent is copied and pickled with what it has; the copy makes a sandbox of its own."""
        return {**self.__dict__, "_sandbox": None, "_working_dir": None, "_is_initialized": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sandbox = Sandbox(**self._options)

    @property
    def working_dir(self) -> Path:
        """Where commands start."""
        if self._working_dir is None:
            raise RuntimeError("initialize() comes first")
        return self._working_dir

    async def initialize(self) -> None:
        """Make the sandbox, once."""
        if self._working_dir is None:
            try:
                done = await self._sandbox.exec(["pwd", "-P"])
            except BaseException:
                self._sandbox.stop()  # nobody closes what was not initialized; it may be tried again
                self._sandbox = Sandbox(**self._options)
                raise
            self._working_dir = Path(done.stdout.removesuffix("\n"))
            self.is_initialized = True

    async def close(self) -> None:
        """End it. A failure is raised; any number of times. A toolset that is used again initializes it again."""
        await self._sandbox.stop()
        self._sandbox, self._working_dir = Sandbox(**self._options), None
        self.is_initialized = False

    async def execute(self, command: str, *, timeout: float | None = None) -> ExecutionResult:
        """A line for sh."""
        try:
            done = await self._sandbox.exec(["sh", "-c", command], timeout_seconds=timeout)
        except errors.CommandTimeoutError as error:
            result = error.result
            out, err = (result.stdout, result.stderr) if result is not None else ("", "")
            return ExecutionResult(exit_code=124, stdout=out, stderr=err, timed_out=True)
        return ExecutionResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    async def read_file(self, path: Path) -> bytes:
        """The whole file; relative paths start at the working directory."""
        return await self._sandbox.read_file(Path(path).as_posix())

    async def write_file(self, path: Path, content: str | bytes) -> None:
        """With parents."""
        await self._sandbox.write_file(Path(path).as_posix(), content)
