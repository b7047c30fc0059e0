"""OpenAI Agents SDK: lowtide as a sandbox client, terminals included. Needs the extra ``lowtide[openai-agents]``.

RunConfig(sandbox=SandboxRunConfig(client=LowtideSandboxClient(), options=LowtideSandboxClientOptions(provider="e2b")))
"""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
import uuid
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.pty_types import PtyExecUpdate
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.tar_workspace import shell_tar_exclude_args
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tar_bytes
from agents.sandbox.workspace_paths import posix_path_for_error, sandbox_path_str
from pydantic import Field

from lowtide import errors
from lowtide.integrations.openai_agents_terminals import Terminals
from lowtide.integrations.other_user import become
from lowtide.providers import registry
from lowtide.providers.base import Capability, SandboxState
from lowtide.sandbox import Sandbox

BACKEND = "lowtide"
_ARCHIVE_BYTES = 1 << 30
# An archive begins with the root itself. Who does not own that may write into it, and not change its mode and time.
_UNPACK = """if [ -O "$1" ] || [ "$(id -u)" = 0 ]; then exec tar -C "$1" -xf -; fi
tail -c "+$2" | tar -C "$1" -xf -"""


class LowtideSandboxClientOptions(BaseSandboxClientOptions):
    """`provider` and `image`; `sandbox` has any other keyword of `lowtide.Sandbox`, as plain values."""

    type: Literal["lowtide"] = "lowtide"
    provider: str | None = None
    image: str | None = None
    exposed_ports: tuple[int, ...] = ()
    sandbox: dict[str, Any] = Field(default_factory=dict)


class LowtideSandboxSessionState(SandboxSessionState):
    """What is needed to find the sandbox again, or to make one like it."""

    type: Literal["lowtide"] = "lowtide"
    sandbox_id: str
    provider: str
    image: str | None = None
    sandbox: dict[str, Any] = Field(default_factory=dict)


class LowtideSandboxSession(BaseSandboxSession):
    """One sandbox as the SDK holds it. `stop` saves the workspace, `shutdown` ends the sandbox."""

    state: LowtideSandboxSessionState

    def __init__(self, state: LowtideSandboxSessionState, sandbox: Sandbox) -> None:
        self.state = state
        self._sandbox = sandbox
        self._root_is_there = False
        self._terminals = Terminals()

    async def _prepare_backend_workspace(self) -> None:
        root = self.state.manifest.root
        try:
            try:
                await self._sandbox.make_dir(str(root))
            except errors.SandboxPermissionError:
                await self._make_as_root(str(root))
        except errors.LowtideError as error:
            raise WorkspaceStartError(path=Path(root), cause=error) from error
        self._root_is_there = True

    async def _make_as_root(self, path: str) -> None:
        """Make a directory that the sandbox's user may not make, and give it to that user.

        The SDK's default, ``/workspace``, is one where commands do not run as root. Where nobody can give a file
        away, it is open to all instead: nobody else is in the sandbox.
        """
        user = (await self._sandbox.exec(["id", "-u"], check=True)).stdout.strip()
        script = 'mkdir -p -- "$1" && { chown -- "$2" "$1" 2>/dev/null || chmod 0777 -- "$1"; }'
        make = ["sh", "-c", script, "sh", path, user]
        argv, root = self._for_user(["sudo", "-u", "root", "--", *make])
        await self._sandbox.exec(argv, user=root, check=True)

    async def _shutdown_backend(self) -> None:
        await self.end()

    async def end(self) -> None:
        """End the sandbox, or keep it where its policy says so. A failure is raised, not dropped."""
        await self._terminals.end_all()
        await self._sandbox.stop()

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        argv, user = self._for_user([str(word) for word in command])
        try:
            done = await self._sandbox.exec(
                argv, timeout_seconds=timeout or None, user=user, **await self._where()
            )
        except errors.CommandTimeoutError as error:
            raise ExecTimeoutError(command=command, timeout_s=timeout, cause=error) from error
        except errors.LowtideError as error:
            raise ExecTransportError(command=command, cause=error, retryable=error.retryable) from error
        return ExecResult(stdout=done.stdout_bytes, stderr=done.stderr_bytes, exit_code=done.returncode)

    # Without these the SDK ends every command after ten seconds and loses its output.

    def supports_pty(self) -> bool:
        """Commands go on beyond one call, on a terminal or not."""
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a command, and answer with what it printed within `yield_time_s`."""
        argv, name = self._for_user(self._prepare_exec_command(*command, shell=shell, user=user))
        try:
            process = self._sandbox.exec(
                argv,
                timeout_seconds=timeout or None,
                user=name,
                tty=tty,
                stdin=tty,
                capture=False,  # it may run for days
                max_output_bytes=None,
                **await self._where(),
            )
            return await self._terminals.start(process, tty, yield_time_s, max_output_tokens)
        except errors.LowtideError as error:
            raise ExecTransportError(command=command, cause=error, retryable=error.retryable) from error

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Type into a command, and answer with what it printed since."""
        terminal = self._resolve_pty_session_entry(
            pty_processes=self._terminals.running, session_id=session_id
        )
        return await self._terminals.write(session_id, terminal, chars, yield_time_s, max_output_tokens)

    async def pty_terminate_all(self) -> None:
        """End all of them."""
        await self._terminals.end_all()

    # Files.

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        return await self._validate_remote_path_access(path, for_write=for_write)  # type: ignore[no-any-return]

    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    def _current_runtime_helper_cache_key(self) -> object | None:
        return self.state.sandbox_id

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """The whole file."""
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        where = await self._validate_path_access(path)
        try:
            return io.BytesIO(await self._sandbox.read_file(sandbox_path_str(where)))
        except FileNotFoundError as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except errors.LowtideError as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Replace the file."""
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        content = data.read()
        if not isinstance(content, str | bytes | bytearray):
            raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
        where = await self._validate_path_access(path, for_write=True)
        try:
            await self._sandbox.write_file(
                sandbox_path_str(where), content if isinstance(content, str) else bytes(content)
            )
        except errors.LowtideError as error:
            raise WorkspaceArchiveWriteError(path=where, cause=error) from error

    async def running(self) -> bool:
        """Whether it is there and runs."""
        try:
            return await self._sandbox.refresh() is SandboxState.RUNNING
        except errors.LowtideError:
            return False

    async def persist_workspace(self) -> io.IOBase:
        """The workspace as a tar, members relative to its root."""
        root = self._workspace_root_path()
        skipped = shell_tar_exclude_args(self._persist_workspace_skip_relpaths())
        excludes = [word for quoted in skipped for word in shlex.split(quoted)]
        try:
            done = await self._sandbox.exec(
                ["tar", *excludes, "-C", root.as_posix(), "-cf", "-", "."],
                check=True,
                max_output_bytes=_ARCHIVE_BYTES,
            )
        except errors.LowtideError as error:
            raise WorkspaceArchiveReadError(path=posix_path_for_error(root), cause=error) from error
        return io.BytesIO(done.stdout_bytes)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """The workspace from a tar."""
        root = self._workspace_root_path()
        where = posix_path_for_error(root)
        content = data.read()
        try:
            validate_tar_bytes(content)
            await self._sandbox.make_dir(root.as_posix())
            unpack = ["sh", "-c", _UNPACK, "sh", root.as_posix(), str(1 + _after_the_root(content))]
            await self._sandbox.exec(unpack, stdin=bytes(content), check=True)
        except (UnsafeTarMemberError, errors.LowtideError) as error:
            raise WorkspaceArchiveWriteError(path=where, cause=error) from error
        self._root_is_there = True

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            at = urlsplit((await self._sandbox.url(port)).url)
        except errors.LowtideError as error:
            raise ExposedPortUnavailableError(
                port=port,
                exposed_ports=self.state.exposed_ports,
                reason="backend_unavailable",
                context={"backend": BACKEND},
                cause=error,
            ) from error
        tls = at.scheme == "https"
        return ExposedPortEndpoint(host=at.hostname or "", port=at.port or (443 if tls else 80), tls=tls)

    def _for_user(self, argv: list[str]) -> tuple[list[str], str | None]:
        """A command, and the user it is to have; where commands have one user only, it becomes the other inside."""
        argv, user = _without_sudo(argv)
        if user is None or Capability.USER in registry.provider_class(self.state.provider).capabilities:
            return argv, user
        return become(user, argv), None

    async def _where(self) -> dict[str, Any]:
        """The directory and environment of a command."""
        env = await self.state.manifest.environment.resolve()
        return {"env": dict(env), "cwd": str(self.state.manifest.root) if self._root_is_there else None}


class LowtideSandboxClient(BaseSandboxClient[LowtideSandboxClientOptions]):
    """Makes, resumes and ends sandboxes for the SDK's runner. What a run made ends with it, killed or not."""

    backend_id = BACKEND
    supports_default_options = True

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: LowtideSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """A new sandbox."""
        manifest = self._validate_manifest_for_create(manifest if manifest is not None else Manifest())
        _refuse_mounts(manifest)
        options = options or LowtideSandboxClientOptions()
        session_id = uuid.uuid4()
        saved = resolve_snapshot(
            snapshot, str(session_id)
        )  # before there is a sandbox that its failure would leave
        sandbox = await _made(
            options.provider, options.image, {"ports": options.exposed_ports or None, **options.sandbox}
        )
        state = LowtideSandboxSessionState(
            session_id=session_id,
            manifest=manifest,
            snapshot=saved,
            exposed_ports=options.exposed_ports,
            sandbox_id=str(sandbox.sandbox_id),
            provider=sandbox.provider,
            image=options.image,
            sandbox=options.sandbox,
        )
        return self._wrap_session(LowtideSandboxSession(state, sandbox))

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End it. A failure is raised, and the sandbox stays in the ledger."""
        inner = session._inner
        if not isinstance(inner, LowtideSandboxSession):
            raise TypeError("LowtideSandboxClient.delete expects a session of its own")
        await inner.end()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """The same sandbox if it lives, else a new one that is filled from the snapshot."""
        if not isinstance(state, LowtideSandboxSessionState):
            raise TypeError("LowtideSandboxClient.resume expects a state of its own")
        state.assert_path_grants_rebound()
        try:
            sandbox = await Sandbox.from_id(state.sandbox_id, provider=state.provider)
            found = await sandbox.refresh() is SandboxState.RUNNING
        except (errors.SandboxNotFoundError, errors.SandboxGone):
            found = False
        if not found:
            ports = {"ports": state.exposed_ports or None}
            sandbox = await _made(state.provider, state.image, {**ports, **state.sandbox})
            state.sandbox_id = str(sandbox.sandbox_id)
            state.workspace_root_ready = False
        inner = LowtideSandboxSession(state, sandbox)
        inner._root_is_there = found
        inner._set_start_state_preserved(found, system=found)
        return self._wrap_session(inner)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """From what was saved."""
        return self._deserialize_session_state_payload(payload, LowtideSandboxSessionState)


async def _made(provider: str | None, image: str | None, options: dict[str, Any]) -> Sandbox:
    said = {"provider": provider, "container_image": image, **options}
    sandbox = Sandbox(**{key: value for key, value in said.items() if value is not None})
    await sandbox
    return sandbox


def _without_sudo(argv: list[str]) -> tuple[list[str], str | None]:
    """The SDK turns `user` into ``sudo -u USER --``, which images need not have; ours needs nothing in the image."""
    if argv[:2] == ["sudo", "-u"] and len(argv) > 4 and argv[3] == "--":
        return argv[4:], argv[2]
    return argv, None


def _after_the_root(archive: bytes) -> int:
    """How long the archive's entry for the workspace itself is, if it begins with that."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            first = tar.next()
    except tarfile.TarError:  # a compressed one, which is not of our making
        return 0
    is_root = first is not None and first.isdir() and posixpath.normpath(first.name) == "."
    return first.offset_data if first is not None and is_root else 0


def _refuse_mounts(manifest: Manifest) -> None:
    if list(manifest.ephemeral_mount_targets()):
        raise ValueError("lowtide has no mounts: copy what is needed in with the manifest's files")
