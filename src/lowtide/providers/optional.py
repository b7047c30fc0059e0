"""What only some providers do. Each protocol goes with the capability of the same name."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from lowtide.providers.base import SandboxInfo, SandboxSpec, Url


@runtime_checkable
class Replays(Protocol):
    """Goes with `Recovery.REPLAY`."""

    async def replay(self, spec: SandboxSpec) -> SandboxInfo | None:
        """Send a create under the same idempotency key, so that nothing can come of the first one any more.

        What it returns is what the first one made, or else a sandbox that takes its place; the caller destroys it.
        None: it was refused, or what there is cannot be seen yet; nothing is proven. `spec` may hold only the labels.
        """
        ...


@runtime_checkable
class Renews(Protocol):
    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """Let it live that long from now. Returns the new expiry. SandboxNotFoundError when it is gone."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    async def snapshot(self, sandbox_id: str, name: str) -> str:
        """Returns the snapshot id that `SandboxSpec.snapshot` takes."""
        ...

    async def delete_snapshot(self, snapshot_id: str) -> bool: ...

    async def list_snapshots(self) -> Sequence[str]: ...


@runtime_checkable
class Logs(Protocol):
    """Providers that keep what the main process prints."""

    def logs(self, sandbox_id: str, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
        """Both of its streams, oldest first, the last `tail_lines` of them; with `follow` on to its end."""
        ...


@runtime_checkable
class Pauses(Protocol):
    async def pause(self, sandbox_id: str) -> None: ...

    async def resume(self, sandbox_id: str) -> None: ...


@runtime_checkable
class Stops(Protocol):
    """Providers that can stop without deleting (Daytona)."""

    async def stop_only(self, sandbox_id: str, *, delete_after_seconds: float) -> None: ...


@runtime_checkable
class HoldsImages(Protocol):
    """Providers whose images lie on this machine or its engine, and are fetched from a registry when they do not."""

    async def has_image(self, image: str) -> bool:
        """Whether a sandbox on `image` can be created without a request to a registry."""
        ...


@runtime_checkable
class Ports(Protocol):
    async def url(self, sandbox_id: str, port: int) -> Url: ...


class FileKind(enum.StrEnum):
    """What a directory entry is. A link is one itself, whatever it points to."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One entry of a directory; `target` is where a link points."""

    name: str
    path: str
    kind: FileKind
    size: int
    mode: int
    modified_at: datetime | None = None
    target: str | None = None


@runtime_checkable
class NativeFiles(Protocol):
    """File operations beyond read and write; derived through exec where a provider has none."""

    async def stat(self, sandbox_id: str, path: str) -> FileEntry: ...

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]: ...

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        """With parents; silent when it is already a directory."""
        ...

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None: ...


@runtime_checkable
class DirectFiles(Protocol):
    """Where the sandbox's files can be opened on this machine: the kernel copies, nothing passes through Python."""

    async def read_into(
        self, sandbox_id: str, path: str, descriptor: int, *, max_bytes: int | None = None
    ) -> int:
        """As `read_file`, into an open file. Returns the bytes copied.

        Raises `lowtide.trees.walk.TooLarge` where more than `max_bytes` would be written; holes need not be counted.
        """
        ...

    async def write_from(
        self, sandbox_id: str, path: str, descriptor: int, *, mode: int | None = None
    ) -> int:
        """As `write_file`, from an open file, at most the size it has now, with its time. Returns the bytes copied."""
        ...


@runtime_checkable
class TimedFiles(Protocol):
    """Where a file can be written with the time it was last changed."""

    async def write_file_at(
        self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], *, mode: int, modified: float
    ) -> int:
        """As `write_file`. Returns the bytes written."""
        ...


@runtime_checkable
class NativeTrees(Protocol):
    """Whole directories as a tar stream; derived through exec of tar where a provider has none."""

    def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]: ...

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """What one piece of code did in a stateful interpreter. `results` are MIME bundles."""

    stdout: str
    stderr: str
    results: tuple[Mapping[str, Any], ...] = ()
    error: Mapping[str, Any] | None = None
    execution_count: int | None = None


@runtime_checkable
class Interprets(Protocol):
    async def run_code(
        self, sandbox_id: str, code: str, *, language: str, context: str | None, timeout_seconds: float | None
    ) -> CodeResult: ...
