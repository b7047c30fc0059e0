"""The one place where what E2B's SDK raises becomes a lowtide error."""

from __future__ import annotations

from lowtide import errors
from lowtide.providers.e2b.transport import track
from lowtide.providers.hosted import Fault, Service, status_of

_ANY = "e2b.SandboxException"

FAULTS = (
    Fault(
        errors.AuthenticationError,
        of="e2b.AuthenticationException",
        words="{text}: the API key was not accepted; set E2B_API_KEY to one of this account",
    ),
    Fault(errors.RateLimitError, of="e2b.RateLimitException"),
    Fault(
        errors.SandboxNotFoundError,
        of="e2b.SandboxNotFoundException",
        words="no sandbox {sandbox_id}: {text}",
    ),
    Fault(
        errors.SandboxFileNotFoundError,
        of="e2b.FileNotFoundException",
        words="{path}: No such file or directory",
    ),
    Fault(errors.SandboxGone, of="e2b.SandboxNotRunningException", more={"reason": "ended"}),
    # Before 2.50 the same answer was a plain TimeoutException, told apart by its words alone.
    Fault(
        errors.SandboxGone,
        of="e2b.TimeoutException",
        says=("was not found", "end of life"),
        more={"reason": "ended"},
    ),
    Fault(errors.SandboxUnavailableError, of="e2b.SandboxUnreachableException"),
    Fault(errors.RequestTimeoutError, of="e2b.TimeoutException"),
    Fault(errors.ResourceExhaustedError, of="e2b.NotEnoughSpaceException"),
    Fault(errors.SandboxFileError, of=_ANY, on_path=True, words="{path}: {text}"),
    Fault(errors.ValidationError, of="e2b.InvalidArgumentException"),
    Fault(errors.SandboxFailedError, of="e2b.TemplateException", more={"reason": "template"}),
    Fault(errors.SandboxUnavailableError, status=503),
    Fault(errors.AuthenticationError, of=_ANY, status=403, words="{text}: this account may not do that"),
    # 404 of a create is its template; whatever else is not found has an exception of its own.
    Fault(errors.ValidationError, of=_ANY, status=(400, 404, 422)),
    Fault(errors.SandboxUnavailableError, of=_ANY, status=409, more={"retryable": True}),
    Fault(errors.SandboxUnavailableError, of=_ANY, status=(*range(300, 400), *range(500, 600))),
    Fault(errors.SandboxError, of=_ANY),
    # The SDK reads every answer as E2B's own: it was a page of somebody on the way.
    Fault(errors.SandboxUnavailableError, of="json.JSONDecodeError", words="not E2B's own answer: {text}"),
    Fault(
        errors.RequestTimeoutError,
        of=("httpx.TimeoutException", "builtins.TimeoutError"),
        words="E2B did not answer in time: {text}",
    ),
    Fault(
        errors.SandboxUnavailableError,
        of=(
            *("httpx.HTTPError", "connectrpc.ConnectError", "builtins.ConnectionError"),
            *("pyqwest.ReadError", "pyqwest.WriteError", "pyqwest.StreamError"),
        ),
        words="E2B could not be reached: {type}: {text}",
    ),
)


def retry_after(error: BaseException) -> float | None:
    """The Retry-After of the answer. The SDK drops it, so it is taken from the frame that still has it."""
    trace = error.__traceback__
    while trace is not None:
        answer = trace.tb_frame.f_locals.get("res")
        value = getattr(answer, "headers", None)
        if value is not None:
            try:
                return max(0.0, float(value.get("Retry-After")))
            except (TypeError, ValueError):
                return None
        trace = trace.tb_next
    return None


def was_lost(error: errors.LowtideError) -> bool:
    """Whether the connection broke, or somebody on the way gave up: nobody knows what a create did."""
    if not isinstance(error, errors.SandboxUnavailableError) or isinstance(error, errors.RateLimitError):
        return False
    import httpx

    cause = error.__cause__
    if isinstance(cause, httpx.TransportError):
        return not isinstance(cause, httpx.ConnectError | httpx.TimeoutException)
    # The newer SDKs have sent it again by themselves, under the same key; the older ones have not.
    return status_of(cause) in (502, 504)


SERVICE = Service("e2b", "E2B", FAULTS, retry_after=retry_after, on_call=track)
