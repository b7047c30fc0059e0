"""Pydantic AI: a lowtide sandbox as the workspace of an agent run. Needs the extra ``lowtide[pydantic-ai]``.

    agent.run_sync(..., workspace=LowtideBackend(provider="e2b"))

The workspace protocols are structural: nothing of Pydantic AI is subclassed here but the capability.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import WorkspaceRef
from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    WorkspaceOutputLimitError,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

from lowtide import errors
from lowtide.providers.optional import FileKind
from lowtide.sandbox import Sandbox

if TYPE_CHECKING:
    from typing import Unpack

    from pydantic_ai.tools import RunContext

    from lowtide.defaults import SandboxOptions
    from lowtide.lifecycle.lease import EndReport
    from lowtide.providers.optional import FileEntry as Entry

PROVIDER = "lowtide"
"""In a `WorkspaceRef`; its id is ours, as ``provider/sandbox id``."""
_LINKS = 40


class LowtideBackend:
    """One sandbox, made by the first operation; or the one that `ref` names, which is never replaced.

    `options` are the keywords of `lowtide.Sandbox`. A run does not end it. It ends with this process, as every
    sandbox does, or with `stop()` or an ``async with`` block. A ref that a later process is to resume needs
    ``stop(keep=True)``, or ``keep="always"``: then it lives for ``keep_for_seconds``.
    """

    def __init__(self, ref: WorkspaceRef | None = None, **options: Unpack[SandboxOptions]) -> None:
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"a reference of {ref.provider!r} is not one of lowtide's")
        self._given = ref
        self._sandbox = None if ref is not None else Sandbox(**options)
        self._working_dir: str | None = None

    @property
    def ref(self) -> WorkspaceRef | None:
        """Set from the moment the provider has accepted it, and for good."""
        if self._given is not None:
            return self._given
        sandbox = self._sandbox
        if sandbox is None or sandbox.sandbox_id is None:
            return None
        return WorkspaceRef(provider=PROVIDER, id=f"{sandbox.provider}/{sandbox.sandbox_id}")

    async def working_dir(self) -> str:
        """Where commands start, links resolved."""
        if self._working_dir is None:
            result = await self.run(["pwd", "-P"])
            self._working_dir = result.stdout.removesuffix("\n")
        return self._working_dir

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """A list of words; or with `shell` a line for sh."""
        if isinstance(command, str) is not shell:
            raise TypeError("a string needs shell=True, a list of words shell=False")
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        async with self._there() as sandbox:
            done = await sandbox.exec(argv, env=env, timeout_seconds=timeout)
            if done.returncode == 137 and (await sandbox.refresh()).terminal:
                raise WorkspaceUnavailableError("the sandbox was ended while the command ran")
        return CommandResult(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    async def read_bytes(self, path: str) -> bytes:
        """The whole file."""
        async with self._there() as sandbox:
            where, entry = await _followed(sandbox, path)
            if entry is not None and entry.kind not in (FileKind.FILE, FileKind.DIRECTORY):
                raise OSError(f"{path} is no regular file")  # a FIFO would be waited for
            return await sandbox.read_file(where)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Through a link, to what it points to."""
        async with self._there() as sandbox:
            where, _ = await _followed(sandbox, path)
            await sandbox.write_file(where, data)

    async def stat(self, path: str) -> FileEntry:
        """What is there, or what a link there leads to."""
        async with self._there() as sandbox:
            _, entry = await _followed(sandbox, path)
            if entry is None:
                raise FileNotFoundError(path)
            return _shown(path, entry)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        """What a directory holds; links count as what they lead to."""
        async with self._there() as sandbox:
            where, _ = await _followed(sandbox, path)
            found = []
            for entry in await sandbox.list_dir(where):
                here = posixpath.join(path, entry.name)
                seen: Entry | None = entry
                if entry.kind is FileKind.SYMLINK:
                    _, seen = await _followed(sandbox, posixpath.join(where, entry.name))
                found.append(_shown(here, seen or entry))
            return found

    async def make_dir(self, path: str) -> None:
        """With parents; silent when it is already one."""
        async with self._there() as sandbox:
            try:
                await sandbox.make_dir(path)
            except NotADirectoryError as error:  # it, or one above it, is a file
                if (await _followed(sandbox, path))[1] is None:
                    raise
                raise FileExistsError(path) from error

    async def remove(self, path: str) -> None:
        """A file, a link itself, or a directory with all it holds; not where the agent works."""
        working_dir = await self.working_dir()
        parent, name = posixpath.split(posixpath.normpath(posixpath.join(working_dir, path)))
        # Through links on the way.
        found = await self.run(["sh", "-c", 'cd -P -- "$1" && pwd -P', "sh", parent])
        real = posixpath.join(found.stdout.removesuffix("\n"), name) if found.exit_code == 0 else path
        if f"{working_dir}/".startswith(f"/{real.strip('/')}/".replace("//", "/")):
            raise ValueError(f"{path} is, or holds, the working directory")
        async with self._there() as sandbox:
            await sandbox.remove(path, recursive=True)

    async def exists(self, path: str) -> bool:
        """Whether anything is there."""
        async with self._there() as sandbox:
            return (await _followed(sandbox, path))[1] is not None

    async def stop(self, *, keep: bool = False) -> EndReport | None:
        """End it, or keep it for its ``keep_for_seconds``. None when nothing was ever made."""
        sandbox = self._sandbox
        return None if sandbox is None else await sandbox.stop(keep=keep)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        if self._sandbox is not None:
            await self._sandbox.__aexit__(*failure)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _there(self) -> AsyncIterator[Sandbox]:
        """The sandbox, and lowtide's errors as the protocol names them."""
        try:
            if self._sandbox is None:
                assert self._given is not None
                provider, _, sandbox_id = self._given.id.partition("/")
                self._sandbox = await Sandbox.from_id(sandbox_id, provider=provider)
            yield self._sandbox
        except (errors.SandboxGone, errors.SandboxNotFoundError) as error:
            raise WorkspaceUnavailableError(str(error)) from error
        except errors.CommandTimeoutError as error:
            so_far = error.result
            out, err = (so_far.stdout, so_far.stderr) if so_far else ("", "")
            raise WorkspaceTimeoutError(str(error), stdout=out, stderr=err) from error
        except errors.OutputLimitError as error:
            so_far = error.result
            out, err = (so_far.stdout, so_far.stderr) if so_far else ("", "")
            limit = max(len(out), len(err))
            raise WorkspaceOutputLimitError(str(error), limit=limit, stdout=out, stderr=err) from error


@dataclass
class LowtideWorkspaces(AbstractCapability[Any]):
    """A sandbox for each run, or the one that the message history names: ``Agent(..., capabilities=[LowtideWorkspaces()])``."""

    options: SandboxOptions | None = None

    def get_workspace(self, ctx: RunContext[Any], *, ref: WorkspaceRef | None) -> LowtideBackend | None:
        """A backend for a new sandbox, or for one of ours."""
        if ref is None:
            return LowtideBackend(**(self.options or {}))
        return LowtideBackend(ref) if ref.provider == PROVIDER else None

    async def destroy(self, ref: WorkspaceRef) -> None:
        """End what `ref` names, kept or not; silent when it is gone."""
        provider, _, sandbox_id = ref.id.partition("/")
        await Sandbox.delete(sandbox_id, provider=provider, missing_ok=True)


async def _followed(sandbox: Sandbox, path: str) -> tuple[str, Entry | None]:
    """Where `path` leads through links of its last name, and what is there; None: nothing, or a loop."""
    where = path
    for _ in range(_LINKS):
        try:
            entry = await sandbox.stat(where)
        except (FileNotFoundError, NotADirectoryError):
            return where, None
        if entry.kind is not FileKind.SYMLINK or entry.target is None:
            return where, entry
        where = posixpath.join(posixpath.dirname(where), entry.target)
    return path, None


def _shown(path: str, entry: Entry) -> FileEntry:
    is_file = entry.kind is FileKind.FILE
    return FileEntry(
        name=posixpath.basename(path.rstrip("/")) or "/",
        path=path,
        is_dir=entry.kind is FileKind.DIRECTORY,
        size=entry.size if is_file else None,
    )
