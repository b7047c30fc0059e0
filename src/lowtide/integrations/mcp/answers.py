"""What the tools answer: dataclasses, because a plain dict gives no structured content; and output cut to a bound.

Without slots: `mcp` takes a slot's descriptor for its default value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CommandAnswer:
    """A command that has ended, or was ended: `ended_by` says by what."""

    exit_code: int | None
    stdout: str
    stderr: str
    ended_by: str
    """"itself", "timeout" or "output limit"."""
    stdout_dropped_bytes: int
    """Left out in the middle of stdout; 0: all of it is here."""
    stderr_dropped_bytes: int
    seconds: float
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class CodeAnswer:
    """What one piece of code printed and came to."""

    stdout: str
    stderr: str
    results: list[dict[str, str]]
    """Values by MIME type, as text; images are base64."""
    error: str | None
    stdout_dropped_bytes: int
    stderr_dropped_bytes: int
    results_dropped: list[str]
    """What was too big to be passed on, by MIME type and size."""
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class SandboxAnswer:
    """One sandbox of this connection."""

    sandbox: str
    provider: str
    status: str
    implicit: bool
    """Whether it is the one that calls without `sandbox` go to."""


@dataclass(frozen=True, kw_only=True)
class SandboxesAnswer:
    sandboxes: list[SandboxAnswer]


@dataclass(frozen=True, kw_only=True)
class EndAnswer:
    sandbox: str
    outcome: str
    why: str


@dataclass(frozen=True, kw_only=True)
class FileAnswer:
    """A part of a file."""

    path: str
    content: str
    encoding: str
    """"utf-8", or "base64" for what is no text."""
    offset: int
    size: int
    dropped_bytes: int
    """How much follows after this part."""
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class WriteAnswer:
    path: str
    bytes_written: int
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    kind: str
    size: int


@dataclass(frozen=True, kw_only=True)
class DirectoryAnswer:
    path: str
    entries: list[Entry]
    dropped_entries: int
    sandbox: str


@dataclass(frozen=True, kw_only=True)
class UrlAnswer:
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    """To be sent with every request."""
    sandbox: str


def cut(data: bytes, most: int) -> tuple[str, int]:
    """The text of `data`, without its middle where it is longer than `most` bytes, and how much that was.

    The beginning says what was run, the end how it went.
    """
    if len(data) <= most:
        return data.decode("utf-8", "replace"), 0
    head = most // 2
    tail = len(data) - (most - head)
    dropped = tail - head
    before, after = data[:head].decode("utf-8", "replace"), data[tail:].decode("utf-8", "replace")
    return f"{before}\n[… {dropped} bytes left out …]\n{after}", dropped


def bundles(results: tuple[Any, ...], most: int) -> tuple[list[dict[str, str]], list[str]]:
    """Each value's text and image, as long as all of them together stay under `most` bytes; and what was left out."""
    kept: list[dict[str, str]] = []
    dropped: list[str] = []
    left = most
    for bundle in results:
        one: dict[str, str] = {}
        for kind, value in bundle.items():
            text = value if isinstance(value, str) else repr(value)
            size = len(text.encode("utf-8", "replace"))
            if size <= left:
                one[str(kind)] = text
                left -= size
            else:
                dropped.append(f"{kind} ({size} bytes)")
        kept.append(one)
    return kept, dropped
