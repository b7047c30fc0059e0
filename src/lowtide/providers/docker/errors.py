"""The one place where what the engine or the way to it answers becomes a lowtide error."""

from __future__ import annotations

from lowtide import errors
from lowtide.providers.hosted import Fault, Service

_ENGINE = "aiodocker.DockerError"
_NO_ANSWER = 900
"""aiodocker's own: there was no answer at all."""
_CONNECT = "aiohttp.ClientConnectorError"
_NO_PERMISSION = (
    "no permission on the engine's socket ({text}): join the group that owns it (usually `docker`), "
    "or run a rootless engine and set DOCKER_HOST to its socket"
)
_UNREACHED = (
    "no container engine answers ({text}): start Docker or `podman system service`, "
    "or set DOCKER_HOST to where it listens"
)
_BROKE = "the connection to the engine broke: {text}"
_REFUSED = "the engine or the registry refused: {text}"
_SLOWER = "asked to slow down: {text}"
_MISSING = "no such sandbox: {text}"
NO_CONTAINER = ("no such container", "no container with")
"""In the words of Docker and of Podman. A 404 with other words may be a proxy's, and proves no end. They name a container by the
engine's id: the client compares it with the one that was asked for."""

FAULTS = (
    Fault(errors.AuthenticationError, of="builtins.PermissionError", words=_NO_PERMISSION),
    Fault(errors.AuthenticationError, of=_CONNECT, cause="builtins.PermissionError", words=_NO_PERMISSION),
    Fault(errors.AuthenticationError, _ENGINE, _NO_ANSWER, says="permission denied", words=_NO_PERMISSION),
    Fault(
        errors.SandboxUnavailableError, _ENGINE, _NO_ANSWER, says="cannot connect to host", words=_UNREACHED
    ),
    Fault(
        errors.SandboxUnavailableError, _ENGINE, _NO_ANSWER, says="cannot connect to unix", words=_UNREACHED
    ),
    Fault(errors.SandboxUnavailableError, _ENGINE, _NO_ANSWER, words=_BROKE),
    Fault(
        errors.ResourceExhaustedError,
        _ENGINE,
        says=("no space left on device", "resource temporarily unavailable", "cannot allocate memory"),
        words="the engine is out of space, memory or processes: {text}",
    ),
    Fault(
        errors.ValidationError,
        _ENGINE,
        says=("unable to find user", "no matching entries in passwd", "unable to find group"),
        words="the image knows no such user: {text}",
        more={"argument": "user"},
    ),
    Fault(errors.AuthenticationError, _ENGINE, (401, 403), words=_REFUSED),
    Fault(
        errors.AuthenticationError, _ENGINE, says=("authentication required", "unauthorized"), words=_REFUSED
    ),
    Fault(errors.SandboxNotFoundError, _ENGINE, 404, says=NO_CONTAINER, words=_MISSING, by_id=False),
    Fault(
        errors.SandboxFailedError,
        _ENGINE,
        404,
        says="image",
        words="the image is not there: {text}",
        more={"reason": "image-missing"},
    ),
    Fault(
        errors.SandboxUnavailableError,
        _ENGINE,
        404,
        words="not found, but the engine does not say that it is the container: {text}",
        more={"retryable": True},
    ),
    Fault(errors.SandboxNotFoundError, _ENGINE, says=NO_CONTAINER, words=_MISSING, by_id=False),
    Fault(errors.RateLimitError, _ENGINE, 429, words=_SLOWER),
    Fault(errors.RateLimitError, _ENGINE, says="toomanyrequests", words=_SLOWER),
    Fault(errors.ValidationError, _ENGINE, 400, words="the engine refused the request: {text}"),
    Fault(
        errors.SandboxUnavailableError, _ENGINE, (502, 503, 504), words="the engine is not available: {text}"
    ),
    Fault(
        errors.SandboxError,
        _ENGINE,
        range(500, 600),
        words="the engine failed: {text}",
        more={"retryable": True},
    ),
    Fault(errors.SandboxError, _ENGINE, words="the engine failed: {text}"),
    Fault(errors.RequestTimeoutError, of="builtins.TimeoutError", words="the engine did not answer in time"),
    Fault(errors.SandboxUnavailableError, of=_CONNECT, words=_UNREACHED),
    Fault(
        errors.SandboxUnavailableError,
        of=("aiohttp.ClientError", "builtins.ConnectionError", "asyncio.IncompleteReadError"),
        words=_BROKE,
    ),
    Fault(errors.SandboxUnavailableError, of="builtins.OSError", words=_UNREACHED),
)
SERVICE = Service("docker", "Docker", FAULTS)
mapped = SERVICE.mapped
