"""Harbor: ``harbor run --env lowtide.integrations.harbor:LowtideEnvironment``. Needs the extra ``lowtide[harbor]``, Python 3.12.

``--ek provider=e2b`` and any other keyword of `lowtide.Sandbox` with a plain value choose where and how.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import NetworkMode

from lowtide import errors
from lowtide.defaults import SandboxDefaults
from lowtide.integrations.other_user import become
from lowtide.process import ProcessResult
from lowtide.providers.base import Capability
from lowtide.sandbox import Sandbox

_KEYWORDS = frozenset(SandboxDefaults.__dataclass_fields__)
_PUT = """if [ -d "$from" ]; then mkdir -p -- "$to" && cp -R -- "$from/." "$to/"
else mkdir -p -- "$(dirname -- "$to")" && cp -- "$from" "$to"; fi"""
_TAKE = 'cp -R -- "$from" "$to" && chmod -R a+rX -- "$to"'


class LowtideEnvironment(BaseEnvironment):
    """A trial's sandbox. Tasks with a prebuilt image (``docker_image``) run on it; others on the provider's own image."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = {name: kwargs.pop(name) for name in list(kwargs) if name in _KEYWORDS}
        self._sandbox: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Its name in results."""
        return "lowtide"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Read while the base class is still being set up."""
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv4_cidrs=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        """Limits, held by the provider."""
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    def _validate_definition(self) -> None:
        """A Dockerfile cannot be built here; without one, or with a prebuilt image beside it, all is well."""
        dockerfile = self.environment_dir / "Dockerfile"
        image = self.task_env_config.docker_image or self._options.get("container_image")
        if dockerfile.exists() and not image:
            raise ValueError(
                f"{dockerfile} would have to be built: build and push it, and name it as docker_image in task.toml "
                "or with --ek container_image=…"
            )

    async def start(self, force_build: bool) -> None:
        """Make the sandbox, and what Harbor expects to find in it."""
        try:
            sandbox = Sandbox(**self._keywords())
        except errors.UnsupportedError as error:
            raise _in_harbors_words(error) from error
        try:
            await sandbox
            self._sandbox = sandbox
            made = await self.ensure_dirs(self._mount_targets(writable_only=True))
            if made is not None and made.return_code != 0:
                raise RuntimeError(
                    f"Harbor's directories cannot be made: {(made.stderr or '').strip()[:1000]}"
                )
            await self._upload_environment_dir_after_start()
        except BaseException:
            sandbox.stop()  # Harbor does not stop what did not start
            raise

    async def stop(self, delete: bool) -> None:
        """End it; with ``delete=False`` (``--no-delete``) it is kept for its ``keep_for_seconds``."""
        if self._sandbox is not None:
            await self._sandbox.stop(keep=not delete)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """A line for bash. Out of time is a RuntimeError, as with Harbor's own environments."""
        name = self._resolve_user(user)
        argv = ["bash", "-c", command]
        try:
            try:
                done = await self._run(argv, cwd, env, timeout_sec, None if name is None else str(name))
            except (
                errors.UnsupportedError
            ) as error:  # much is done as root, and some providers have one user only
                if error.feature != Capability.USER.value:
                    raise
                done = await self._run(become(str(name), argv), cwd, env, timeout_sec, None)
        except errors.CommandTimeoutError as error:
            raise RuntimeError(f"command timed out after {timeout_sec} seconds") from error
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    async def _run(
        self,
        argv: list[str],
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_sec: int | None,
        user: str | None,
    ) -> ProcessResult:
        return await self._there.exec(
            argv,
            cwd=cwd or self.task_env_config.workdir,
            env=self._merge_env(env),
            timeout_seconds=timeout_sec,
            user=user,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """One file in."""
        await self._upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """A directory's content in."""
        await self._upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """One file out."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        await self._download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """A directory's content out, over what is there."""
        Path(target_dir).mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - a moment
        await self._download(source_dir, target_dir)

    # Harbor's places (/tests, /solution, /logs) are root's. Where files go in and out as another user, and that user may
    # not, they take a way round.

    async def _upload(self, source: Path | str, target: str) -> None:
        try:
            await self._there.upload(source, target)
        except errors.SandboxPermissionError as error:
            async with self._between() as between:
                await self._there.upload(source, between)
                await self._as_root(_PUT, between, target, error)

    async def _download(self, source: str, target: Path | str) -> None:
        try:
            await self._there.download(source, target)
        except errors.SandboxPermissionError as error:
            async with self._between() as between:
                await self._as_root(_TAKE, source, between, error)
                await self._there.download(between, target)

    @asynccontextmanager
    async def _between(self) -> AsyncIterator[str]:
        """A name under /tmp for what is on its way."""
        between = f"/tmp/lowtide-{uuid.uuid4().hex}"  # noqa: S108 - in the sandbox
        try:
            yield between
        finally:
            await self.exec(f"rm -rf {between}")
            await self.exec(f"rm -rf {between}", user="root")

    async def _as_root(self, script: str, source: str, target: str, error: Exception) -> None:
        places = f"from={shlex.quote(source)}; to={shlex.quote(target)}\n"
        done = await self.exec(places + script, user="root")
        if done.return_code != 0:
            raise RuntimeError(f"{error}; and as root: {(done.stderr or '').strip()[:1000]}") from error

    @property
    def _there(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("start() comes first")
        return self._sandbox

    def _keywords(self) -> dict[str, Any]:
        limits = {
            "cpu": None if self._effective_cpus is None else str(self._effective_cpus),
            "memory": None if self._effective_memory_mb is None else f"{self._effective_memory_mb}Mi",
        }
        said: dict[str, Any] = {
            "container_image": self.task_env_config.docker_image,
            "working_dir": self.task_env_config.workdir,
            "resources": {name: value for name, value in limits.items() if value is not None} or None,
            "network": self._network(),
            "tags": ["harbor"],
            **self._options,
        }
        return {name: value for name, value in said.items() if value is not None}

    def _network(self) -> str | list[str]:
        policy = self.network_policy
        if policy.network_mode == NetworkMode.NO_NETWORK:
            return "none"
        return list(policy.allowed_hosts) if policy.network_mode == NetworkMode.ALLOWLIST else "internet"


def _in_harbors_words(error: errors.UnsupportedError) -> errors.UnsupportedError:
    """What to do about it is an option of `harbor run`, and not one of ours."""
    said = {
        Capability.CPU_LIMIT.value: "run the task without it: --cpus ignore",
        Capability.MEMORY_LIMIT.value: "run the task without it: --memory ignore",
        Capability.IMAGE.value: "take a task without docker_image, or another provider",
    }.get(error.feature or "", error.alternative)
    message = f"provider {error.provider!r} cannot do {error.feature!r}, which the task asks for; {said}"
    return errors.UnsupportedError(
        message, argument=error.argument, provider=error.provider, feature=error.feature, alternative=said
    )
