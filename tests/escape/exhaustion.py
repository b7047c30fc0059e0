"""Attempts to use up what a sandbox shares with this machine, and with its owner."""

from __future__ import annotations

import os
import pty

from lowtide.errors import SandboxFileError
from lowtide.trees.remove import remove_tree
from tests.escape.attempt import Target, attempt


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
