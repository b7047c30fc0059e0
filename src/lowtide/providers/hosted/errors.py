"""What a service's SDK raises, as lowtide's errors: by a table of `Fault`, first match first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide import errors

Of = str | tuple[str, ...]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{7,}")
"""What may be an id in a message, where it has a digit."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row: an error that has all that is said here is a `kind`. What is not said does not matter."""

    kind: type[errors.LowtideError]
    of: Of = ()
    """Its class or one above it, as ``package.Name``: the SDK need not be imported, nor know the name at all."""
    status: int | Container[int] | None = None
    says: Of = ()
    """One of these is in its text, whatever the case."""
    words: str = "{text}"
    """The message: ``{text}`` is what the SDK said, ``{type}``, ``{path}`` and ``{sandbox_id}`` are as named."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """More for the error's constructor, as ``reason``."""
    on_path: bool = False
    """Only where a file was asked for. `file_error` has the first word there: this row is for what it leaves."""
    cause: Of = ()
    """The class of what it was raised from, at any depth, named as in `of`."""
    own: str = ""
    """What the service speaks of: not where somebody on the way has answered in its place, as far as the error tells: `is_own`."""
    by_id: bool = True
    """Whether its text names a sandbox by our id for it, so that another id in there is another sandbox's."""

    def matches(self, names: Container[str], status: int | None, text: str, path: str | None) -> bool:
        if self.on_path and path is None:
            return False
        if self.of and not any(name in names for name in _each(self.of)):
            return False
        if self.says and not any(words in text for words in _each(self.says)):
            return False
        if self.status is None:
            return True
        return status == self.status if isinstance(self.status, int) else status in self.status


@dataclass(frozen=True, slots=True)
class Table:
    """All that one service's errors mean."""

    provider: str
    faults: Sequence[Fault]
    retry_after: Callable[[BaseException], float | None]

    def translated(
        self, error: BaseException, sandbox_id: str | None = None, *, path: str | None = None
    ) -> errors.LowtideError | None:
        """The lowtide error for something the SDK raised; None for what is not the SDK's."""
        if isinstance(error, errors.LowtideError):
            return error
        text = str(error) or type(error).__name__
        # An SDK may warn whoever looks for a status (Modal's does): only a table that names one looks.
        status = status_of(error) if any(fault.status is not None for fault in self.faults) else None
        names = names_of(error)
        for fault in self.faults:
            if not fault.matches(names, status, text.lower(), path):
                continue
            if fault.cause and not was_raised_from(error, fault.cause):
                continue
            body = getattr(error, "body", None) if fault.own else None
            if body is not None and not is_own(body, fault.own):
                continue
            named = _message(body) or text
            if fault.kind is errors.SandboxNotFoundError and fault.by_id and names_another(named, sandbox_id):
                words = f"the answer is about another sandbox than {sandbox_id}, and proves nothing of it"
                return errors.SandboxUnavailableError(words, provider=self.provider, sandbox_id=sandbox_id)
            context: dict[str, Any] = {"provider": self.provider, "sandbox_id": sandbox_id, **fault.more}
            if fault.on_path and (found := file_error(text, str(path), context)) is not None:
                return found
            if issubclass(fault.kind, errors.SandboxFileError):
                context["path"] = path
            elif issubclass(fault.kind, errors.RateLimitError):
                context["retry_after_seconds"] = self.retry_after(error)
            said = {"text": text, "type": type(error).__name__, "path": path, "sandbox_id": sandbox_id}
            return fault.kind(fault.words.format_map(said), **context)
        return None


def names_of(error: BaseException) -> frozenset[str]:
    """``package.Name`` of its class and of all above it."""
    return frozenset(f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__)


def was_raised_from(error: BaseException, kind: Of) -> bool:
    """Whether one of its causes is such an error."""
    cause = error.__cause__
    while cause is not None:
        if not names_of(cause).isdisjoint(_each(kind)):
            return True
        cause = cause.__cause__
    return False


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of the answer, wherever an SDK left it: the error, its text, or its cause."""
    while error is not None:
        for name in ("status_code", "status"):
            status = getattr(error, name, None)
            if isinstance(status, int) and status > 0:
                return int(status)
        head, colon, _ = str(error)[:5].partition(":")
        if colon and len(head) == 3 and head.isdecimal():
            return int(head)
        error = error.__cause__
    return None


def is_own(body: object, thing: str, sandbox_id: str | None = None) -> bool:
    """Whether a "not found" is the service's own word about `sandbox_id`: JSON whose message speaks of the `thing` that was
    asked for, and of no other one. A load balancer or a proxy whose service is away answers 404, too, with a page or with
    JSON that says no more than "Not Found", and a server that does not know the address names that ("Cannot GET /…")."""
    text = _message(body)
    said = text.lower()
    return thing in said and not said.startswith("cannot ") and not names_another(text, sandbox_id)


def _message(body: object) -> str:
    """Of an answer in JSON; "" where it has none."""
    if isinstance(body, str | bytes):
        try:
            body = json.loads(body)
        except ValueError:
            return ""
    return str(body.get("message", "")) if isinstance(body, Mapping) else ""


def names_another(text: str, sandbox_id: str | None) -> bool:
    """Whether a message names an id, and not this one. A message without any id is about what was asked for."""
    if sandbox_id is None or sandbox_id in text:
        return False
    # Some messages have a part of the id only (E2B's without its suffix).
    return any(word not in sandbox_id for word in _ID.findall(text) if any(map(str.isdigit, word)))


def retry_after(error: BaseException) -> float | None:
    """The Retry-After of the answer, where an SDK keeps its headers with the error."""
    headers = getattr(error, "headers", None) or getattr(getattr(error, "response", None), "headers", None)
    try:
        return max(0.0, float(headers.get("Retry-After") or headers.get("retry-after")))  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None


_FILE_ERRORS: tuple[tuple[str, type[errors.SandboxFileError]], ...] = (
    ("permission denied", errors.SandboxPermissionError),
    ("operation not permitted", errors.SandboxPermissionError),
    ("read-only file system", errors.SandboxPermissionError),
    ("access denied", errors.SandboxPermissionError),
    ("is a directory", errors.SandboxIsADirectoryError),
    ("not a directory", errors.SandboxNotADirectoryError),
    ("path is a file", errors.SandboxNotADirectoryError),
    ("no such file", errors.SandboxFileNotFoundError),
    ("file not found", errors.SandboxFileNotFoundError),
    ("does not exist", errors.SandboxFileNotFoundError),
    ("already exists", errors.SandboxFileExistsError),
)


def file_error(text: str, path: str, context: Mapping[str, Any]) -> errors.LowtideError | None:
    """What a service says of a file, as the error people expect; None where its words are of something else."""
    lowered = text.lower()
    if "no space left" in lowered or "quota" in lowered:
        return errors.ResourceExhaustedError(f"{path}: {text}", **context)
    for words, kind in _FILE_ERRORS:
        if words in lowered:
            return kind(f"{path}: {words}", path=path, **context)
    return None


def _each(given: Of) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given
