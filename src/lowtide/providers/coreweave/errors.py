"""What CoreWeave's answers mean, as lowtide's errors: by gRPC's number for them, and the service's own reason."""

from __future__ import annotations

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

_OF = "lowtide.Refusal"
DOMAIN = "cwsandbox.com"
"""Of its reasons, in the details of an error."""

_UNREACHED = "CoreWeave cannot be reached: {text}"
FAULTS = (
    Fault(errors.AuthenticationError, _OF, 16, words="{text}: set CWSANDBOX_API_KEY to a key that is valid"),
    Fault(errors.AuthenticationError, _OF, 7),
    Fault(errors.SandboxFailedError, _OF, 5, says="_fss_", more={"reason": "snapshot-missing"}),
    Fault(
        errors.SandboxNotFoundError, _OF, 5, says="_sandbox_not_found", words="no sandbox {sandbox_id} here"
    ),
    Fault(errors.ValidationError, _OF, (3, 5, 11), words="CoreWeave refused the request: {text}"),
    Fault(
        errors.ResourceExhaustedError, _OF, 8, says=("capacity", "quota", "limit of"), words="no room: {text}"
    ),
    Fault(errors.RateLimitError, _OF, 8),
    Fault(errors.SandboxUnavailableError, _OF, 9, says="not_running"),
    Fault(
        errors.UnsupportedError,
        _OF,
        12,
        more={"feature": "what the message names", "alternative": "leave it out"},
    ),
    Fault(errors.RequestTimeoutError, _OF, 4, words="CoreWeave did not answer in time: {text}"),
    # Of a create: the request id was taken, so something was made. It has to be looked for.
    Fault(errors.SandboxUnavailableError, _OF, 6, words="CoreWeave has had this request before: {text}"),
    Fault(errors.SandboxUnavailableError, _OF, (1, 2, 10, 13, 14), words=_UNREACHED),
    Fault(errors.SandboxError, _OF),
    Fault(errors.RequestTimeoutError, "builtins.TimeoutError", words="CoreWeave did not answer in time"),
    Fault(errors.SandboxUnavailableError, "builtins.OSError", words=_UNREACHED),
)


SERVICE = Service(
    "coreweave", "CoreWeave", FAULTS, retry_after=lambda error: getattr(error, "retry_seconds", None)
)
