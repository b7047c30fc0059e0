"""Process: the handle of a running command: streams, standard input, signals, exit code."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

from lowtide import validate
from lowtide.errors import SandboxExecutionError
from lowtide.operation import Operation
from lowtide.process_driver import GRACE_SECONDS, MAX_OUTPUT_BYTES, Command, Place
from lowtide.process_driver import ProcessResult as ProcessResult
from lowtide.stream import StreamReader, StreamWriter

if TYPE_CHECKING:
    from lowtide.providers.base import ProcessSpec


class Process(Operation[ProcessResult]):
    """A running command. Its result is a `ProcessResult`; cancelling it ends its whole process tree."""

    def __init__(
        self,
        place: Place,
        spec: ProcessSpec,
        *,
        stdin: AsyncIterable[bytes] | None = None,
        check: bool = False,
        timeout_seconds: float | None = None,
        max_output_bytes: int | None = MAX_OUTPUT_BYTES,
        capture: bool = True,
    ) -> None:
        from lowtide.engine import engine

        heard = self._heard_by()
        self.stdout: StreamReader[str] = StreamReader(text=True, on_raise=heard)
        self.stderr: StreamReader[str] = StreamReader(text=True, on_raise=heard)
        self._run = Command(
            place,
            spec,
            readers=(self.stdout, self.stderr),
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            max_output_bytes=max_output_bytes,
            capture=capture,
        )
        self.stdin: StreamWriter | None = None
        if spec.stdin and stdin is None:
            self.stdin = StreamWriter(self._run.write_stdin, self._run.close_stdin)
        super().__init__(engine().submit(self._finish(check)))

    @property
    def command(self) -> tuple[str, ...]:
        """What was run."""
        return self._run.spec.argv

    @property
    def returncode(self) -> int | None:
        """The exit code (128 + n for signal n), or None while it runs."""
        return self._run.returncode

    @property
    def pid(self) -> int | None:
        """Its process id inside the sandbox, where the provider tells it."""
        return self._run.pid

    def poll(self) -> int | None:
        """`returncode`, for those used to subprocess."""
        return self._run.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Non-zero is no error here, also with ``check=True``."""
        try:
            return self.result(timeout).returncode
        except SandboxExecutionError as error:
            if error.result is None:
                raise
            return error.result.returncode

    def send_signal(self, number: int) -> Operation[None]:
        """To the command's process group. Silent when it has already ended."""
        return Operation.start(self._run.signal(validate.signal_number("number", number)))

    def terminate(self, grace_seconds: float = GRACE_SECONDS) -> Operation[None]:
        """End the whole process tree: TERM, grace, KILL. The result still comes, with the exit code."""
        return Operation.start(self._run.terminate(validate.grace("grace_seconds", grace_seconds)))

    def kill(self) -> Operation[None]:
        """End the whole process tree at once."""
        return Operation.start(self._run.terminate(0.0))

    def resize(self, width: int, height: int) -> Operation[None]:
        """The terminal's new size, for a command started with ``tty=True``."""
        return _resized(self._run, width, height)

    async def _finish(self, check: bool) -> ProcessResult:
        result = await self._run.drive()
        if check and result.returncode != 0:
            said = result.stderr_bytes[-2000:].decode("utf-8", "replace").strip()
            shown = f": {said}" if said else ""
            raise SandboxExecutionError(
                f"{self.command[0]} ended with exit code {result.returncode}{shown}",
                result=result,
                **self._run.context,
            )
        return result


class TerminalSession(Operation[ProcessResult]):
    """A command on a terminal: what it shows comes out as bytes, nothing is kept for the result."""

    def __init__(self, place: Place, spec: ProcessSpec) -> None:
        from lowtide.engine import engine

        self.output: StreamReader[bytes] = StreamReader(text=False, on_raise=self._heard_by())
        self._run = Command(place, spec, readers=(self.output, self.output), capture=False)
        self.stdin = StreamWriter(self._run.write_stdin, self._run.close_stdin)
        super().__init__(engine().submit(self._run.drive()))

    @property
    def command(self) -> tuple[str, ...]:
        """What was run."""
        return self._run.spec.argv

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._run.returncode

    def resize(self, width: int, height: int) -> Operation[None]:
        """The terminal's new size."""
        return _resized(self._run, width, height)

    def send_signal(self, number: int) -> Operation[None]:
        """To the command's process group. Silent when it has already ended."""
        return Operation.start(self._run.signal(validate.signal_number("number", number)))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        return self.result(timeout).returncode


def _resized(run: Command, width: int, height: int) -> Operation[None]:
    return Operation.start(run.resize(validate.cells("width", width), validate.cells("height", height)))
