"""The one place where what the API server or the network answers becomes a lowtide error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowtide import errors

PROVIDER = "kubernetes"


class ApiError(Exception):
    """A Status answer of the API server. Stays inside this package."""

    def __init__(
        self, status: int, body: Any, *, what: str, retry_after_seconds: float | None = None
    ) -> None:
        details = body if isinstance(body, dict) else {}
        self.status = status
        self.reason = str(details.get("reason") or "")
        self.message = str(
            details.get("message") or (body if isinstance(body, str) else "") or f"HTTP {status}"
        )[:2000]
        self.what = what
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{what}: {self.message}")


@contextmanager
def mapped(sandbox_id: str | None = None) -> Iterator[None]:
    """Turn what happens inside into `lowtide.errors`, with the original as the cause."""
    try:
        yield
    except errors.LowtideError as error:
        error.sandbox_id = error.sandbox_id or sandbox_id
        raise
    except ApiError as error:
        raise from_api(error, sandbox_id) from error
    except TimeoutError as error:
        raise errors.RequestTimeoutError(
            "the Kubernetes API server did not answer in time", provider=PROVIDER, sandbox_id=sandbox_id
        ) from error
    except Exception as error:
        if not _of_the_network(error):
            raise
        raise errors.SandboxUnavailableError(
            f"the Kubernetes API server could not be reached: {type(error).__name__}: {error}",
            provider=PROVIDER,
            sandbox_id=sandbox_id,
        ) from error


def _of_the_network(error: Exception) -> bool:
    import aiohttp  # here, so that the class and its capabilities can be read without the extra

    return isinstance(error, (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError))


def from_api(error: ApiError, sandbox_id: str | None) -> errors.LowtideError:
    context: dict[str, Any] = {"provider": PROVIDER, "sandbox_id": sandbox_id}
    text = str(error)
    lowered = error.message.lower()
    if error.status == 401:
        return errors.AuthenticationError(
            f"{text}: the credentials in the kubeconfig or service account are not accepted", **context
        )
    if error.status == 403:
        if "exceeded quota" in lowered:
            return errors.ResourceExhaustedError(text, **context)
        if "cannot " in lowered and "resource" in lowered:
            return errors.AuthenticationError(
                f"{text}. The rights lowtide needs are in docs/kubernetes.md", **context
            )
        # Admission said no (pod security, a webhook, an unknown runtime class): this Pod will never run here.
        return errors.SandboxFailedError(text, reason=error.reason or "Forbidden", **context)
    if error.status == 404:
        return errors.SandboxNotFoundError(text, **context)
    if error.status in (400, 422):
        return errors.ValidationError(text, **context)
    if error.status == 429:
        return errors.RateLimitError(text, retry_after_seconds=error.retry_after_seconds, **context)
    if error.status == 504:
        return errors.RequestTimeoutError(text, **context)
    if error.status >= 500 or error.status == 409:
        return errors.SandboxUnavailableError(text, **context)
    return errors.SandboxError(text, **context)
