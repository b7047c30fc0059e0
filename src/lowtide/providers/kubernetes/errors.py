"""The one place where what the API server or the network answers becomes a lowtide error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

PROVIDER = "kubernetes"


class ApiError(Exception):
    """A Status answer of the API server. Stays inside this package."""

    def __init__(
        self, status: int, body: Any, *, what: str, headers: Mapping[str, str] | None = None
    ) -> None:
        details = body if isinstance(body, dict) else {}
        # Somebody on the way who answers in the server's place proves nothing; that one says it as a Status.
        self.elsewhere = status < 400 or (status == 404 and details.get("kind") != "Status")
        self.status = 502 if self.elsewhere else status
        self.reason = str(details.get("reason") or "")
        self.message = str(
            details.get("message") or (body if isinstance(body, str) else "") or f"HTTP {status}"
        )[:2000]
        self.headers = dict(headers or {})
        own = "not the API server's own answer: " if self.elsewhere else ""
        super().__init__(f"{what}: {own}{self.message}")


_API = "lowtide.ApiError"
_NO_SUCH_API = "404 page not found"
"""The server's own words for a group that it does not serve: they are no Status."""
_VERBS = ("create", "get", "list", "watch", "patch", "delete")
FAULTS = (
    Fault(
        errors.AuthenticationError,
        of=_API,
        status=401,
        words="{text}: the credentials in the kubeconfig or service account are not accepted",
    ),
    Fault(errors.ResourceExhaustedError, of=_API, status=403, says="exceeded quota"),
    Fault(
        errors.AuthenticationError,
        of=_API,
        status=403,
        says=tuple(f"cannot {verb} resource" for verb in _VERBS),
        words="{text}. The rights lowtide needs are in docs/kubernetes.md",
    ),
    # Admission said no (pod security, a webhook, an unknown runtime class): this Pod will never run here.
    Fault(errors.SandboxFailedError, of=_API, status=403, more={"reason": "Forbidden"}),
    Fault(errors.SandboxNotFoundError, of=_API, status=404),
    Fault(errors.ValidationError, of=_API, status=(400, 422)),
    Fault(errors.RateLimitError, of=_API, status=429),
    Fault(errors.RequestTimeoutError, of=_API, status=504),
    Fault(errors.SandboxUnavailableError, of=_API, status=(409, *range(500, 600))),
    Fault(errors.SandboxError, of=_API),
    Fault(
        errors.RequestTimeoutError,
        of="builtins.TimeoutError",
        words="the Kubernetes API server did not answer in time",
    ),
    Fault(
        errors.SandboxUnavailableError,
        of=("aiohttp.ClientError", "builtins.ConnectionError", "asyncio.IncompleteReadError"),
        words="the Kubernetes API server could not be reached: {type}: {text}",
    ),
)
SERVICE = Service(PROVIDER, "Kubernetes", FAULTS)
mapped = SERVICE.mapped


def may_not(error: ApiError) -> bool:
    """The right is missing, which is another thing than an object that is refused."""
    return error.status == 403 and "cannot " in error.message and " resource " in error.message


@contextmanager
def where_allowed() -> Iterator[None]:
    """Around what is looked for beside a pod: without the right to see such things there are none of ours, nor where the
    server does not know them."""
    try:
        yield
    except ApiError as error:
        if not may_not(error) and not (error.elsewhere and error.message.strip() == _NO_SUCH_API):
            raise
