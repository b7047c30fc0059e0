"""Attempts on process 1, on what enters a sandbox, and through either on the programs of the host."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

from tests.escape.attempt import ANSWER_SECONDS, PREAMBLE, PROVIDERS, Target, attempt


def programs() -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """The files of this machine that sandboxes are made with: mode, content, extended attributes."""
    from lowtide.providers.local import bwrap

    found = {os.path.realpath(sys.executable), bwrap.find(os.environ).path}
    return {
        path: (
            stat.S_IMODE(os.stat(path).st_mode),
            hashlib.sha256(Path(path).read_bytes()).hexdigest(),
            tuple(os.listxattr(path)),
        )
        for path in sorted(found)
    }


def changed(target: Target, code: str) -> str | None:
    """Run code that attacks programs; which file of the host is another now, or what the code says it got."""
    before = programs()
    said = target.python(code)
    if programs() != before:
        return "a program of this machine was changed"
    return said or None


@attempt("write the memory of process 1")
def memory_of_process_one(target: Target) -> str | None:
    return (
        target.python("""
for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
    if tried(os.open, "/proc/1/mem", flags) is not None:
        print("opened /proc/1/mem", flags)
""")
        or None
    )


@attempt("read what process 1 has: environment, maps, descriptors, root, stack")
def secrets_of_process_one(target: Target) -> str | None:
    return (
        target.python("""
for name in ("environ", "maps", "smaps", "auxv", "stack", "syscall", "personality", "pagemap", "io"):
    fd = tried(os.open, "/proc/1/" + name, os.O_RDONLY)
    if fd is not None and tried(os.read, fd, 100):
        print("read", name)
for name in ("root", "cwd", "exe", "ns/pid", "ns/mnt"):
    if tried(os.readlink, "/proc/1/" + name) is not None:
        print("followed", name)
for name in ("fd", "map_files"):
    for entry in tried(os.listdir, "/proc/1/" + name) or []:
        if tried(os.readlink, f"/proc/1/{name}/{entry}") is not None:
            print("followed", name, entry)
""")
        or None
    )


@attempt("trace process 1 (attach, seize), read and write it with process_vm")
def trace_process_one(target: Target) -> str | None:
    return (
        target.python("""
for name, answer in (
    ("attach", call(101, 117, 16, 1, 0, 0)),
    ("seize", call(101, 117, 0x4206, 1, 0, 0)),
    ("readv", call(310, 270, 1, 0, 0, 0, 0, 0)),
    ("writev", call(311, 271, 1, 0, 0, 0, 0, 0)),
    ("madvise", call(440, 440, 0, 0, 0, 0, 0)),
):
    if answer[0] >= 0:
        print(name)
""")
        or None
    )


@attempt("take a descriptor of process 1 with pidfd_getfd")
def descriptor_of_process_one(target: Target) -> str | None:
    return (
        target.python("""
pidfd = tried(os.pidfd_open, 1)
if pidfd is not None:
    for number in range(16):
        if call(438, 438, pidfd, number, 0)[0] >= 0:
            print("took", number)
""")
        or None
    )


@attempt("stop or kill process 1", providers=PROVIDERS)
def kill_process_one(target: Target) -> str | None:
    # Ending itself is a sandbox's right; stopping process 1 and going on is not. A main command of the user's own may be it.
    target.python("""
import signal, time
for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGSEGV, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1):
    tried(os.kill, 1, number)
""")
    state = target.python("print(open('/proc/1/stat').read().rpartition(')')[2].split()[0])")
    return "process 1 is stopped" if state in ("T", "t") else None


@attempt("chmod the program of every process there is")
def chmod_programs(target: Target) -> str | None:
    return changed(
        target,
        """
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    for mode in (0o777, 0o4777, 0o000):
        tried(os.chmod, f"/proc/{pid}/exe", mode)
tried(os.chmod, sys.executable, 0o777)
tried(os.chmod, os.path.realpath(sys.executable), 0o777)
""",
    )


@attempt("chmod the program of process 1")
def chmod_process_one(target: Target) -> str | None:
    return changed(
        target,
        """
try:
    os.chmod("/proc/1/exe", 0o700)
    print("changed the mode of process 1's program")
except OSError:
    pass
""",
    )


@attempt("set extended attributes on the program of every process there is")
def xattr_programs(target: Target) -> str | None:
    return changed(
        target,
        """
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    for name in ("user.lowtide", "security.capability", "trusted.lowtide"):
        tried(os.setxattr, f"/proc/{pid}/exe", name, b"x")
tried(os.setxattr, sys.executable, "user.lowtide", b"x")
""",
    )


@attempt("open the program of every process there is for writing, directly and through O_PATH")
def write_programs(target: Target) -> str | None:
    return changed(
        target,
        """
for pid in [p for p in os.listdir("/proc") if p.isdigit()] + ["self"]:
    exe = f"/proc/{pid}/exe"
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        fd = tried(os.open, exe, flags)
        if fd is not None:
            print("wrote", exe)
    fd = tried(os.open, exe, os.O_PATH)
    if fd is not None:
        for flags in (os.O_WRONLY, os.O_RDWR):
            if tried(os.open, f"/proc/self/fd/{fd}", flags) is not None:
                print("wrote by way of O_PATH", exe)
        tried(os.truncate, f"/proc/self/fd/{fd}", 0)
tried(os.truncate, "/proc/1/exe", 0)
""",
    )


@attempt("run /proc/self/exe as a script's interpreter (CVE-2019-5736)")
def interpreter_of_the_entering(target: Target) -> str | None:
    before = programs()
    box = target.box
    watch = """
import time
end = time.monotonic() + 3
print("up", flush=True)
while time.monotonic() < end:
    for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
        exe = f"/proc/{pid}/exe"
        for flags in (os.O_WRONLY, os.O_RDWR):
            if tried(os.open, exe, flags) is not None:
                print("opened", exe, os.readlink(exe))
        fd = tried(os.open, exe, os.O_PATH)
        if fd is not None:
            tried(os.chmod, f"/proc/self/fd/{fd}", 0o777)
            os.close(fd)
"""
    trap = "printf '#!/proc/self/exe\\n' >/root/trap; printf '#!/proc/1/exe\\n' >/root/trap1; chmod 755 /root/trap /root/trap1"
    box.exec(["sh", "-c", trap], check=True).result(ANSWER_SECONDS)
    watcher = box.exec(["python3", "-c", PREAMBLE + watch])
    next(iter(watcher.stdout))
    while watcher.poll() is None:
        for name in ("/root/trap", "/root/trap1"):
            box.exec([name, "-c", "import time; time.sleep(0.1)"], timeout_seconds=10).exception(
                ANSWER_SECONDS
            )
    said = watcher.result(ANSWER_SECONDS).stdout.strip()
    if programs() != before:
        return "a program of this machine was changed"
    return None if said == "up" else said


@attempt("look into a process while it enters: memory, program, descriptors, root")
def entering_processes(target: Target) -> str | None:
    before = programs()
    watch = """
import time
end, seen = time.monotonic() + 4, set()
print("up", flush=True)
while time.monotonic() < end:
    for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except OSError:
            continue
        for name in ("mem", "exe", "root", "cwd"):
            flags = os.O_RDWR if name == "mem" else os.O_PATH
            if b"spawner" in command and tried(os.open, f"/proc/{pid}/{name}", flags) is not None:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if b"spawner" in file.read():  # so it was not the program it has executed since
                        seen.add(name)
        tried(os.chmod, f"/proc/{pid}/exe", 0o777)
for name in sorted(seen):
    print("opened", name)
"""
    watcher = target.box.exec(["python3", "-c", PREAMBLE + watch])
    next(iter(watcher.stdout))
    while watcher.poll() is None:
        target.box.exec(["true"]).exception(ANSWER_SECONDS)
        target.box.exists("/tmp").exception(ANSWER_SECONDS)
    said = watcher.result(ANSWER_SECONDS).stdout.strip()
    if programs() != before:
        return "a program of this machine was changed"
    return None if said == "up" else said


@attempt("spoil the sealed program that other sandboxes start from")
def shared_program(target: Target) -> str | None:
    box = target.box
    box.exec(
        ["sh", "-c", "printf '#!/proc/self/exe\\n' >/root/trap; chmod 755 /root/trap"], check=True
    ).result(ANSWER_SECONDS)
    code = """
import subprocess
for _ in range(40):
    subprocess.Popen(["/root/trap"], stderr=subprocess.DEVNULL)
    for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
        for mode in (0o000, 0o600):
            if "memfd" in (tried(os.readlink, f"/proc/{pid}/exe") or ""):
                tried(os.chmod, f"/proc/{pid}/exe", mode)
"""
    target.python(code, seconds=20)
    with target.make() as other:
        process = other.exec(["echo", "fine"])
        fine = process.exception(ANSWER_SECONDS) is None and process.result().stdout == "fine\n"
    return None if fine else "another sandbox does not start any more"
