"""One attempt to get out, the list of all, and what an attempt is given to work with.

An attempt is a function that takes a `Target` and answers with what it got, or with None when nothing. It raises
`LeftOut` where it cannot be tried. A new one is a function with the decorator `attempt` in a module of this
package that `everything` names.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide import Process, Sandbox

ANSWER_SECONDS = 120.0
PROVIDERS = ("local", "docker", "kubernetes")
GVISOR = "local, gvisor"
"""The local provider with isolation="gvisor": what is tried on local applies to it, but for NOT_GVISOR."""
NOT_GVISOR = (
    # gVisor lets root stop its process 1 and read its environment: that breaks or forges the sandbox for its owner, who
    # destroys it (docs/security.md).
    "kill_process_one",
    "secrets_of_process_one",
    # It answers system calls itself: a namespace, an inotify instance or a semaphore in there is none of this machine's.
    "tests.escape.system_calls",
    "inotify_instances",
    "raise_counters",
    "message_queues",
    "shared_memory",
    "semaphores",
    "file_locks",
    "keys",
    "pending_signals",
    "descriptors_in_flight",
    "lock_on_a_device",
    # Looked for on this machine, which does not see gVisor's processes, their limits and signals.
    "outlive_ignoring",
    "outlive_by_stopping_the_group",
    "outlive_by_process_one",
    "outlive_a_timeout",
    "outlive_a_timeout_in_another_session",
    "outlive_the_end",
    "run_on_while_paused_by_a_timer",  # a paused gVisor answers no file call that could tell
    "ignored_signals",
    "nice_value",
    "umask",
    "limits",
    "out_of_memory_score",
    "set_user_id_in_a_snapshot",
    "tests.escape.allow_list",  # refused with it
)
MODULES = (
    "process_one",
    "system_calls",
    "ways_out",
    "leaks",
    "beside_python",
    "lifetime",
    "images",
    "exhaustion",
    "counters",
    "allow_list",
    "gvisor",
)

_list: list[Attempt] = []

# What hostile code finds defined: a system call by its x86-64 or aarch64 number, and writing without an exception.
PREAMBLE = """
import ctypes, errno, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(x86_64, aarch64, *arguments):
    '''(result, errno name or None)'''
    number = x86_64 if platform.machine() == "x86_64" else aarch64
    ctypes.set_errno(0)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    return result, (errno.errorcode.get(ctypes.get_errno()) if result < 0 else None)

def tried(work, *arguments):
    '''What it returned, or None when the kernel said no.'''
    try:
        return work(*arguments)
    except OSError:
        return None
"""


class LeftOut(Exception):
    """This attempt cannot be made here; the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    about: str
    """One line: what is tried."""
    providers: tuple[str, ...]
    work: Callable[[Target], str | None]

    @property
    def name(self) -> str:
        return self.work.__name__

    def applies(self, target: str) -> bool:
        """To a provider, or to `GVISOR`."""
        if target == GVISOR:
            return target in self.providers or (
                "local" in self.providers and not {self.name, self.work.__module__} & set(NOT_GVISOR)
            )
        return target in self.providers


def attempt(
    about: str, *, providers: tuple[str, ...] = ("local",)
) -> Callable[[Callable[[Target], str | None]], Callable[[Target], str | None]]:
    """Put a function on the list."""

    def add(work: Callable[[Target], str | None]) -> Callable[[Target], str | None]:
        _list.append(Attempt(about=about, providers=providers, work=work))
        return work

    return add


def everything() -> list[Attempt]:
    for module in MODULES:
        importlib.import_module(f"tests.escape.{module}")
    return list(_list)


class Target:
    """Sandboxes of one provider to be attacked, and a directory of this machine that must stay as it is."""

    def __init__(self, provider: str, image: str | None = None) -> None:
        self.provider, self._image = provider, image
        self._isolation = "gvisor" if provider == GVISOR else None
        self.root = os.geteuid() == 0
        self._ends = contextlib.ExitStack()
        self._box: Sandbox | None = None

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *details: object) -> None:
        self._ends.close()

    @property
    def box(self) -> Sandbox:
        """One sandbox that all attempts share; one that was broken is replaced."""
        if self._box is None or self._box.exec(["true"]).exception(ANSWER_SECONDS) is not None:
            self._box = self._ends.enter_context(self.make())
        return self._box

    def make(self, *command: str, **keywords: Any) -> Sandbox:
        """A sandbox of its own for one attempt. The caller ends it, with `with`."""
        if self._image is not None:
            keywords.setdefault("container_image", self._image)
        if self._isolation is not None:
            return Sandbox.run(*command, provider="local", isolation="gvisor", **keywords)
        return Sandbox.run(*command, provider=self.provider, **keywords)

    def directory(self) -> Path:
        """A directory on this machine, gone at the end."""
        return Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="escape-")))

    def start(self, code: str, *, box: Sandbox, seconds: float) -> Process:
        """Run hostile code inside, and do not wait for it."""
        return box.exec(["python3", "-c", PREAMBLE + code], timeout_seconds=seconds)

    def python(
        self, code: str, *arguments: str, box: Sandbox | None = None, seconds: float = 60.0, **keywords: Any
    ) -> str:
        """Run hostile code inside; what it printed, "" when it was ended."""
        process = (box or self.box).exec(
            ["python3", "-c", PREAMBLE + code, *arguments], timeout_seconds=seconds, **keywords
        )
        if process.exception(ANSWER_SECONDS) is not None:
            return ""
        result = process.result(ANSWER_SECONDS)
        if result.returncode > 0 and "Traceback" in result.stderr:
            raise RuntimeError(f"the attempt itself is broken: {result.stderr[-2000:]}")
        return result.stdout.strip()
