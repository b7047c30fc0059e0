"""The methods of a sandbox that run something in it: programs, terminals, code."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, TypeAlias

from lowtide import validate
from lowtide.operation import Operation

if TYPE_CHECKING:
    from lowtide.code import CodeRunner
    from lowtide.held_sandbox import HeldSandbox
    from lowtide.process import Process, TerminalSession
    from lowtide.providers.base import Capability
    from lowtide.providers.optional import CodeResult
    from lowtide.sandbox_files import StrPath
    from lowtide.stream import StreamReader

    Stdin: TypeAlias = bool | bytes | str | IO[bytes] | IO[str] | Iterable[bytes] | AsyncIterable[bytes]

MAX_OUTPUT_BYTES = 256 << 20

_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash -i; exec sh -i")


class SandboxCommands:
    """What a `Sandbox` runs. Each method says what may be asked for before anything happens."""

    _life: HeldSandbox
    _code: CodeRunner | None = None

    def exec(
        self,
        command: Sequence[StrPath],
        *,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
        stdin: Stdin | None = None,
        check: bool = False,
        timeout_seconds: float | None = None,
        tty: bool = False,
        user: str | None = None,
        max_output_bytes: int | None = MAX_OUTPUT_BYTES,
        capture: bool = True,
        drain_seconds: float = 1.0,
    ) -> Process:
        """Run a program. `command` is a list and goes to no shell.

        `stdin`: True to write to ``process.stdin``, or all of the input: bytes, text, an open file, an iterable of
        bytes. `check`: a non-zero exit code raises SandboxExecutionError. `timeout_seconds`: then the whole process
        tree is ended and CommandTimeoutError has the output so far. `max_output_bytes`, for each stream: then it is
        ended with OutputLimitError; 256 MiB unless said. With ``capture=False`` nothing is kept for the result: read
        ``process.stdout`` and ``stderr``, any amount, and the command waits for you. `drain_seconds`: how long
        output is still read after its end while something it started holds the streams; then ``streams_open`` of
        the result is true. A program that does not exist ends with exit code 127.
        """
        from lowtide.process import Process
        from lowtide.providers.base import ProcessSpec, TerminalSize

        argv = validate.argv("command", command)
        for name, value in (("check", check), ("tty", tty), ("capture", capture)):
            validate.flag(name, value)
        given: AsyncIterable[bytes] | None = None
        if stdin is not None and not isinstance(stdin, bool):
            from lowtide import source

            given = source.stdin_of(stdin)
        spec = ProcessSpec(
            argv=argv,
            cwd=validate.absolute_path("cwd", cwd) if cwd is not None else None,
            environment=validate.environment("env", env) if env is not None else {},
            user=validate.text("user", user) if user is not None else None,
            stdin=given is not None or stdin is True,
            tty=TerminalSize() if tty else None,
            drain_seconds=validate.grace("drain_seconds", drain_seconds),
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
            capture=capture,
        )

    def stream_logs(self, *, follow: bool = False, tail_lines: int | None = None) -> StreamReader[str]:
        """What its main process has printed, in chunks; with `follow` on to its end. Where the provider keeps it."""
        from lowtide import logs

        validate.flag("follow", follow)
        if tail_lines is not None:
            validate.positive("tail_lines", tail_lines)
        return logs.stream(self._life, follow=follow, tail_lines=tail_lines)

    def shell(
        self,
        command: Sequence[StrPath] | None = None,
        *,
        width: int | None = None,
        height: int | None = None,
        cwd: StrPath | None = None,
        env: Mapping[str, str] | None = None,
    ) -> TerminalSession:
        """A program on a terminal: bash, or sh where there is none, unless `command` says another."""
        from lowtide.process import TerminalSession
        from lowtide.providers.base import ProcessSpec, TerminalSize

        self._require("TTY", "shell")
        argv = _SHELL if command is None else validate.argv("command", command)
        columns = 80 if width is None else validate.cells("width", width)
        rows = 24 if height is None else validate.cells("height", height)
        spec = ProcessSpec(
            argv=argv,
            cwd=validate.absolute_path("cwd", cwd) if cwd is not None else None,
            environment={"TERM": "xterm-256color", **validate.environment("env", {} if env is None else env)},
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
        """Run code in an interpreter that keeps its state between calls of one `context`.

        On every provider. Python comes with rich results where the image has ipykernel, and else with
        text and the last expression's value; bash and javascript where the image has them.
        UnsupportedError says what to install. CommandTimeoutError after `timeout_seconds`. Cancelling it interrupts the
        code; its context stays.
        """
        from lowtide.code import CodeRunner

        validate.content("code", code)
        validate.text("language", language)
        if context is not None:
            validate.text("context", context)
        timeout_seconds = validate.seconds_or_none("timeout_seconds", timeout_seconds)
        self._life.connect()
        if self._code is None:
            self._code = CodeRunner(self._life)
        run = self._code.run(code, language=language, context=context, timeout_seconds=timeout_seconds)
        return Operation.start(run)

    def _require(self, capability: str, argument: str) -> None:
        from lowtide import capabilities
        from lowtide.providers.base import Capability

        wanted: Capability = Capability[capability]
        capabilities.require(self._life.connect(), wanted, argument, self._life.settings.isolation)
