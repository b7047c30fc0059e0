"""The one place where what Daytona's SDK raises becomes a lowtide error."""

from __future__ import annotations

from typing import Any

from lowtide import errors
from lowtide.providers import hosted

PROVIDER = "daytona"

_CREDENTIAL = "the API key was not accepted; set DAYTONA_API_KEY to one of this account"
_QUOTA = ("quota", "limit exceeded", "exceeds the limit", "no available runners", "insufficient")


def translated(
    error: BaseException, sandbox_id: str | None = None, *, path: str | None = None
) -> errors.LowtideError | None:
    """The lowtide error for something the SDK raised; None for what is not the SDK's."""
    if isinstance(error, errors.LowtideError):
        return error
    import aiohttp
    import httpx
    from daytona import DaytonaError

    context: dict[str, Any] = {"provider": PROVIDER, "sandbox_id": sandbox_id}
    text = str(error) or type(error).__name__
    if isinstance(error, DaytonaError) or hasattr(error, "status"):
        # The SDK's own, the generated clients' below it, and a refused websocket.
        return _by_status(error, text, path, context)
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return errors.RequestTimeoutError(f"Daytona did not answer in time: {text}", **context)
    if isinstance(error, aiohttp.ClientError | httpx.HTTPError | ConnectionError):
        return errors.SandboxUnavailableError(
            f"Daytona could not be reached: {type(error).__name__}: {text}", **context
        )
    return None


mapped = hosted.mapped_by(translated)


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status of the answer, wherever the SDK left it."""
    while error is not None:
        for name in ("status_code", "status"):
            status = getattr(error, name, None)
            if isinstance(status, int) and status > 0:
                return status
        error = error.__cause__
    return None


def _by_status(
    error: BaseException, text: str, path: str | None, context: dict[str, Any]
) -> errors.LowtideError:
    status, kind = status_of(error), type(error).__name__
    lowered = text.lower()
    if status == 401:
        return errors.AuthenticationError(f"{text}: {_CREDENTIAL}", **context)
    if status == 429:
        return errors.RateLimitError(text, retry_after_seconds=_retry_after(error), **context)
    if path is not None and (found := _of_a_file(error, text, path, context)) is not None:
        return found
    if status in (400, 402, 403, 409, 422) and any(words in lowered for words in _QUOTA):
        return errors.ResourceExhaustedError(text, **context)
    if status == 403:
        return errors.AuthenticationError(f"{text}: this account may not do that", **context)
    if kind in ("DaytonaQueueTimeoutError", "DaytonaSpotEvictedError"):
        return errors.SandboxFailedError(text, reason=kind.removeprefix("Daytona"), **context)
    if kind in ("DaytonaTimeoutError", "DaytonaConnectionTimeoutError") or status in (408, 504):
        return errors.RequestTimeoutError(text, **context)
    if status == 404:
        return errors.SandboxNotFoundError(text, **context)
    if status == 410:
        return errors.SandboxGone(text, reason="ended", **context)
    if status in (400, 422):
        return errors.ValidationError(text, **context)
    if status == 409:
        return errors.SandboxUnavailableError(text, retryable=True, **context)
    if status is not None and status >= 500:
        return errors.SandboxUnavailableError(text, **context)
    if "entered error state" in lowered:
        reason = text.partition("error reason: ")[2] or "error"
        return errors.SandboxFailedError(text, reason=reason, **context)
    if kind == "DaytonaConnectionError" or _of_the_transport(error):
        return errors.SandboxUnavailableError(f"Daytona could not be reached: {text}", **context)
    return errors.SandboxError(text, **context)


_OF_A_FILE = frozenset({"FILE_NOT_FOUND", "FILE_ACCESS_DENIED", "INVALID_FILE_PATH", "FILE_READ_FAILED"})


def _of_a_file(
    error: BaseException, text: str, path: str, context: dict[str, Any]
) -> errors.LowtideError | None:
    """None where the fault is not the file's: the sandbox or the way to it."""
    if (found := hosted.file_error(text, path, context)) is not None:
        return found
    code, status = getattr(error, "code", None), status_of(error)
    if code == "FILE_NOT_FOUND":
        return errors.SandboxFileNotFoundError(f"{path}: No such file or directory", path=path, **context)
    if code == "FILE_ACCESS_DENIED":
        return errors.SandboxPermissionError(f"{path}: Permission denied", path=path, **context)
    if code in _OF_A_FILE or status in (400, 422):
        return errors.SandboxFileError(f"{path}: {text}", path=path, **context)
    return None


def _retry_after(error: BaseException) -> float | None:
    headers = getattr(error, "headers", None)
    try:
        return max(0.0, float(headers.get("Retry-After") or headers.get("retry-after")))  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None


def _of_the_transport(error: BaseException) -> bool:
    """Retries that ran out are a plain DaytonaError; what went wrong is its cause."""
    import aiohttp

    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, aiohttp.ClientError | ConnectionError | OSError):
            return True
        cause = cause.__cause__
    return False


def was_cut(error: BaseException) -> bool:
    """Whether nobody knows what the request did: the answer is lost, not negative."""
    return isinstance(error, errors.SandboxUnavailableError | errors.RequestTimeoutError) and not isinstance(
        error, errors.RateLimitError
    )
