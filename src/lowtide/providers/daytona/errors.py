"""The one place where what Daytona's SDK raises becomes a lowtide error."""

from __future__ import annotations

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

_QUOTA = ("quota", "limit exceeded", "exceeds the limit", "no available runners", "insufficient")
_AWAY = "Daytona could not be reached: {type}: {text}"

SERVICE = Service(
    "daytona",
    "Daytona",
    (
        Fault(
            errors.AuthenticationError,
            status=401,
            words="{text}: the API key was not accepted; set DAYTONA_API_KEY to one of this account",
        ),
        Fault(errors.RateLimitError, status=429),
        Fault(errors.ResourceExhaustedError, status=(400, 402, 403, 409, 422), says=_QUOTA),
        Fault(errors.AuthenticationError, status=403, words="{text}: this account may not do that"),
        Fault(
            errors.SandboxFailedError, of="daytona.DaytonaQueueTimeoutError", more={"reason": "queue-timeout"}
        ),
        Fault(
            errors.SandboxFailedError, of="daytona.DaytonaSpotEvictedError", more={"reason": "spot-evicted"}
        ),
        Fault(errors.RequestTimeoutError, of="daytona.DaytonaTimeoutError"),
        Fault(errors.RequestTimeoutError, status=(408, 504)),
        Fault(errors.SandboxNotFoundError, status=404, own="sandbox"),
        Fault(errors.SandboxGone, status=410, more={"reason": "ended"}, own="sandbox"),
        Fault(errors.SandboxUnavailableError, status=(404, 410), words="not Daytona's own answer: {text}"),
        Fault(errors.ValidationError, status=(400, 422)),
        Fault(errors.SandboxUnavailableError, status=409, more={"retryable": True}),
        Fault(errors.SandboxUnavailableError, status=range(500, 600)),
        Fault(errors.SandboxFailedError, says="entered error state", more={"reason": "error"}),
        Fault(
            errors.RequestTimeoutError,
            of=("builtins.TimeoutError", "httpx.TimeoutException"),
            words="Daytona did not answer in time: {text}",
        ),
        Fault(
            errors.SandboxUnavailableError,
            of=("daytona.DaytonaConnectionError", "aiohttp.ClientError", "httpx.HTTPError"),
            words=_AWAY,
        ),
        Fault(errors.SandboxUnavailableError, of="builtins.ConnectionError", words=_AWAY),
        # The SDK wraps whatever it raises itself over an answer that it cannot read. Its words quote the answer.
        Fault(
            errors.SandboxUnavailableError,
            of="daytona.DaytonaError",
            cause=(
                *("builtins.ValueError", "builtins.TypeError"),
                *("builtins.LookupError", "builtins.AttributeError"),
            ),
            words="Daytona, or a proxy on the way to it, gave an answer that cannot be read",
        ),
        Fault(errors.SandboxError, of="daytona.DaytonaError"),
    ),
)
