"""What Runloop's SDK raises, as lowtide's errors."""

from __future__ import annotations

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

_SDK = "runloop_api_client."

UNREACHED = "aiohttp.ClientConnectorError"
"""There was no connection. What the SDK says of that is a timeout, as it says of everything in between."""

FAULTS = (
    Fault(
        errors.AuthenticationError, status=401, words="Runloop refused the key: set RUNLOOP_API_KEY ({text})"
    ),
    Fault(errors.AuthenticationError, status=403, words="this key may not do that: {text}"),
    Fault(errors.RateLimitError, status=429),
    Fault(
        errors.SandboxNotFoundError,
        status=404,
        says=("devbox ", "devbox'", 'devbox"', "devbox:"),  # not the path: who does not know it may name it
        words="no sandbox {sandbox_id} in this Runloop account",
        own="devbox",
    ),
    Fault(errors.SandboxFailedError, status=404, more={"reason": "not-found"}),
    Fault(errors.ValidationError, status=(400, 413, 422), words="Runloop refused the request: {text}"),
    Fault(errors.RequestTimeoutError, status=408),
    Fault(errors.SandboxUnavailableError, status=409),
    Fault(errors.SandboxUnavailableError, status=range(500, 600)),
    Fault(
        errors.SandboxUnavailableError,
        of=_SDK + "APIConnectionError",
        cause=UNREACHED,
        words="Runloop cannot be reached; is RUNLOOP_BASE_URL right?",
    ),
    Fault(
        errors.RequestTimeoutError,
        of=(_SDK + "APITimeoutError", "httpx.TimeoutException", "builtins.TimeoutError"),
        words="Runloop did not answer, or its connection dropped",
    ),
    Fault(
        errors.SandboxUnavailableError,
        of=(_SDK + "APIConnectionError", "httpx.TransportError", "builtins.OSError"),
        words="Runloop cannot be reached; is RUNLOOP_BASE_URL right? ({text})",
    ),
    Fault(errors.SandboxError, of=_SDK + "RunloopError"),
)
SERVICE = Service("runloop", "Runloop", FAULTS)
