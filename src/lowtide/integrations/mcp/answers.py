"""What the tools answer: dataclasses, because a plain dict gives no structured content; and output cut to a bound.

Without slots: `mcp` takes a slot's descriptor for its default value.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

_BUNDLE_BYTES = 16  # what a value takes up besides its text: there may be a million empty ones
_KIND_SHOWN = 100
_DROPPED_SHOWN = 100


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


def sendable(value: Any) -> Any:
    """The same answer with what no UTF-8 can say spelled out: a file's name is bytes, and one of them fails the whole answer."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [sendable(one) for one in value]
    if isinstance(value, dict):
        return {sendable(key): sendable(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{one.name: sendable(getattr(value, one.name)) for one in dataclasses.fields(value)}
        )
    return value


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
            cost = size + len(str(kind).encode("utf-8", "replace")) + _BUNDLE_BYTES
            if cost <= left:
                one[str(kind)] = text
                left -= cost
            else:
                dropped.append(f"{str(kind)[:_KIND_SHOWN]} ({size} bytes)")
        if one:
            kept.append(one)
    if (more := len(dropped) - _DROPPED_SHOWN) > 0:
        dropped[_DROPPED_SHOWN:] = [f"and {more} more"]
    return kept, dropped
