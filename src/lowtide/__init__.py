"""lowtide: a sandbox on any provider through one small API, and nothing it made is left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide._version import __version__

if TYPE_CHECKING:
    from lowtide.defaults import SandboxDefaults
    from lowtide.errors import (
        AuthenticationError,
        CleanupError,
        CommandTimeoutError,
        LedgerError,
        LowtideError,
        MissingDependencyError,
        OutputLimitError,
        RateLimitError,
        RequestTimeoutError,
        ResourceExhaustedError,
        SandboxError,
        SandboxExecutionError,
        SandboxFailedError,
        SandboxFileError,
        SandboxFileExistsError,
        SandboxFileNotFoundError,
        SandboxGone,
        SandboxIsADirectoryError,
        SandboxNotADirectoryError,
        SandboxNotFoundError,
        SandboxOwnedError,
        SandboxPermissionError,
        SandboxTimeoutError,
        SandboxUnavailableError,
        SessionClosedError,
        UnsupportedError,
        ValidationError,
    )
    from lowtide.lifecycle.lease import EndReport, Keep, Outcome
    from lowtide.operation import Operation, results, wait
    from lowtide.process import Process, ProcessResult, TerminalSession
    from lowtide.providers.base import Capability, DeniedConnection, Limits, Network, SandboxState, Url
    from lowtide.providers.base import SandboxState as SandboxStatus
    from lowtide.providers.optional import CodeResult, FileEntry, FileKind
    from lowtide.sandbox import Sandbox
    from lowtide.session import Session
    from lowtide.stream import StreamReader, StreamWriter
    from lowtide.transfer import Transfer

_HOMES = {
    "lowtide.defaults": ("SandboxDefaults",),
    "lowtide.errors": (
        "AuthenticationError",
        "CleanupError",
        "CommandTimeoutError",
        "LedgerError",
        "LowtideError",
        "MissingDependencyError",
        "OutputLimitError",
        "RateLimitError",
        "RequestTimeoutError",
        "ResourceExhaustedError",
        "SandboxError",
        "SandboxExecutionError",
        "SandboxFailedError",
        "SandboxFileError",
        "SandboxFileExistsError",
        "SandboxFileNotFoundError",
        "SandboxGone",
        "SandboxIsADirectoryError",
        "SandboxNotADirectoryError",
        "SandboxNotFoundError",
        "SandboxOwnedError",
        "SandboxPermissionError",
        "SandboxTimeoutError",
        "SandboxUnavailableError",
        "SessionClosedError",
        "UnsupportedError",
        "ValidationError",
    ),
    "lowtide.lifecycle.lease": ("EndReport", "Keep", "Outcome"),
    "lowtide.operation": ("Operation", "results", "wait"),
    "lowtide.process": ("Process", "ProcessResult", "TerminalSession"),
    "lowtide.providers.base": ("Capability", "DeniedConnection", "Limits", "Network", "SandboxState", "Url"),
    "lowtide.providers.optional": ("CodeResult", "FileEntry", "FileKind"),
    "lowtide.sandbox": ("Sandbox",),
    "lowtide.session": ("Session",),
    "lowtide.stream": ("StreamReader", "StreamWriter"),
    "lowtide.transfer": ("Transfer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AuthenticationError",
    "Capability",
    "CleanupError",
    "CodeResult",
    "CommandTimeoutError",
    "DeniedConnection",
    "EndReport",
    "FileEntry",
    "FileKind",
    "Keep",
    "LedgerError",
    "Limits",
    "LowtideError",
    "MissingDependencyError",
    "Network",
    "Operation",
    "Outcome",
    "OutputLimitError",
    "Process",
    "ProcessResult",
    "RateLimitError",
    "RequestTimeoutError",
    "ResourceExhaustedError",
    "Sandbox",
    "SandboxDefaults",
    "SandboxError",
    "SandboxExecutionError",
    "SandboxFailedError",
    "SandboxFileError",
    "SandboxFileExistsError",
    "SandboxFileNotFoundError",
    "SandboxGone",
    "SandboxIsADirectoryError",
    "SandboxNotADirectoryError",
    "SandboxNotFoundError",
    "SandboxOwnedError",
    "SandboxPermissionError",
    "SandboxState",
    "SandboxStatus",
    "SandboxTimeoutError",
    "SandboxUnavailableError",
    "Session",
    "SessionClosedError",
    "StreamReader",
    "StreamWriter",
    "TerminalSession",
    "Transfer",
    "UnsupportedError",
    "Url",
    "ValidationError",
    "__version__",
    "results",
    "wait",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for, when it is asked for: `import lowtide` itself loads nothing."""
    from importlib import import_module

    if name == "SandboxStatus":  # the word that users of cwsandbox know
        name = "SandboxState"
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
