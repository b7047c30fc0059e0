"""What providers that go through a vendor's SDK have in common: options, the way there, deadlines, errors.

Each keeps to itself what its SDK calls things and what its service's answers mean.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from lowtide import errors

T = TypeVar("T")

WAY = (
    *("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("https_proxy", "http_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The way to the service. SDKs read these themselves; the guardian's worker needs them to go the same way."""


def chosen(
    provider: str, known: Mapping[str, str], options: Mapping[str, Any] | None, environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Every known option: as given, else from its environment variable. ValidationError for a wrong one."""
    given = dict(options or {})
    for name, value in given.items():
        if name not in known:
            raise errors.ValidationError(
                f"unknown option {name!r} for {provider}; known: {', '.join(sorted(known))}",
                argument=name,
                provider=provider,
            )
        if value is not None and not (isinstance(value, str) and value):
            raise errors.ValidationError(f"{name} must be a string", argument=name, provider=provider)
    found = {name: given.get(name) or environ.get(variable) or None for name, variable in known.items()}
    for name, value in found.items():
        # Refused here, because what cannot be sent is quoted by those who are to send it: keys, too.
        if value is not None and not (value.isascii() and value.isprintable()):
            where = name if given.get(name) else known[name]
            raise errors.ValidationError(
                f"{where} has a character that cannot be sent (a line end, perhaps, from the file it was read from): "
                "set it without",
                argument=name,
                provider=provider,
            )
    return found


def account(provider: str, where: str, who: str) -> str:
    """A stable name for an account. A key is long and random, so nothing follows from a short digest of it."""
    return hashlib.sha256(f"lowtide {provider}|{where}|{who}".encode()).hexdigest()[:16]


def missing_dependency(provider: str, sdk: str) -> errors.MissingDependencyError:
    install = f'pip install "lowtide[{provider}]"'
    return errors.MissingDependencyError(
        f"provider {provider!r} needs {sdk}; run: {install}", install=install, provider=provider
    )


async def within(
    seconds: float,
    work: asyncio.Future[T],
    what: str,
    *,
    service: str,
    provider: str,
    sandbox_id: str | None = None,
) -> T:
    """The result of `work`, or RequestTimeoutError after `seconds`, even when `work` ignores being cancelled.

    An outer deadline around every call of an SDK: their own are retried, doubled, or do not hold.
    """
    try:
        done, _ = await asyncio.wait({work}, timeout=seconds)
    except asyncio.CancelledError:
        let_go(work)
        raise
    if not done:
        let_go(work)
        raise errors.RequestTimeoutError(
            f"{service} did not answer within {seconds:g} s: {what}", provider=provider, sandbox_id=sandbox_id
        )
    failure = failure_of(work)
    if failure is not None:
        raise failure
    return work.result()


def failure_of(work: asyncio.Future[Any]) -> BaseException | None:
    """Why it failed. A transport that cancels itself when its connection breaks has not cancelled us."""
    if work.cancelled():
        return ConnectionResetError("the connection was given up")
    return work.exception()


def let_go(work: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; what it still says is not news."""
    work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    work.cancel()


class Translate(Protocol):
    def __call__(
        self, error: BaseException, sandbox_id: str | None = None, *, path: str | None = None
    ) -> errors.LowtideError | None:
        """The lowtide error for something the SDK raised; None for what is not the SDK's."""


class Mapped(Protocol):
    def __call__(
        self, sandbox_id: str | None = None, *, path: str | None = None
    ) -> AbstractContextManager[None]: ...


def mapped_by(translated: Translate) -> Mapped:
    """A context manager that turns what happens inside into `lowtide.errors`, with the original as the cause."""

    @contextmanager
    def mapped(sandbox_id: str | None = None, *, path: str | None = None) -> Iterator[None]:
        try:
            yield
        except errors.LowtideError as error:
            error.sandbox_id = error.sandbox_id or sandbox_id
            raise
        except Exception as error:
            found = translated(error, sandbox_id, path=path)
            if found is None:
                raise
            raise found from error

    return mapped


_FILE_ERRORS: tuple[tuple[str, type[errors.SandboxFileError]], ...] = (
    ("permission denied", errors.SandboxPermissionError),
    ("operation not permitted", errors.SandboxPermissionError),
    ("read-only file system", errors.SandboxPermissionError),
    ("access denied", errors.SandboxPermissionError),
    ("is a directory", errors.SandboxIsADirectoryError),
    ("not a directory", errors.SandboxNotADirectoryError),
    ("path is a file", errors.SandboxNotADirectoryError),
    ("no such file", errors.SandboxFileNotFoundError),
    ("file not found", errors.SandboxFileNotFoundError),
    ("does not exist", errors.SandboxFileNotFoundError),
    ("already exists", errors.SandboxFileExistsError),
)


def file_error(text: str, path: str, context: Mapping[str, Any]) -> errors.LowtideError | None:
    """What a service says of a file, as the error people expect; None where its words are of something else."""
    lowered = text.lower()
    if "no space left" in lowered or "quota" in lowered:
        return errors.ResourceExhaustedError(f"{path}: {text}", **context)
    for words, kind in _FILE_ERRORS:
        if words in lowered:
            return kind(f"{path}: {words}", path=path, **context)
    return None


class Counted:
    """Chunks on their way to a service, after what was `begun` already, and what became of them."""

    def __init__(self, chunks: AsyncIterable[bytes], begun: bytes = b"") -> None:
        self._chunks, self._begun = chunks, begun
        self.bytes = 0
        self.moved = 0
        self.error: BaseException | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._begun:
            self.moved, self.bytes = 1, len(self._begun)
            yield self._begun
        try:
            async for chunk in self._chunks:
                self.moved += 1
                self.bytes += len(chunk)
                yield bytes(chunk)
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise
