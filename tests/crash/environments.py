"""The machines people really have: places for a case of the matrix to run in, and how a case is written.

A case is a test with the fixture `world`, as everywhere in this directory. It goes into a file per environment,
``test_environment_WHAT.py``; the table shows the group as ``environment WHAT``. What the file needs:

* **A program.** A scenario of `actor.py` by its name, or the program itself, in the words of that module
  (`say`, `make`, `OPTIONS`, `PROVIDER`, `COUNT`, `wait_to_be_struck`, and all it imports)::

      actor = world.start_program('''
          boxes = make()
          say("READY")
          ...
      ''', 3)

* **A place**, as the `within` of `World.start` and `World.start_program`; places can be added up with ``+``::

      world.start("hold", 2, within=few_descriptors(48))
      world.start("hold", 2, within=pid_namespace())          # its init stays when the owner is killed
      world.start("hold", 2, within=container("elsewhere"))   # that, and a hostname of its own
      world.start("hold", 2, within=processor_bound(0))

  `Actor.kill()` and `Actor.signal()` reach the program itself, whatever it was started through;
  `Actor.end_place()` takes its whole pid namespace away, as `docker kill` does.

* **A disk** for the world's home: the fixture `disk`, a file system of its own, with `fill()` and `free()`.

* **A clock**: the fixture `clock`, whose `environ` goes into `World.start(..., **clock.environ)`. `clock.step(-100)`
  moves the wall clock of all processes started with it, their guardian among them; the monotonic clocks go on.

* **The guardian**: `world.guardian()` is its pid as soon as it answers, `world.kill_guardian()`, `world.log()`.

* **The account** at the end: `world.wait_until_clean()`, and the fixture `peer` for a neighbour that must not notice.

`local` and `faulty` play every case; mark it `faulty` if only that service can play it, `everywhere` if every
provider has to. A case that ends a living owner's sandbox, or leaves one, has to fail on the code before the fix: try it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

Place = tuple[str, ...]
"""The words in front of a command that put it into its environment."""


def few_descriptors(count: int) -> Place:
    """At most `count` open files per process, for the program and for all it starts: the guardian, too."""
    return ("prlimit", f"--nofile={count}:{count}", "--")


def processor_bound(number: int) -> Place:
    return ("taskset", "-c", str(number))


def pid_namespace(*, init: bool = True) -> Place:
    """A pid namespace of its own, with its own /proc, on the same files and under the same name of the machine.

    With `init` a shell is process 1, so that the program can be killed alone and what it started lives on,
    as in most containers. Without, the program itself is process 1 and takes everything with it.
    """
    return (*_unshare(), *(_INIT if init else ()))


def container(hostname: str) -> Place:
    """As a container sees it: a pid namespace and a hostname of its own. The files are the same."""
    return (*_unshare("--uts"), "sh", "-c", 'hostname "$0" && "$@"', hostname)


_INIT = ("sh", "-c", '"$@"; exit $?', "init")


def _unshare(*more: str) -> Place:
    words = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", *more]
    if os.geteuid() != 0:
        words += ["--user", "--map-root-user"]
    if subprocess.run([*words, "true"], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("this machine lets nobody make a pid namespace")
    return tuple(words)


class Disk:
    """A small file system of its own, to be filled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """To the last byte. What is written before still fits; nothing new does."""
        with open(self.path / "filling", "ab", buffering=0) as file:
            for size in (1 << 20, 4096, 512, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        with pytest.raises(OSError) as caught:  # a case on a disk that takes everything would prove nothing
            (self.path / "probe").write_bytes(b"\0" * 8192)
        assert caught.value.errno == errno.ENOSPC
        (self.path / "probe").unlink(missing_ok=True)

    def free(self) -> None:
        (self.path / "filling").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(path: Path, megabytes: int = 4) -> Iterator[Disk]:
    """`path` (an empty directory) becomes a disk of a few megabytes. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a disk that fills up")
    options = f"size={megabytes}m,mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "lowtide-crash", str(path)], check=True)
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.free()
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _library(directory: Path, name: str) -> Path:
    """A small library of this directory, to be preloaded."""
    library = directory / f"{name}.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler: {name} is a small library")
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    return library


def another_boot(directory: Path) -> dict[str, str]:
    """The environment of processes that see another boot of this machine: of one with the same machine-id, or earlier."""
    boot = directory / "boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    return {"LD_PRELOAD": str(_library(directory, "another_boot")), "ANOTHER_BOOT": str(boot)}


class Clock:
    """A wall clock for some processes, that can be stepped while they run."""

    def __init__(self, directory: Path) -> None:
        library = _library(directory, "wall_clock")
        self._step = directory / "clock"
        self.step(0)
        self.environ = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._step)}

    def step(self, seconds: int) -> None:
        """The wall clock is now this far from the true one."""
        if not self._step.exists():
            self._step.write_bytes(bytes(8))
        with open(self._step, "r+b", buffering=0) as file:  # in place: the processes have it mapped
            file.write(struct.pack("=q", seconds))
