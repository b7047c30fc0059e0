"""What `lowtide` exports, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import lowtide

EXPORTED = [
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


def test_the_exported_names_are_these_and_each_can_be_loaded() -> None:
    assert sorted(lowtide.__all__) == sorted(EXPORTED)
    for name in EXPORTED:
        assert getattr(lowtide, name) is not None
    assert lowtide.SandboxStatus is lowtide.SandboxState


def test_every_error_is_exported() -> None:
    from lowtide import errors

    assert set(errors.__all__) <= set(lowtide.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(lowtide, "Sandcastle")


def test_importing_sandbox_loads_no_loop_provider_database_or_command_line() -> None:
    heavy = "asyncio sqlite3 ssl subprocess click rich aiodocker aiohttp yaml e2b daytona"
    script = "import sys; from lowtide import Sandbox, SandboxDefaults, results, wait\n"
    script += f"print([m for m in {heavy.split()!r} if m in sys.modules])\n"
    script += (
        "print([m for m in sys.modules if m.startswith('lowtide.providers.') or m.startswith('lowtide.cli')])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["[]", "[]"]
