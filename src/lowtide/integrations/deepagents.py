"""LangChain deepagents: a lowtide sandbox as the backend of a deep agent. Needs the extra ``lowtide[deepagents]``.

agent = create_deep_agent(model=..., backend=LowtideBackend(provider="e2b"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from lowtide import errors
from lowtide.integrations.blocking import finished
from lowtide.sandbox import Sandbox

if TYPE_CHECKING:
    from typing import Unpack

    from lowtide.defaults import SandboxOptions
    from lowtide.lifecycle.lease import EndReport
    from lowtide.operation import Operation
    from lowtide.process import Process, ProcessResult

TIMEOUT_SECONDS = 30 * 60
OUTPUT_BYTES = 16 << 20
TIMED_OUT = 124


class LowtideBackend(BaseSandbox):
    """One sandbox, made by its first use; `options` are the keywords of `lowtide.Sandbox`.

    It ends with this process, with `stop()`, or with its ``with`` block. (`delete(path)` is a file operation.)
    """

    def __init__(self, sandbox: Sandbox | None = None, **options: Unpack[SandboxOptions]) -> None:
        self.sandbox = sandbox if sandbox is not None else Sandbox(**options)

    @property
    def id(self) -> str:
        """The sandbox's id, which makes it if nobody has yet."""
        if self.sandbox.sandbox_id is None:
            self.sandbox.start().result()
        return str(self.sandbox.sandbox_id)

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """A line for sh; stdout and stderr in one. 0 is no time limit; 124 says that it ran out."""
        try:
            return _response(finished(self._start(command, timeout)))
        except (errors.CommandTimeoutError, errors.OutputLimitError) as error:
            return _cut_off(error)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """The same, without a thread."""
        try:
            return _response(await self._start(command, timeout))
        except (errors.CommandTimeoutError, errors.OutputLimitError) as error:
            return _cut_off(error)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Each with an answer of its own."""
        started = [(path, self._write(path, data)) for path, data in files]
        return [FileUploadResponse(path=path, error=_outcome(writing)[1]) for path, writing in started]

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        started = [(path, self._write(path, data)) for path, data in files]
        return [
            FileUploadResponse(path=path, error=(await _awaited(writing))[1]) for path, writing in started
        ]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Each with an answer of its own."""
        started = [(path, self._read(path)) for path in paths]
        return [_downloaded(path, *_outcome(reading)) for path, reading in started]

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        started = [(path, self._read(path)) for path in paths]
        return [_downloaded(path, *(await _awaited(reading))) for path, reading in started]

    def stop(self, *, keep: bool = False) -> Operation[EndReport]:
        """End it, or keep it for its ``keep_for_seconds``. Any number of times."""
        return self.sandbox.stop(keep=keep)

    def __enter__(self) -> Self:
        self.sandbox.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.sandbox.__exit__(*failure)

    async def __aenter__(self) -> Self:
        await self.sandbox.__aenter__()
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self.sandbox.__aexit__(*failure)

    def _start(self, command: str, timeout: int | None) -> Process:
        limit = TIMEOUT_SECONDS if timeout is None else timeout
        # Redirected inside the shell, so that both streams come in the order they were written in.
        argv = ["sh", "-c", f"exec 2>&1\n{command}"]
        return self.sandbox.exec(argv, timeout_seconds=limit or None, max_output_bytes=OUTPUT_BYTES)

    def _write(self, path: str, data: bytes) -> Operation[None] | str:
        return self.sandbox.write_file(path, data) if _is_path(path) else "invalid_path"

    def _read(self, path: str) -> Operation[bytes] | str:
        return self.sandbox.read_file(path) if _is_path(path) else "invalid_path"


def _is_path(path: str) -> bool:
    return path.startswith("/") and "\0" not in path


def _response(done: ProcessResult) -> ExecuteResponse:
    return ExecuteResponse(output=done.stdout + done.stderr, exit_code=done.returncode, truncated=False)


def _cut_off(error: errors.CommandTimeoutError | errors.OutputLimitError) -> ExecuteResponse:
    so_far = error.result.stdout if error.result is not None else ""
    timed_out = isinstance(error, errors.CommandTimeoutError)
    code = TIMED_OUT if timed_out else error.result.returncode if error.result is not None else None
    return ExecuteResponse(output=f"{so_far}\n[{error}]", exit_code=code, truncated=not timed_out)


def _outcome(operation: Operation[Any] | str) -> tuple[Any, str | None]:
    if isinstance(operation, str):
        return None, operation
    try:
        return operation.result(), None
    except Exception as error:
        return None, _code(error)


async def _awaited(operation: Operation[Any] | str) -> tuple[Any, str | None]:
    if isinstance(operation, str):
        return None, operation
    try:
        return await operation, None
    except Exception as error:
        return None, _code(error)


def _downloaded(path: str, content: bytes | None, error: str | None) -> FileDownloadResponse:
    return FileDownloadResponse(path=path, content=content, error=error)


def _code(error: Exception) -> str:
    """The protocol's word for it, or our own."""
    match error:
        case FileNotFoundError():
            return "file_not_found"
        case IsADirectoryError():
            return "is_directory"
        case errors.SandboxPermissionError():
            return "permission_denied"
        case NotADirectoryError() | errors.ValidationError():
            return "invalid_path"
    return f"{type(error).__name__}: {error}"
