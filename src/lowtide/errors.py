"""Every error lowtide raises.

LowtideError                          .provider .sandbox_id .retryable
├── ValidationError (ValueError)      an argument is wrong; nothing was created    .argument
│   └── UnsupportedError              this provider cannot do that                 .feature .alternative
├── MissingDependencyError (ImportError)   an extra is not installed               .install
├── AuthenticationError (PermissionError)  no key, a wrong key, or not allowed
├── LedgerError (OSError)             the ledger could not be read or written; what was made then was ended again
├── SessionClosedError                the session has ended and takes no new work
├── CleanupError (ExceptionGroup)     some sandboxes could not be ended; each is still in the ledger
└── SandboxError
    ├── SandboxNotFoundError (LookupError)     no sandbox with that id
    ├── SandboxGone                            it existed and has ended            .reason
    ├── SandboxOwnedError (PermissionError)    it has another owner; take=True takes it
    ├── SandboxFailedError                     it could not be started             .reason
    ├── SandboxUnavailableError (ConnectionError)   the provider or the way to it failed; retryable
    │   └── RateLimitError                     the provider asked to slow down     .retry_after_seconds
    ├── ResourceExhaustedError                 quota, disk or memory used up
    ├── SandboxTimeoutError (TimeoutError)
    │   ├── RequestTimeoutError                the provider did not answer in time
    │   └── CommandTimeoutError                the command ran out of time         .result
    ├── SandboxExecutionError                  exec(check=True) ended non-zero     .result
    ├── OutputLimitError                       a command printed more than allowed .result
    └── SandboxFileError (OSError)             a file operation failed             .path .errno .strerror
        ├── SandboxFileNotFoundError (FileNotFoundError)
        ├── SandboxFileExistsError (FileExistsError)
        ├── SandboxIsADirectoryError (IsADirectoryError)
        ├── SandboxNotADirectoryError (NotADirectoryError)
        └── SandboxPermissionError (PermissionError)

A program's own exit code is never an error unless ``check=True`` asks for it; a fault of the
infrastructure is never an exit code. What the provider's SDK raised is kept as ``__cause__``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from lowtide.process import ProcessResult


_secrets: set[str] = set()
_SHORTEST_SECRET = 8


def keep_secret(value: str | None) -> None:
    """From now on no error's text has it: texts go to the ledger and to logs, and services quote the keys they refuse."""
    if value and len(value) >= _SHORTEST_SECRET:
        _secrets.add(value)


def without_secrets(text: str) -> str:
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, "***")
    return text


class LowtideError(Exception):
    """Root of the tree."""

    retryable: bool = False
    nothing_sent: bool = False
    """Set by `lowtide.providers.base.nothing_sent`: the request that failed never left this process."""

    def __init__(
        self,
        message: str = "",
        *,
        provider: str | None = None,
        sandbox_id: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(without_secrets(message))
        self.provider = provider
        self.sandbox_id = sandbox_id
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        # OSError and ExceptionGroup mix-ins format their own arguments; people want the message.
        return str(self.args[0]) if self.args else ""


class ValidationError(LowtideError, ValueError):
    """An argument is wrong. Raised before anything is created."""

    def __init__(self, message: str, *, argument: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.argument = argument


class UnsupportedError(ValidationError):
    """This provider cannot do what was asked. Raised before anything is created."""

    def __init__(
        self,
        message: str,
        *,
        feature: str | None = None,
        alternative: str | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message, **context)
        self.feature = feature
        self.alternative = alternative


class MissingDependencyError(LowtideError, ImportError):
    """An extra is not installed; ``install`` is the command that installs it."""

    def __init__(self, message: str, *, install: str | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.install = install


class AuthenticationError(LowtideError, PermissionError):
    """No key, a wrong key, or a key that may not do this."""


class LedgerError(LowtideError, OSError):
    """The ledger could not be read or written. Nothing is left because of it: what was made then was ended again."""


class SessionClosedError(LowtideError):
    """The session has ended and takes no new work."""


class SandboxError(LowtideError):
    """Something about one sandbox."""


class SandboxNotFoundError(SandboxError, LookupError):
    """No sandbox with that id."""


class SandboxGone(SandboxError):
    """It existed and has ended: ``reason`` says how (deleted, expired, exited, oom, evicted…)."""

    def __init__(self, message: str, *, reason: str = "unknown", **context: Any) -> None:
        super().__init__(message, **context)
        self.reason = reason


class SandboxOwnedError(SandboxError, PermissionError):
    """It belongs to another process, which lives or cannot be seen from here. ``take=True`` takes it all the same."""


class SandboxFailedError(SandboxError):
    """The sandbox could not be started; ``reason`` is the provider's word for it."""

    def __init__(self, message: str, *, reason: str = "unknown", **context: Any) -> None:
        super().__init__(message, **context)
        self.reason = reason


class SandboxUnavailableError(SandboxError, ConnectionError):
    """The provider, or the way to it, failed."""

    retryable = True


class RateLimitError(SandboxUnavailableError):
    """The provider asked to slow down."""

    def __init__(self, message: str, *, retry_after_seconds: float | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.retry_after_seconds = retry_after_seconds


class ResourceExhaustedError(SandboxError):
    """A quota, the disk or the memory is used up."""


class SandboxTimeoutError(SandboxError, TimeoutError):
    """Something took longer than allowed."""


class RequestTimeoutError(SandboxTimeoutError):
    """The provider did not answer in time. What was asked may still have happened."""

    retryable = True


class _WithResult(SandboxError):
    def __init__(self, message: str, *, result: ProcessResult | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.result = result


class CommandTimeoutError(_WithResult, SandboxTimeoutError):
    """The command ran out of time; its whole process tree was ended, ``result`` has the output so far."""


class SandboxExecutionError(_WithResult):
    """``exec(check=True)`` ended with a non-zero exit code."""


class OutputLimitError(_WithResult):
    """The command printed more than allowed and was ended; ``result`` has the output so far."""


class SandboxFileError(SandboxError, OSError):
    """A file operation inside the sandbox failed. `errno`, `strerror` and `filename` as with any OSError."""

    _number = errno.EIO

    def __init__(
        self, message: str, *, path: str | None = None, number: int | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.path = path
        if number is not None:
            self._number = number
        self._tell()

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        # Of a copy, and of one from another process: what OSError keeps is not in the state.
        super().__setstate__(state)
        self._tell()

    def _tell(self) -> None:
        self.errno = self._number
        self.strerror = os.strerror(self._number)
        self.filename = self.path


class SandboxFileNotFoundError(SandboxFileError, FileNotFoundError):
    """No such file or directory in the sandbox."""

    _number = errno.ENOENT


class SandboxFileExistsError(SandboxFileError, FileExistsError):
    """Already exists in the sandbox."""

    _number = errno.EEXIST


class SandboxIsADirectoryError(SandboxFileError, IsADirectoryError):
    """A directory stands where a file was meant."""

    _number = errno.EISDIR


class SandboxNotADirectoryError(SandboxFileError, NotADirectoryError):
    """A file stands where a directory was meant."""

    _number = errno.ENOTDIR


class SandboxPermissionError(SandboxFileError, PermissionError):
    """The sandbox's user may not do that."""

    _number = errno.EACCES


class CleanupError(ExceptionGroup[LowtideError], LowtideError):
    """Some sandboxes could not be ended. Each is still in the ledger and will be tried again."""

    def __new__(cls, message: str, exceptions: Sequence[LowtideError]) -> Self:
        return super().__new__(cls, message, list(exceptions))

    def __init__(self, message: str, exceptions: Sequence[LowtideError]) -> None:
        self.provider = None
        self.sandbox_id = None
        self.retryable = True

    def derive(self, excs: Sequence[LowtideError], /) -> CleanupError:  # type: ignore[override]
        """The same for some of them, as ``except*`` needs it."""
        return CleanupError(self.message, excs)


__all__ = [
    name
    for name, thing in list(globals().items())
    if isinstance(thing, type) and issubclass(thing, LowtideError) and not name.startswith("_")
]
