"""The directory of one sandbox: what it is, which processes are it, whether it lives. No process is needed to read it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.errors import SandboxUnavailableError
from lowtide.providers.base import SandboxInfo, SandboxState

_EXITING = 0x4  # PF_EXITING: it runs no code of its own any more
_THREADS = 17  # of the fields after the name: how many there are
_STARTS_SECONDS = 1.0
_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process, never confused with a later one of the same number."""

    pid: int
    start_time: int

    @classmethod
    def child_of(cls, parent: ProcessMark, pid: int) -> ProcessMark | None:
        """The process of this number; None when it is gone, whoever has the number by now."""
        fields = _stat(pid)
        if fields is None or int(fields[1]) != parent.pid or not parent.alive():
            return None
        return cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return start_time(self.pid) == self.start_time

    def left(self) -> bool:
        """Whether it lives or is still ending: as process 1 of a sandbox it ends after all the others."""
        fields = _stat(self.pid, ending=True)
        return fields is not None and int(fields[19]) == self.start_time

    def open(self) -> int | None:
        """A descriptor of exactly this process, or None when it is gone.

        SandboxUnavailableError where that cannot be told: what could not be looked at is not dead.
        """
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            raise _cannot_look(error) from error
        try:
            if start_time(self.pid) == self.start_time:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None


@dataclass(frozen=True, slots=True)
class SandboxDirectory:
    """`LOWTIDE_HOME/local/sandboxes/<sandbox id>`."""

    path: Path

    @property
    def sandbox_id(self) -> str:
        return self.path.name

    def exists(self) -> bool:
        return os.path.lexists(self.path)

    def spec(self) -> dict[str, Any] | None:
        """What was asked for, or None when there is no such sandbox (or it is only being made)."""
        try:
            loaded = json.loads((self.path / "spec.json").read_bytes())
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None

    def processes(self) -> tuple[ProcessMark | None, ProcessMark | None]:
        """The outer and the inner bwrap, as far as they are known."""
        try:
            fd = os.open(f"{self.path}/pid", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None, None
        except OSError as error:
            raise _cannot_look(error) from error
        try:
            text = os.read(fd, 256).decode("ascii", "replace")
        finally:
            os.close(fd)
        marks: list[ProcessMark | None] = []
        for line in text.splitlines():
            pid, _, start = line.partition(" ")
            if pid.isdigit() and start.isdigit():
                marks.append(ProcessMark(int(pid), int(start)))
        marks += [None, None]
        return marks[0], marks[1]

    def add_inner(self, mark: ProcessMark) -> None:
        """Write the inner bwrap down. The outer one has written itself down before it ran."""
        fd = os.open(self.path / "pid", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d %d\n" % (mark.pid, mark.start_time))
        finally:
            os.close(fd)

    def proxy(self) -> ProcessMark | None:
        """The process that serves its network, where it has an allow-list."""
        try:
            pid, _, start = Path(self.path, "proxy").read_text().strip().partition(" ")
        except OSError:
            return None
        return ProcessMark(int(pid), int(start)) if pid.isdigit() and start.isdigit() else None

    def set_proxy(self, mark: ProcessMark) -> None:
        Path(self.path, "proxy").write_text(f"{mark.pid} {mark.start_time}\n")

    def paused(self) -> bool:
        return os.path.exists(f"{self.path}/paused")

    def set_paused(self, yes: bool, *, frozen: bool = False) -> None:
        """`frozen`: by the freezer and not by signals."""
        if yes:
            self._write("paused", "frozen" if frozen else "")
            self._wait_for_starts()
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}/paused")

    def _wait_for_starts(self) -> None:
        """Until every command starter that has not seen the record has made the process of its command.

        It holds a lock on this directory for that long. A process that takes longer to begin its program
        exists already, and the pause finds it.
        """
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until = time.monotonic() + _STARTS_SECONDS
            while time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.001)
        finally:
            os.close(folder)

    def frozen(self) -> bool:
        """Whether it is paused by the freezer."""
        return self._read("paused") == "frozen"

    def freezer(self) -> str | None:
        """The control group that its processes are frozen in, from its first pause on."""
        return self._read("freezer") or None

    def set_freezer(self, path: str | None) -> None:
        self._write("freezer", path or "")

    def _read(self, name: str) -> str | None:
        try:
            with open(f"{self.path}/{name}") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _write(self, name: str, text: str) -> None:
        """One small record, as a whole."""
        draft = f"{self.path}/.{name}"
        with open(draft, "w") as file:
            file.write(text)
        os.rename(draft, f"{self.path}/{name}")

    def exit_code(self) -> int | None:
        """What the main process ended with, when it ended by itself."""
        try:
            lines = (self.path / "status").read_text().splitlines()
        except OSError:
            return None
        for line in reversed(lines):
            try:
                code = json.loads(line).get("exit-code")
            except (ValueError, AttributeError):
                continue
            if isinstance(code, int):
                return code
        return None

    def _ended(self) -> str | None:
        """Why the spawner has ended it, where it has."""
        try:
            return (self.path / "ended").read_text()
        except OSError:
            return None

    def alive(self, spec: dict[str, Any]) -> bool:
        """Until both bwraps have ended.

        The outer one ends right after the inner one, when it has written down what that ended with. Where it
        is killed (a lifetime that is over), the inner one, and all in the sandbox with it, still dies.
        """
        return spec.get("boot_id") == boot_id() and any(mark and mark.left() for mark in self.processes())

    def info(self) -> SandboxInfo | None:
        spec = self.spec()
        if spec is None:
            return None
        expires = spec.get("expires_at")
        state, code, reason = SandboxState.PAUSED if self.paused() else SandboxState.RUNNING, None, None
        if not self.alive(spec):
            code = self.exit_code()
            outer, _ = self.processes()
            age = time.time() - spec.get("created_at", 0.0)
            if outer is None and code is None and age < 10 and spec.get("boot_id") == boot_id():
                state = SandboxState.PENDING
            elif spec.get("boot_id") != boot_id():
                state, reason = SandboxState.FAILED, "the machine was restarted"
            elif code == 0:
                state, reason = SandboxState.COMPLETED, "its main process ended"
            elif expires is not None and time.time() >= expires - 0.5 and code is None:
                state, reason = SandboxState.FAILED, "its lifetime is over"
            else:
                state = SandboxState.FAILED
                reason = f"its main process ended with {code}" if code is not None else "it was killed"
                reason = self._ended() or ("out of memory" if _out_of_memory(spec) else reason)
        return SandboxInfo(
            sandbox_id=self.sandbox_id,
            state=state,
            labels=spec.get("labels", {}),
            created_at=_moment(spec.get("created_at")),
            expires_at=_moment(expires),
            exit_code=code,
            reason=reason,
            unheld=tuple(spec.get("unheld", ())),
        )


def valid_id(sandbox_id: str) -> bool:
    """Ids are file names here: nothing that leads elsewhere."""
    return 0 < len(sandbox_id) <= 128 and set(sandbox_id) <= _NAME_LETTERS and not sandbox_id.startswith(".")


def sandbox_directories(sandboxes: Path) -> Iterator[SandboxDirectory]:
    try:
        names = sorted(os.listdir(sandboxes))
    except FileNotFoundError:
        return
    for name in names:
        if valid_id(name):
            yield SandboxDirectory(sandboxes / name)


def start_time(pid: int) -> int | None:
    """Clock ticks since boot, or None when the process is gone or only its end is left."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int, *, ending: bool = False) -> list[bytes] | None:
    """The fields of its stat file after the name, for a process that lives (or is ending).

    Only "no such process" is None: short of descriptors, say, every process would look dead, and its
    sandbox would lose its directory and run on.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise _cannot_look(error) from error
    if not fields:
        return None
    # With its first thread gone a process is shown as a zombie while its other threads run on.
    over = fields[0] in (b"Z", b"X") or (not ending and int(fields[6]) & _EXITING)
    if over and int(fields[_THREADS]) <= 1:
        return None
    return fields


def _cannot_look(error: OSError) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"whether its processes live cannot be told now: {error.strerror}", provider="local", retryable=True
    )


@cache
def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _out_of_memory(spec: dict[str, Any]) -> bool:
    from lowtide.providers.local import cgroups

    return cgroups.out_of_memory(spec.get("cgroups", []))
