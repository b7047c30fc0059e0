"""Leaving a ``with`` block: whether it failed, and whether the error at its end may be raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide import loops
from lowtide.errors import LowtideError, SandboxError

if TYPE_CHECKING:
    from lowtide.lifecycle.lease import EndReport
    from lowtide.operation import Operation


def leave(ending: Operation[Any], error: BaseException | None) -> None:
    """Wait for the end that leaving the block started; `error` is what the block was left with."""
    failure: Exception | None = None
    try:
        ending.result()
    except Exception as problem:
        failure = problem
    _report(failure, error)


async def leave_async(ending: Operation[Any], error: BaseException | None) -> None:
    failure: Exception | None = None
    try:
        # Shielded: whoever cancels this block does not want to leave a sandbox behind.
        await loops.shield(ending)
    except Exception as problem:
        failure = problem
    _report(failure, error)


def is_failure(error: BaseException | None) -> bool:
    """Whether a block that was left this way failed, as ``keep="on-failure"`` means it."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def ended(report: EndReport) -> EndReport:
    """The report, unless it says that the sandbox could not be ended: that is raised."""
    from lowtide.lifecycle.lease import Outcome

    if report.outcome is not Outcome.FAILED:
        return report
    if isinstance(report.error, LowtideError):
        raise report.error
    raise SandboxError(
        f"sandbox {report.sandbox_id} could not be ended: {report.why or report.error}; it stays in the ledger "
        "and is tried again",
        provider=report.provider,
        sandbox_id=report.sandbox_id,
        retryable=True,
    ) from report.error


def _report(failure: Exception | None, error: BaseException | None) -> None:
    """Raise what went wrong at the end of a block, but never in place of what went wrong inside it."""
    if failure is None:
        return
    if error is None:
        raise failure
    error.add_note(f"lowtide: and at the end of the block: {type(failure).__name__}: {failure}")
