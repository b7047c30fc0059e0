"""Sandbox: one isolated machine-like place, as people hold it, in sync and in async code."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lowtide import validate
from lowtide.defaults import SandboxDefaults, SandboxOptions, resolve
from lowtide.errors import LowtideError, RequestTimeoutError, SandboxError
from lowtide.operation import Operation, generation

if TYPE_CHECKING:
    from datetime import datetime
    from types import TracebackType
    from typing import Unpack

    from lowtide.files import Transfer
    from lowtide.lifecycle.lease import EndReport, Lease, Owner
    from lowtide.process import Process, TerminalSession
    from lowtide.providers.base import (
        Capability,
        CodeResult,
        FileEntry,
        Provider,
        SandboxInfo,
        SandboxState,
        Url,
    )
    from lowtide.session import Session
    from lowtide.stream import StreamReader

T = TypeVar("T")

MAX_OUTPUT_BYTES = 256 << 20


class Sandbox:
    """A place to run commands in. `Sandbox.run()` starts one; leaving its ``with`` block ends it.

    ``Sandbox(...)`` is an unstarted handle that starts on ``with``, ``await``, `start` or its first
    use. The keywords are those of `SandboxDefaults`, plus ``defaults`` for a set of them. A sandbox is
    ended when its owner ends, whether or not it was used as a context manager.
    """

    def __init__(self, **options: Unpack[SandboxOptions]) -> None:
        self._begin(resolve(None, options))

    def _begin(
        self,
        settings: SandboxDefaults,
        *,
        provider: Provider | None = None,
        info: SandboxInfo | None = None,
        lease: Lease | None = None,
    ) -> None:
        from lowtide import capabilities
        from lowtide.lifeline import Lifeline

        if info is None:
            capabilities.check(settings)
        self._life = Lifeline(settings, provider=provider, info=info, lease=lease)
        self._born = generation()

    @classmethod
    def _attached(cls, provider: Provider, info: SandboxInfo, lease: Lease | None) -> Self:
        """A handle to one that exists, whoever made it."""
        from lowtide.providers.base import Labels

        labels = Labels.from_dict(info.labels)
        tags = labels.tags if labels else lease.tags if lease else ()
        sandbox = cls.__new__(cls)
        sandbox._begin(SandboxDefaults(tags=tags), provider=provider, info=info, lease=lease)
        return sandbox

    # Making and finding.

    @classmethod
    def run(cls, *argv: str, **options: Unpack[SandboxOptions]) -> Self:
        """Start a sandbox; a command and its arguments, if given, become its main process.

        In sync code it returns when the provider has accepted it. Inside a running event loop it
        returns at once, and ``async with``, ``await`` or the first call waits.
        """
        if argv:
            words = validate.argv("command", argv)
            options["command"], options["args"] = words[0], words[1:]
        sandbox = cls(**options)
        try:
            starting = sandbox.start()
            if not in_event_loop():
                starting.result()
        except Exception:
            raise
        except BaseException:  # Ctrl+C: nobody will ever hold this handle
            sandbox.stop()
            raise
        return sandbox

    @classmethod
    def list(
        cls,
        *,
        tags: Sequence[str] | None = None,
        provider: str | Provider | None = None,
        status: str | SandboxState | None = None,
        show_terminated: bool = False,
    ) -> Operation[builtins.list[Self]]:
        """Every sandbox with all of these tags, whichever process made it.

        Without `provider`: the default one and those that the ledger has open leases with. Those that
        have ended are left out unless `show_terminated` or a terminal `status` asks for them.
        """
        from lowtide import finding

        wanted = finding.query(tags=tags, provider=provider, status=status, show_terminated=show_terminated)
        return Operation.start(finding.find_all(wanted, cls._attached))

    @classmethod
    def from_id(cls, sandbox_id: str, *, provider: str | Provider | None = None) -> Operation[Self]:
        """A handle to the sandbox with that id. SandboxNotFoundError when there is none."""
        from lowtide import finding

        validate.text("sandbox_id", sandbox_id)
        return Operation.start(finding.find_one(sandbox_id, finding.chosen(provider), cls._attached))

    @classmethod
    def delete(
        cls, sandbox_id: str, *, missing_ok: bool = False, provider: str | Provider | None = None
    ) -> Operation[None]:
        """End the sandbox with that id, whoever made it and whether or not it is kept.

        SandboxNotFoundError when there is none, unless `missing_ok`.
        """
        from lowtide import finding

        validate.text("sandbox_id", sandbox_id)
        return Operation.start(finding.delete(sandbox_id, finding.chosen(provider), missing_ok))

    @classmethod
    def session(cls, defaults: SandboxDefaults | Mapping[str, Any] | None = None, **options: Any) -> Session:
        """A `Session`: sandboxes with shared defaults and one end."""
        from lowtide.session import Session

        return Session(defaults, **options)

    # What it is.

    @property
    def sandbox_id(self) -> str | None:
        """The provider's id, or None until it has been accepted."""
        return self._life.sandbox_id

    @property
    def lease_id(self) -> str | None:
        return self._life.lease.lease_id if self._life.lease is not None else None

    @property
    def provider(self) -> str:
        return self._life.provider_name

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._life.settings.tags)

    @property
    def status(self) -> SandboxState | None:
        """What was last heard; None for an unstarted handle. `get_status` asks."""
        from lowtide.lifecycle.lease import Outcome
        from lowtide.providers.base import SandboxState

        report, info = self._life.report, self._life.info
        if report is not None and report.outcome is not Outcome.KEPT:
            return SandboxState.GONE
        if info is not None:
            return info.state
        return SandboxState.PENDING if self._life.begun else None

    @property
    def returncode(self) -> int | None:
        """The exit code of its main process, once that has ended."""
        return self._life.info.exit_code if self._life.info is not None else None

    @property
    def created_at(self) -> datetime | None:
        info, lease = self._life.info, self._life.lease
        if info is not None and info.created_at is not None:
            return info.created_at
        return _moment(lease.created_at) if lease is not None else None

    @property
    def expires_at(self) -> datetime | None:
        """The hard end the provider was told, where there is one; it may be renewed."""
        info, lease = self._life.info, self._life.lease
        if info is not None and info.expires_at is not None:
            return info.expires_at
        return _moment(lease.expires_at) if lease is not None else None

    @property
    def kept_until(self) -> datetime | None:
        return _moment(self._life.lease.kept_until) if self._life.lease is not None else None

    @property
    def owner(self) -> Owner | None:
        """The process it ends with, where the ledger knows it. ``owner.alive()`` says whether that lives."""
        return self._life.lease.owner if self._life.lease is not None else None

    def get_status(self) -> SandboxState:
        """Ask the provider. Blocks; in async code use ``await sandbox.refresh()``."""
        return self.refresh().result()

    def refresh(self) -> Operation[SandboxState]:
        """Ask the provider what it is now."""
        return Operation.start(self._life.refresh())

    # Starting, waiting, ending.

    def start(self) -> Operation[None]:
        """Start it, if it is not yet. Done when the provider has accepted it."""
        self._life.connect()
        return Operation.start(self._life.accepted())

    def wait(self, timeout: float | None = None) -> Self:
        """Block until commands can run. SandboxTimeoutError after `timeout` seconds; it goes on starting."""
        self._operation().result(timeout)
        return self

    def wait_until_complete(
        self, timeout: float | None = None, *, raise_on_termination: bool = True
    ) -> Operation[Self]:
        """Wait until its main process, or the sandbox itself, has ended.

        SandboxGone when it was ended from outside, unless `raise_on_termination` is false.
        """
        from lowtide import finding

        self._life.connect()
        complete = finding.until_complete(self._life, timeout, raise_on_termination)
        return Operation.start(_then(complete, self))

    def stop(
        self,
        *,
        snapshot_on_stop: bool = False,
        graceful_shutdown_seconds: float = 10.0,
        missing_ok: bool = False,
    ) -> Operation[EndReport]:
        """End it and everything it holds; the report says what happened.

        Any number of times, from any thread. One that is already gone is no error (`missing_ok` is
        accepted for those used to it). When it cannot be ended the error is raised, the lease stays in
        the ledger and is tried again; so may you.
        """
        if snapshot_on_stop and self._life.begun:
            self._require("SNAPSHOT", "snapshot_on_stop")
        return Operation.start(self._stop(graceful_shutdown_seconds, snapshot_on_stop))

    async def _stop(self, grace_seconds: float, snapshot_on_stop: bool) -> EndReport:
        report = await self._life.end(grace_seconds=grace_seconds, snapshot_on_stop=snapshot_on_stop)
        failure = could_not_end(report)
        if failure is not None:
            raise failure
        return report

    # Running.

    def exec(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool | bytes | str = False,
        check: bool = False,
        timeout_seconds: float | None = None,
        tty: bool = False,
        user: str | None = None,
        max_output_bytes: int | None = MAX_OUTPUT_BYTES,
    ) -> Process:
        """Run a program. `command` is a list and goes to no shell.

        `stdin`: True to write to ``process.stdin``, or all of the input. `check`: a non-zero exit code
        raises SandboxExecutionError. `timeout_seconds`: then the whole process tree is ended and
        CommandTimeoutError has the output so far. `max_output_bytes`, for each stream: then it is
        ended with OutputLimitError. A program that does not exist ends with exit code 127.
        """
        from lowtide.process import Process
        from lowtide.providers.base import ProcessSpec, TerminalSize

        argv = validate.argv("command", command)
        given: bytes | None = None
        if isinstance(stdin, str | bytes | bytearray):
            given = stdin.encode() if isinstance(stdin, str) else bytes(stdin)
        elif not isinstance(stdin, bool):
            raise validate.wrong("stdin", f"must be a bool, bytes or a string, not {type(stdin).__name__}")
        spec = ProcessSpec(
            argv=argv,
            cwd=validate.absolute_path("cwd", cwd) if cwd is not None else None,
            environment=validate.environment("env", env) if env else {},
            user=validate.text("user", user) if user is not None else None,
            stdin=stdin is not False,
            tty=TerminalSize() if tty else None,
        )
        if timeout_seconds is not None:
            timeout_seconds = validate.seconds("timeout_seconds", timeout_seconds)
        if max_output_bytes is not None:
            validate.positive("max_output_bytes", max_output_bytes)
        if spec.stdin:
            self._require("STDIN", "stdin")
        if tty:
            self._require("TTY", "tty")
        if user is not None:
            self._require("USER", "user")
        return Process(
            self._life.ready,
            spec,
            stdin=given,
            check=check,
            timeout_seconds=timeout_seconds,
            max_output_bytes=max_output_bytes,
        )

    def shell(
        self,
        command: Sequence[str] | None = None,
        *,
        width: int | None = None,
        height: int | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> TerminalSession:
        """A program on a terminal: bash, or sh where there is none, unless `command` says another."""
        from lowtide.process import TerminalSession
        from lowtide.providers.base import ProcessSpec, TerminalSize

        self._require("TTY", "shell")
        argv = _SHELL if command is None else validate.argv("command", command)
        columns = 80 if width is None else validate.positive("width", width)
        rows = 24 if height is None else validate.positive("height", height)
        spec = ProcessSpec(
            argv=argv,
            cwd=validate.absolute_path("cwd", cwd) if cwd is not None else None,
            environment={"TERM": "xterm-256color", **validate.environment("env", env or {})},
            stdin=True,
            tty=TerminalSize(columns=columns, rows=rows),
        )
        return TerminalSession(self._life.ready, spec)

    def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        context: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Operation[CodeResult]:
        """Run code in an interpreter that keeps its state between calls."""
        self._require("CODE", "run_code")
        return self._call(
            lambda provider, sandbox_id: provider.run_code(  # type: ignore[attr-defined]
                sandbox_id, code, language=language, context=context, timeout_seconds=timeout_seconds
            )
        )

    # Snapshots, pause, ports.

    def snapshot(self, name: str | None = None) -> Operation[str]:
        """Save its files. The id it returns is what ``Sandbox.run(snapshot=...)`` takes."""
        from lowtide.lifecycle.lease import new_lease_id

        self._require("SNAPSHOT", "snapshot")
        label = f"snap-{new_lease_id()}" if name is None else validate.tags("name", [name])[0]
        return self._call(lambda provider, sandbox_id: provider.snapshot(sandbox_id, label))  # type: ignore[attr-defined]

    def pause(self) -> Operation[None]:
        self._require("PAUSE", "pause")
        return self._call(lambda provider, sandbox_id: provider.pause(sandbox_id))  # type: ignore[attr-defined]

    def resume(self) -> Operation[None]:
        self._require("PAUSE", "resume")
        return self._call(lambda provider, sandbox_id: provider.resume(sandbox_id))  # type: ignore[attr-defined]

    def url(self, port: int) -> Operation[Url]:
        """An address, and the headers it needs, under which `port` of the sandbox is reached from here."""
        validate.port("port", port)
        self._require("PORTS", "url")
        return self._call(lambda provider, sandbox_id: provider.url(sandbox_id, port))  # type: ignore[attr-defined]

    # Files. Paths are absolute, or relative to the working directory.

    def read_file(self, path: str, *, timeout_seconds: float | None = None) -> Operation[bytes]:
        """The whole file. SandboxFileNotFoundError and its family."""
        from lowtide import files

        return self._file_call(path, files.read, timeout_seconds)

    def write_file(
        self, path: str, data: bytes | str, *, mode: int | None = None, timeout_seconds: float | None = None
    ) -> Operation[None]:
        """Replace the file, making parent directories."""
        from lowtide import files

        content = validate.content("data", data)
        return self._file_call(
            path, lambda p, i, where: files.write(p, i, where, content, mode), timeout_seconds
        )

    def read_file_streaming(self, path: str) -> StreamReader[bytes]:
        """The file in chunks, whatever its size. Closing the reader ends the transfer."""
        from lowtide import files

        validate.text("path", path)
        return files.reader(self._life, path)

    def write_file_streaming(
        self,
        path: str,
        data: bytes | Iterable[bytes] | AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> Operation[int]:
        """Write chunks as they come; returns the number of bytes. An iterable is read in a worker thread."""
        from lowtide import files

        chunks = files.chunks_of(data)
        return self._file_call(path, lambda p, i, where: files.write_chunks(p, i, where, chunks, size, mode))

    def upload(self, local: str | os.PathLike[str], remote: str) -> Operation[Transfer]:
        """Copy a file, or a whole directory, into the sandbox; the size is verified.

        A directory's content becomes the content of `remote`.
        """
        from lowtide import files

        source = files.local_source(local)
        return self._file_call(
            remote, lambda p, i, where: files.upload(p, i, source, where), argument="remote"
        )

    def download(self, remote: str, local: str | os.PathLike[str]) -> Operation[Transfer]:
        """Copy a file, or a whole directory, out of the sandbox; the size is verified.

        What a directory holds is not trusted: links that lead out of it, devices and the like are
        left out, and named in ``Transfer.skipped``.
        """
        from lowtide import files

        target = os.path.abspath(local)
        return self._file_call(
            remote, lambda p, i, where: files.download(p, i, where, target), argument="remote"
        )

    def list_dir(self, path: str = ".") -> Operation[Sequence[FileEntry]]:
        """What a directory holds, sorted by name; links are not followed."""
        from lowtide import files

        return self._file_call(path, files.list_dir)

    def make_dir(self, path: str) -> Operation[None]:
        """With parents; silent when it is already a directory."""
        from lowtide import files

        return self._file_call(path, files.make_dir)

    def remove(self, path: str, *, recursive: bool = False) -> Operation[None]:
        """A file, a link or an empty directory; with `recursive`, whatever it is and holds."""
        from lowtide import files

        return self._file_call(path, lambda p, i, where: files.remove(p, i, where, recursive))

    def exists(self, path: str) -> Operation[bool]:
        from lowtide import files

        return self._file_call(path, files.exists)

    def stat(self, path: str) -> Operation[FileEntry]:
        """A link is described itself, not what it points to."""
        from lowtide import files

        return self._file_call(path, files.stat)

    # Both kinds of ``with``.

    def __enter__(self) -> Self:
        try:
            self.start().result()
        except Exception:
            raise
        except BaseException:  # Ctrl+C: __exit__ will not be called
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._born != generation():
            return  # a forked child leaves its parent's block; the sandbox is the parent's
        ending = Operation.start(self._life.end(failed=is_failure(error)))
        try:
            failure: Exception | None = could_not_end(ending.result())
        except Exception as problem:
            failure = problem
        report_failure(failure, error)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except Exception:
            raise
        except BaseException:  # cancelled: __aexit__ will not be called
            self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        if self._born != generation():
            return
        ending = Operation.start(self._life.end(failed=is_failure(error)))
        try:
            # Shielded: whoever cancels this block does not want to leave the sandbox behind.
            failure: Exception | None = could_not_end(await asyncio.shield(ending))
        except Exception as problem:
            failure = problem
        report_failure(failure, error)

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until commands can run."""
        return _then(self._operation(), self).__await__()

    def __repr__(self) -> str:
        status = self.status
        return f"<Sandbox {self.sandbox_id or 'unstarted'} provider={self.provider} status={status and status.value}>"

    # Plumbing.

    def _operation(self) -> Operation[Any]:
        self._life.connect()
        return Operation.start(self._life.ready())

    def _call(
        self, work: Callable[[Provider, str], Awaitable[T]], timeout_seconds: float | None = None
    ) -> Operation[T]:
        self._life.connect()
        return Operation.start(self._run_there(work, timeout_seconds))

    async def _run_there(
        self, work: Callable[[Provider, str], Awaitable[T]], timeout_seconds: float | None
    ) -> T:
        import asyncio

        provider, sandbox_id = await self._life.ready()
        if timeout_seconds is None:
            return await work(provider, sandbox_id)
        try:
            return await asyncio.wait_for(work(provider, sandbox_id), timeout_seconds)
        except TimeoutError as error:
            if isinstance(error, LowtideError):
                raise
            raise RequestTimeoutError(
                f"not done after {timeout_seconds} seconds", provider=provider.name, sandbox_id=sandbox_id
            ) from error

    def _file_call(
        self,
        path: str,
        work: Callable[[Provider, str, str], Awaitable[T]],
        timeout_seconds: float | None = None,
        *,
        argument: str = "path",
    ) -> Operation[T]:
        from lowtide import files

        validate.text(argument, path)

        async def there(provider: Provider, sandbox_id: str) -> T:
            return await work(
                provider, sandbox_id, await files.absolute(self._life, provider, sandbox_id, path)
            )

        return self._call(there, timeout_seconds)

    def _require(self, capability: str, argument: str) -> None:
        from lowtide import capabilities
        from lowtide.providers.base import Capability

        wanted: Capability = Capability[capability]
        capabilities.require(self._life.connect(), wanted, argument)


_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i")


def is_failure(error: BaseException | None) -> bool:
    """Whether a block that was left this way failed, as ``keep="on-failure"`` means it."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return error is not None and not isinstance(error, GeneratorExit)


def could_not_end(report: EndReport) -> LowtideError | None:
    """The error to raise for a report that says so."""
    from lowtide.lifecycle.lease import Outcome

    if report.outcome is not Outcome.FAILED:
        return None
    if isinstance(report.error, LowtideError):
        return report.error
    failure = SandboxError(
        f"sandbox {report.sandbox_id} could not be ended: {report.why or report.error}; it stays in the ledger "
        "and is tried again",
        provider=report.provider,
        sandbox_id=report.sandbox_id,
        retryable=True,
    )
    failure.__cause__ = report.error
    return failure


def report_failure(failure: Exception | None, error: BaseException | None) -> None:
    """Raise what went wrong at the end of a block, but never in place of what went wrong inside it."""
    if failure is None:
        return
    if error is None:
        raise failure
    error.add_note(f"lowtide: and at the end of the block: {type(failure).__name__}: {failure}")


def in_event_loop() -> bool:
    """Whether the caller must not be blocked."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


async def _then(work: Awaitable[Any], value: T) -> T:
    await work
    return value


def _moment(seconds: float | None) -> datetime | None:
    from datetime import UTC, datetime

    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
