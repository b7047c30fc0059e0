"""The one place where what E2B's SDK raises becomes a lowtide error."""

from __future__ import annotations

import re
from typing import Any

from lowtide import errors
from lowtide.providers import hosted

PROVIDER = "e2b"

_STATUS = re.compile(r"^(\d{3}): ")
_CREDENTIAL = "the API key was not accepted; set E2B_API_KEY to one of this account"


def translated(
    error: BaseException, sandbox_id: str | None = None, *, path: str | None = None
) -> errors.LowtideError | None:
    """The lowtide error for something the SDK raised; None for what is not the SDK's."""
    import httpx
    from connectrpc.errors import ConnectError
    from e2b import exceptions as e2b

    context: dict[str, Any] = {"provider": PROVIDER, "sandbox_id": sandbox_id}
    text = str(error) or type(error).__name__
    if isinstance(error, errors.LowtideError):
        return error
    if isinstance(error, e2b.AuthenticationException):
        return errors.AuthenticationError(f"{text}: {_CREDENTIAL}", **context)
    if isinstance(error, e2b.RateLimitException):
        return errors.RateLimitError(text, retry_after_seconds=retry_after(error), **context)
    if isinstance(error, e2b.SandboxNotFoundException):
        return errors.SandboxNotFoundError(f"no sandbox {sandbox_id}: {text}", **context)
    if isinstance(error, e2b.FileNotFoundException):
        return errors.SandboxFileNotFoundError(f"{path}: No such file or directory", path=path, **context)
    if type(error).__name__ == "SandboxNotRunningException" or (
        # Before 2.50 the same answer was a plain TimeoutException, told apart by its words alone.
        isinstance(error, e2b.TimeoutException) and ("was not found" in text or "end of life" in text)
    ):
        return errors.SandboxGone(text, reason="ended", **context)
    if type(error).__name__ == "SandboxUnreachableException":
        return errors.SandboxUnavailableError(text, **context)
    if isinstance(error, e2b.TimeoutException):
        return errors.RequestTimeoutError(text, **context)
    if isinstance(error, e2b.NotEnoughSpaceException):
        return errors.ResourceExhaustedError(f"{path}: {text}" if path else text, **context)
    if path is not None and isinstance(error, e2b.SandboxException):
        return hosted.file_error(text, path, context) or errors.SandboxFileError(
            f"{path}: {text}", path=path, **context
        )
    if isinstance(error, e2b.InvalidArgumentException):
        return errors.ValidationError(text, **context)
    if isinstance(error, e2b.TemplateException):
        return errors.SandboxFailedError(text, reason="template", **context)
    if getattr(error, "status_code", None) == 503:
        return errors.SandboxUnavailableError(text, **context)
    if isinstance(error, e2b.SandboxException):
        return _by_status(error, text, context)
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return errors.RequestTimeoutError(f"E2B did not answer in time: {text}", **context)
    if isinstance(error, httpx.HTTPError | ConnectError | ConnectionError):
        return errors.SandboxUnavailableError(
            f"E2B could not be reached: {type(error).__name__}: {text}", **context
        )
    if _of_the_transport(error):
        return errors.SandboxUnavailableError(f"E2B could not be reached: {text}", **context)
    return None


mapped = hosted.mapped_by(translated)


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of what the SDK raised. The older ones say it in the text alone."""
    status = getattr(error, "status_code", None)
    if status is None and (found := _STATUS.match(str(error))):
        status = int(found[1])
    return status


def _by_status(error: Exception, text: str, context: dict[str, Any]) -> errors.LowtideError:
    status = status_of(error)
    if status == 403:
        return errors.AuthenticationError(f"{text}: this account may not do that", **context)
    if status in (400, 404, 422):
        # 404 of a create is its template; whatever else is not found has an exception of its own.
        return errors.ValidationError(text, **context)
    if status == 409:
        return errors.SandboxUnavailableError(text, retryable=True, **context)
    if status is not None and status >= 500:
        return errors.SandboxUnavailableError(text, **context)
    return errors.SandboxError(text, **context)


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


def _of_the_transport(error: BaseException) -> bool:
    import pyqwest

    kinds = tuple(
        kind
        for name in ("ReadError", "WriteError", "StreamError")
        if isinstance(kind := getattr(pyqwest, name, None), type)
    )
    return isinstance(error, kinds)
