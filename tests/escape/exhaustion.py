"""Attempts to use up what a sandbox shares with this machine, and with its owner."""

from __future__ import annotations

import os
import pty
import time
import tracemalloc
from pathlib import Path

from lowtide.errors import SandboxFileError
from lowtide.testing.conformance.base import eventually
from lowtide.trees.remove import remove_tree
from tests.escape.attempt import ANSWER_SECONDS, Target, attempt


@attempt("use up the inotify instances of the user")
def inotify_instances(target: Target) -> str | None:
    made = target.python("""
made = 0
while made < 5000 and libc.inotify_init() >= 0:
    made += 1
print(made)
""")
    return None if int(made) <= 32 else f"made {made} instances"


@attempt("use up this machine's terminals")
def terminals(target: Target) -> str | None:
    target.python("""
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
while len(held) < 20000:
    fd = tried(os.open, "/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    if fd is None:
        break
    held.append(fd)
""")
    try:
        for fd in pty.openpty():
            os.close(fd)
    except OSError as error:
        return f"no terminal is left on this machine: {error}"
    return None


@attempt("raise a limit of the sandbox's own user namespace")
def raise_counters(target: Target) -> str | None:
    return (
        target.python("""
for name in os.listdir("/proc/sys/user"):
    fd = tried(os.open, "/proc/sys/user/" + name, os.O_WRONLY)
    if fd is not None and tried(os.write, fd, b"1000000") is not None:
        print("raised", name)
""")
        or None
    )


@attempt("fill the owner's memory with a sparse file")
def sparse_file(target: Target) -> str | None:
    target.box.exec(["truncate", "-s", "1T", "/root/huge"], check=True).result()
    try:
        return f"{len(target.box.read_file('/root/huge').result())} bytes were read"
    except SandboxFileError:
        return None


@attempt("fill the owner's disk with the holes of a file")
def holes(target: Target) -> str | None:
    size = "1T" if target.provider == "local" else "512M"  # through a channel holes travel as zeros
    target.box.exec(["truncate", "-s", size, "/root/huge"], check=True).result()
    place = target.directory() / "huge"
    target.box.download("/root/huge", place).result()
    blocks = place.stat().st_blocks
    return None if blocks < 1000 else f"{blocks} blocks were written"


@attempt("end the owner's calls with a tree that is too deep for them")
def deep_tree(target: Target) -> str | None:
    target.python("""
os.mkdir("/root/deep")
os.chdir("/root/deep")
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
""")
    place = target.directory() / "deep"
    try:
        target.box.download("/root/deep", place).result()
        target.box.remove("/root/deep", recursive=True).result()
    except SandboxFileError:
        if target.provider == "local":  # elsewhere the program inside says that it is too deep
            raise
    finally:
        remove_tree(place)
    return None


@attempt("fill the owner's disk with a file without end", providers=("local", "docker", "kubernetes"))
def file_without_end(target: Target) -> str | None:
    """A link to a file of /proc that reports no size, under a name that promises another."""
    place = target.directory()
    link = "rm -f /tmp/results.csv; ln -s /proc/$$/pagemap /tmp/results.csv; exec sleep 1000"
    with target.make() as box:
        running = box.exec(["sh", "-c", link])
        eventually(lambda: box.exists("/tmp/results.csv").result(ANSWER_SECONDS))
        downloading = box.download("/tmp/results.csv", place / "results.csv")
        until = time.monotonic() + ANSWER_SECONDS
        try:
            while not downloading.done() and time.monotonic() < until:
                written = sum(path.stat().st_size for path in _files(place))
                if written > 256 << 20:
                    return f"{written >> 20} MiB were written"
                time.sleep(0.01)
            if not isinstance(downloading.exception(1), SandboxFileError):
                return "it was downloaded"
            return "something is left of it" if _files(place) else None
        finally:
            downloading.cancel()
            running.cancel()


def _files(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.exists()]


@attempt("fill the owner's memory with a result that grows when it is parsed", providers=("local", "docker"))
def result_that_grows(target: Target) -> str | None:
    """36 MiB of empty lists are 940 MiB of them in a parser. Code inside can speak for the interpreter that runs it."""
    forged = (
        "import os, time\n"
        "with open(f'/proc/{os.getppid()}/fd/1', 'wb') as out:\n"
        "    out.write(b'[' + b'[],' * (12 << 20) + b'[]]\\n')\n"
        "time.sleep(60)"
    )
    # A Python without ipykernel, whose holder of the streams is the parent of what runs the code.
    with target.make(environment_variables={"PATH": "/usr/bin:/bin"}) as box:
        tracemalloc.start()
        try:
            box.run_code(forged).exception(ANSWER_SECONDS)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    return f"it took {most >> 20} MiB" if most > 256 << 20 else None
