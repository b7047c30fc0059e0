"""A command in a sandbox, wired to this terminal: its output, its input, its signals, its exit code.

This stands on the provider seam and not on `Process`: bytes pass through unchanged and nothing is
collected, so a command may print for days.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from lowtide.cli import exit_codes
from lowtide.engine import engine
from lowtide.errors import CommandTimeoutError
from lowtide.providers.base import STDERR, ProcessHandle, ProcessSpec, Provider, TerminalSize

_CHUNK = 65_536
_GRACE_SECONDS = 5.0


def stream(
    provider: Provider,
    sandbox_id: str,
    spec: ProcessSpec,
    *,
    timeout_seconds: float | None = None,
) -> int:
    """Run it to its end and return its exit code. With `spec.tty` this terminal is raw meanwhile.

    Ctrl+C goes inside; a second one, when the first did not end the command, is a KeyboardInterrupt here.
    Raises CommandTimeoutError after the process tree has been ended.
    """
    running = engine()
    handle = running.run(provider.start_process(sandbox_id, spec))
    feeding = _Input(handle) if spec.stdin else None
    try:
        with (
            _raw_terminal() if spec.tty else contextlib.nullcontext(),
            _signals_inside(handle, tty=spec.tty is not None),
        ):
            if feeding:
                feeding.start()
            code = running.run(_to_the_end(handle, timeout_seconds))
            if feeding and feeding.error:
                raise feeding.error
            return code
    except BaseException:
        # Whatever happened here, the command is not left running without anyone to read it.
        with contextlib.suppress(Exception):
            running.run(handle.terminate(0.0), timeout=10)
        raise
    finally:
        if feeding:
            feeding.stop()
        with contextlib.suppress(Exception):
            running.run(handle.aclose(), timeout=5)


def terminal_size() -> TerminalSize:
    try:
        columns, rows = os.get_terminal_size(sys.stdin.fileno())
    except OSError:
        return TerminalSize()
    return TerminalSize(columns=columns or 80, rows=rows or 24)


async def _to_the_end(handle: ProcessHandle, timeout_seconds: float | None) -> int:
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            await _copy_output(handle)
            return await handle.wait()
    except TimeoutError:
        if not limit.expired():  # the provider's own
            raise
        await handle.terminate(_GRACE_SECONDS)
        raise CommandTimeoutError(
            f"the command ran longer than --timeout {timeout_seconds:g} s and was ended"
        ) from None


async def _copy_output(handle: ProcessHandle) -> None:
    loop = asyncio.get_running_loop()
    async for origin, data in handle.output():
        # A slow reader of ours must slow the command down, never the engine.
        await loop.run_in_executor(None, _write_all, 2 if origin == STDERR else 1, data)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # somebody else made our terminal non-blocking
            select.select([], [fd], [])
        except OSError as error:
            raise OSError(
                error.errno, error.strerror, f"standard {'error' if fd == 2 else 'output'}"
            ) from None


class _Input:
    """Copies our standard input inside, from a thread: a terminal cannot be read without blocking."""

    def __init__(self, handle: ProcessHandle) -> None:
        self._handle = handle
        self._wake, self._waker = os.pipe()
        self.error: OSError | None = None
        """Why our standard input could not be read. The command was ended then: it would have waited for ever."""
        self._thread = threading.Thread(target=self._copy, name="lowtide-stdin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave what has not been read yet to whoever reads our standard input next."""
        os.close(self._waker)
        if self._thread.is_alive():
            self._thread.join(2.0)

    def _copy(self) -> None:
        fd = sys.stdin.fileno()
        with contextlib.suppress(
            Exception
        ):  # the command ended or closed its input: then there is nothing to feed
            while True:
                ready, _, _ = select.select([fd, self._wake], [], [])
                if self._wake in ready:
                    return
                try:
                    data = os.read(fd, _CHUNK)
                except BlockingIOError:
                    continue
                except OSError as error:
                    self.error = OSError(error.errno, error.strerror, "standard input")
                    engine().run(self._handle.terminate(0.0))
                    return
                if not data:
                    break
                engine().run(self._handle.write_stdin(data))
            engine().run(self._handle.close_stdin())


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead is not lost
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals_inside(handle: ProcessHandle, *, tty: bool) -> Iterator[None]:
    """While the command runs, Ctrl+C is the command's; with a tty, the window's size is too."""
    interrupted = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted += 1
        if interrupted > 1:
            raise KeyboardInterrupt
        engine().submit(handle.signal(signal.SIGINT))

    def resize(number: int, frame: FrameType | None) -> None:
        engine().submit(handle.resize(terminal_size()))

    before = {}
    if (
        signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    ):  # a job in the background is not to be interrupted
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    if tty:
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def shell_exit_code(code: int) -> int:
    """What a provider reported, as a shell reports it."""
    return code if 0 <= code <= 255 else exit_codes.INFRASTRUCTURE
