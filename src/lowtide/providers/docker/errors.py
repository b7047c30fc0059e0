"""Maps what the engine answers to lowtide's errors, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    RateLimitError,
    RequestTimeoutError,
    ResourceExhaustedError,
    SandboxError,
    SandboxFailedError,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.docker.access import Endpoint, unreachable


@contextmanager
def translated(endpoint: Endpoint, sandbox_id: str | None = None) -> Iterator[None]:
    """Around every call to the engine."""
    import aiodocker
    import aiohttp

    try:
        yield
    except aiodocker.DockerError as error:
        raise from_engine(endpoint, error, sandbox_id) from error
    except TimeoutError as error:
        if isinstance(error, LowtideError):
            raise
        raise RequestTimeoutError(
            "the engine did not answer in time", provider="docker", sandbox_id=sandbox_id
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise unreachable(endpoint, error.os_error) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        if isinstance(error, LowtideError):
            raise
        raise _cut(error, sandbox_id) from error
    except OSError as error:
        if isinstance(error, LowtideError):
            raise
        raise unreachable(endpoint, error) from error


def _cut(error: BaseException, sandbox_id: str | None) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"the connection to the engine broke: {error or type(error).__name__}",
        provider="docker",
        sandbox_id=sandbox_id,
    )


def from_engine(endpoint: Endpoint, error: Any, sandbox_id: str | None) -> LowtideError:
    """`error` is an aiodocker.DockerError: a status and the engine's own words."""
    status, words = int(error.status), str(error.message).strip()
    low = words.lower()
    context: dict[str, Any] = {"provider": "docker", "sandbox_id": sandbox_id}
    if status == 900:  # aiodocker's own: no answer at all
        cause = error.__context__
        refused = getattr(cause, "os_error", None)
        return unreachable(endpoint, refused) if refused is not None else _cut(cause or error, sandbox_id)
    if (
        "no space left on device" in low
        or "resource temporarily unavailable" in low
        or "cannot allocate memory" in low
    ):
        return ResourceExhaustedError(f"the engine is out of space, memory or processes: {words}", **context)
    if status in (401, 403) or "authentication required" in low or "unauthorized" in low:
        return AuthenticationError(f"the engine or the registry refused: {words}", **context)
    if status == 404 and "image" in low and "container" not in low:
        return SandboxFailedError(f"the image is not there: {words}", reason="image-missing", **context)
    if status == 404 or "no such container" in low:
        return SandboxNotFoundError(f"no such sandbox: {words}", **context)
    if status == 429 or "toomanyrequests" in low:
        return RateLimitError(f"asked to slow down: {words}", **context)
    if (
        "unable to find user" in low
        or "no matching entries in passwd" in low
        or "unable to find group" in low
    ):
        return ValidationError(f"the image knows no such user: {words}", argument="user", **context)
    if status == 400:
        return ValidationError(f"the engine refused the request: {words}", **context)
    if status in (502, 503, 504):
        return SandboxUnavailableError(f"the engine is not available: {words}", **context)
    return SandboxError(f"the engine failed ({status}): {words}", retryable=status >= 500, **context)
