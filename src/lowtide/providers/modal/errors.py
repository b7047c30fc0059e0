"""What Modal's SDK raises, as lowtide's errors."""

from __future__ import annotations

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

PROVIDER = "modal"

_TOKEN = "{text}: set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET to a token of this workspace"  # noqa: S105 - no token
_UNREADABLE = "Modal's answer makes no sense: {text}"
_ELSEWHERE = {"feature": "what was asked for", "alternative": "another provider"}
_THROTTLED = ("too many requests", "rate limit", "throttle")

FAULTS = (
    Fault(errors.AuthenticationError, of=("modal.AuthError", "modal.PermissionDeniedError"), words=_TOKEN),
    Fault(errors.SandboxNotFoundError, of="modal.NotFoundError", says="sandbox", words="no sandbox {sandbox_id}"),
    Fault(errors.SandboxGone, of="modal.NotFoundError", says="task", words="{text}", more={"reason": "ended"}),
    Fault(errors.ValidationError, of="modal.NotFoundError", more={"argument": "provider_options"}),
    Fault(errors.RateLimitError, of="modal.ResourceExhaustedError", says=_THROTTLED),
    Fault(errors.ResourceExhaustedError, of="modal.ResourceExhaustedError"),
    Fault(errors.SandboxUnavailableError, of="modal.InvalidError", says="does not start with", words=_UNREADABLE),
    Fault(errors.SandboxUnavailableError, of="google.DecodeError", words=_UNREADABLE),
    Fault(errors.ValidationError, of=("modal.InvalidError", "modal.ImageBuildError"), more={"argument": "container_image"}),
    Fault(errors.UnsupportedError, of=("modal.Error", "modal.NotImplementedError"), says="not implemented", more=_ELSEWHERE),
    Fault(errors.RequestTimeoutError, of=("modal.TimeoutError", "builtins.TimeoutError"), words="Modal did not answer in time: {text}"),
    Fault(errors.SandboxUnavailableError, of="modal.AlreadyExistsError"),
    Fault(errors.SandboxFailedError, of="modal.ConflictError", more={"reason": "refused"}),
    Fault(errors.SandboxUnavailableError, of=("modal.Error", "grpclib.GRPCError", "grpclib.StreamTerminatedError"), words="Modal failed: {type}: {text}"),
    Fault(errors.SandboxUnavailableError, of="builtins.OSError", words="Modal could not be reached: {type}: {text}"),
)  # fmt: skip

SERVICE = Service(PROVIDER, "Modal", FAULTS)

_OF_A_SANDBOX = (errors.SandboxNotFoundError, errors.SandboxGone)
WORKSPACE = Service(PROVIDER, "Modal", [fault for fault in FAULTS if fault.kind not in _OF_A_SANDBOX])
"""Calls about no sandbox: an environment or a secret named ``sandbox`` that is not there proves nothing of one."""
