"""What CoreWeave's answers mean, as lowtide's errors: by gRPC's number for them, and the service's own reason."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

_OF = "lowtide.Refusal"
_DETAILS = "grpc-status-details-bin"
_ALREADY_EXISTS, UNAVAILABLE = 6, 14


class Refusal(Exception):
    """An answer that is not a success, or none at all."""

    def __init__(self, text: str, *, status: int, reason: str, retry_seconds: float | None) -> None:
        super().__init__(f"{text} ({reason})" if reason else text)
        self.status, self.reason, self.retry_seconds = status, reason, retry_seconds


def refusal(error: Any) -> Refusal:
    """From what gRPC raised, with the details that the service sends along (AIP-193)."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    reason, retry = "", None
    for name, value in error.trailing_metadata() or ():
        # Where the details are not what they should be, the status says enough.
        with suppress(DecodeError):
            details = status_pb2.Status.FromString(value).details if name == _DETAILS else ()
            for detail in details:
                info, again = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(info) and info.domain == "cwsandbox.com":
                    reason = info.reason
                elif detail.Unpack(again):
                    retry = max(0.0, again.retry_delay.ToMilliseconds() / 1000)
    text = str(error.details() or error.code().name)[:2000]
    return Refusal(text, status=int(error.code().value[0]), reason=reason[:100], retry_seconds=retry)


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
    Fault(errors.SandboxUnavailableError, _OF, (1, 2, 10, 13, 14), words=_UNREACHED),
    Fault(errors.SandboxError, _OF),
    Fault(errors.RequestTimeoutError, "builtins.TimeoutError", words="CoreWeave did not answer in time"),
    Fault(errors.SandboxUnavailableError, "builtins.OSError", words=_UNREACHED),
)


SERVICE = Service(
    "coreweave", "CoreWeave", FAULTS, retry_after=lambda error: getattr(error, "retry_seconds", None)
)


def reason_of(error: BaseException) -> str:
    """The service's own word for it, or ""."""
    return error.__cause__.reason if isinstance(error.__cause__, Refusal) else ""


def is_conflict(error: BaseException) -> bool:
    """Whether the request's id was used for another request."""
    return isinstance(error.__cause__, Refusal) and error.__cause__.status == _ALREADY_EXISTS
