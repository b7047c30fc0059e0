"""A blocking wait for a call that must not go on once the person who waits has pressed Ctrl+C."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from lowtide.operation import Operation

T = TypeVar("T")


def finished(call: Operation[T]) -> T:
    """Its result. Ctrl+C ends it: agents' loops take that for "not this command", and go on in the same sandbox."""
    try:
        return call.result()
    except Exception:
        raise
    except BaseException:
        call.cancel()
        raise
