"""Inspect AI: ``sandbox="lowtide"`` in a task, on any provider. Needs the extra ``lowtide[inspect]``.

Found by its entry point. The configuration is a provider's name (``sandbox=("lowtide", "e2b")``) or a `LowtideConfig`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError, SandboxUserUnsupportedError
from pydantic import BaseModel, ConfigDict

from lowtide import errors
from lowtide.sandbox import Sandbox
from lowtide.session import Session

TAG = "inspect-ai"
_NOT_THERE = (errors.SandboxGone, errors.SandboxNotFoundError, errors.SandboxUnavailableError)


class LowtideConfig(BaseModel):
    """The keywords of `lowtide.Sandbox` for every sample: ``SandboxEnvironmentSpec("lowtide", LowtideConfig(provider="e2b"))``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str | None = None
    container_image: str | None = None
    working_dir: str | None = None
    environment_variables: Mapping[str, str] | None = None
    resources: Mapping[str, Any] | None = None
    network: str | list[str] | None = None
    isolation: str | None = None
    ports: list[int] | None = None
    max_lifetime_seconds: float | None = None
    keep: str | None = None
    keep_for_seconds: float | None = None
    snapshot: str | None = None
    provider_options: Mapping[str, Any] | None = None

    def __hash__(self) -> int:
        """Inspect keeps configurations in sets; mappings in them are as frozen as they are."""
        return hash(self.model_dump_json())

    def options(self) -> dict[str, Any]:
        """Those that were said."""
        return {key: value for key, value in self if value is not None}


@sandboxenv(name="lowtide")
class LowtideSandboxEnvironment(SandboxEnvironment):
    """One sandbox for each sample, ended with it. ``--no-sandbox-cleanup`` keeps it for ``keep_for_seconds``."""

    _live: list[tuple[BaseModel | str | None, LowtideSandboxEnvironment]] = []  # noqa: RUF012 - of the whole process

    def __init__(self, sandbox: Sandbox, working_dir: str) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._working_dir = working_dir

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Make the sample's sandbox. Cancelled meanwhile, it ends."""
        options = _options(config)
        sandbox = Sandbox(**{**options, "tags": [TAG]})
        try:
            await sandbox
            where = (await sandbox.exec(["pwd"])).stdout.removesuffix("\n")
        except BaseException:
            sandbox.stop()  # nobody else will
            raise
        made = cls(sandbox, where)
        cls._live.append((config, made))
        return {"default": made}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End them; an interrupted sample is a failure, as ``keep="on-failure"`` means it."""
        for environment in environments.values():
            mine = environment.as_type(cls)
            await mine.sandbox.stop(failed=interrupted)
            cls._live[:] = [(of, other) for of, other in cls._live if other is not mine]

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        """End what is left, or keep it: only here ``--no-sandbox-cleanup`` is heard of.

        Called once for each configuration at the end of a run, with no task's name.
        """
        left = [mine for of, mine in cls._live if of == config]
        cls._live[:] = [(of, other) for of, other in cls._live if of != config]
        for ended in [mine.sandbox.stop(failed=True, keep=not cleanup) for mine in left]:
            await ended

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """``inspect sandbox cleanup lowtide``: what no living process owns; with an id that one, whosever it is."""
        if id is not None:
            await Sandbox.delete(id)
            return
        async with Session() as session:  # what it adopts ends with it
            await session.list(tags=[TAG], adopt=True)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """From a log."""
        return LowtideConfig(**config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        """How many samples at once, where nobody says."""
        return 16

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """As `SandboxEnvironment.exec` says. What ran out of time is not run again: it may have done half of its work."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            done = await self.sandbox.exec(
                cmd,
                cwd=posixpath.join(self._working_dir, cwd) if cwd is not None else self._working_dir,
                env=env,
                stdin=False if input is None else input,
                user=user,
                timeout_seconds=timeout,
                max_output_bytes=limit,
            )
        except errors.CommandTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except errors.OutputLimitError as error:
            output = error.result.stdout[:limit] if error.result is not None else None
            raise OutputLimitExceededError(
                SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, output
            ) from error
        except errors.UnsupportedError as error:
            raise SandboxUserUnsupportedError(str(error)) from error
        except errors.ValidationError as error:
            # What a model may have written is told to the model; anything else ends the sample.
            if error.argument not in ("user", "command"):
                raise
            said = f"{user}: {error}" if error.argument == "user" else str(error)
            return ExecResult(False, 1, "", f"{said}\n")
        except _NOT_THERE as error:
            raise SandboxUnavailableError(str(error)) from error
        if done.returncode == 126 and "permission denied" in f"{done.stdout}{done.stderr}".lower():
            raise PermissionError(f"{cmd[0]}: {done.stderr.strip() or done.stdout.strip()}")
        return ExecResult(done.returncode == 0, done.returncode, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """With parents. The errors are the builtin ones."""
        try:
            await self.sandbox.write_file(self._path(file), contents)
        except _NOT_THERE as error:
            raise SandboxUnavailableError(str(error)) from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """The whole file, up to Inspect's limit."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        path = self._path(file)
        try:
            data = await self.sandbox.read_file(path, max_bytes=limit)
        except errors.SandboxFileError as error:
            if type(error) is errors.SandboxFileError and (await self.sandbox.stat(path)).size > limit:
                raise OutputLimitExceededError(
                    SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None
                ) from error
            raise
        except _NOT_THERE as error:
            raise SandboxUnavailableError(str(error)) from error
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """How a person gets in."""
        if self.sandbox.sandbox_id is None:
            raise ConnectionError("the sandbox is not running")
        return SandboxConnection(type="lowtide", command=f"lowtide shell {self.sandbox.sandbox_id}")

    def _path(self, file: str) -> str:
        return posixpath.join(self._working_dir, file)


def _options(config: BaseModel | str | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str):
        return {"provider": config}
    if isinstance(config, LowtideConfig):
        return config.options()
    raise ValueError(f"a {type(config).__name__} is no configuration of lowtide's: use LowtideConfig")
