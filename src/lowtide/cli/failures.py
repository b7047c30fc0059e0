"""From an exception to one line that says what to do next, and to an exit code."""

from __future__ import annotations

import sys
import traceback

import click

from lowtide import errors
from lowtide.cli import exit_codes
from lowtide.cli.text import one_line

_INFRASTRUCTURE = (
    errors.LedgerError,
    errors.MissingDependencyError,
    errors.AuthenticationError,
    errors.SandboxFailedError,
    errors.SandboxUnavailableError,
    errors.ResourceExhaustedError,
    errors.RequestTimeoutError,
)


def explain(error: BaseException) -> tuple[str, int]:
    """The line for a person (empty: nothing to say) and the exit code."""
    if isinstance(error, SystemExit):
        return (
            ("", error.code) if isinstance(error.code, int) else (one_line(str(error.code)), exit_codes.ERROR)
        )
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted", exit_codes.INTERRUPTED
    if isinstance(error, click.ClickException):
        return _usage(error), exit_codes.USAGE
    if isinstance(error, errors.LowtideError):
        return _with_next_step(error), exit_code(error)
    if isinstance(error, OSError):
        return one_line(str(error)), exit_codes.ERROR
    name = type(error).__name__
    return one_line(
        f"{name}: {error}; this is a bug in lowtide: `lowtide --debug …` shows where"
    ), exit_codes.INFRASTRUCTURE


def print_traceback(error: BaseException) -> None:
    """Print where an error and its causes were raised, to standard error.

    The words of a cause that is not lowtide's own are left out: an SDK that cannot read an answer quotes it, with the
    variables of the sandbox in it.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    for one in reversed(chain):
        kind = f"{type(one).__module__}.{type(one).__qualname__}"
        shown = one is error or isinstance(one, errors.LowtideError | OSError)
        print("Traceback (most recent call last):", file=sys.stderr)
        traceback.print_tb(one.__traceback__)
        print(f"{kind}: {one}" if shown else f"{kind} (an SDK's words are not shown)", file=sys.stderr)
        if one is not error:
            print("\nThe above exception was the direct cause of the following exception:\n", file=sys.stderr)


def exit_code(error: errors.LowtideError) -> int:
    if isinstance(error, errors.ValidationError):
        return exit_codes.USAGE
    if isinstance(error, errors.CommandTimeoutError):
        return exit_codes.TIMEOUT
    return exit_codes.INFRASTRUCTURE if isinstance(error, _INFRASTRUCTURE) else exit_codes.ERROR


def _usage(error: click.ClickException) -> str:
    text = one_line(error.format_message()).rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or "`lowtide" in text:
        return text
    return f"{text}; `{context.command_path} --help` shows how"


def _with_next_step(error: errors.LowtideError) -> str:
    text = one_line(str(error)) or type(error).__name__
    if isinstance(error, errors.CleanupError):
        text += ": " + "; ".join(one_line(str(part)) for part in error.exceptions)
    step = _next_step(error)
    return text if not step or step in text else f"{text}; {step}"


def _next_step(error: errors.LowtideError) -> str:
    match error:
        case errors.UnsupportedError(alternative=str(alternative)):
            return one_line(alternative)
        case errors.MissingDependencyError(install=str(install)) if install not in str(error):
            return f"run `{install}`"
        case errors.SandboxNotFoundError():
            return "`lowtide ls` shows what exists"
        case errors.SandboxGone(sandbox_id=str(sandbox_id)):
            return f"`lowtide history {sandbox_id}` says what happened"
        case errors.CleanupError():
            return "each is still in the ledger and will be tried again; `lowtide sweep` tries now"
        case errors.RateLimitError(retry_after_seconds=float(seconds)):
            return f"try again in {seconds:.0f} s"
        case errors.SandboxUnavailableError() | errors.RequestTimeoutError():
            return "try again; `lowtide doctor` checks the way there"
        case errors.SandboxFailedError():
            return "`lowtide doctor` says what this machine can do"
    return ""
