"""This machine: which one it is, since which boot, and where lowtide keeps its state on it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shlex
import socket
import struct
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowtide.errors import LedgerError

log = logging.getLogger("lowtide")


def home(environ: Mapping[str, str] | None = None) -> Path:
    """``LOWTIDE_HOME``, else the XDG state directory. Made on first use, readable by its owner alone.

    Raises LedgerError for one that another user owns or can write: credentials pass through it.
    """
    path = state_directory(environ)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LedgerError(
            f"cannot make the state directory {path}: {error.strerror}; "
            "set LOWTIDE_HOME to a directory you can write"
        ) from error
    _check_ownership(path)
    return path


def state_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The path of the state directory, always absolute. Creates nothing.

    A leading ``~`` is expanded in both variables: it comes from files (`.env`, unit files) that no shell reads.
    A relative ``LOWTIDE_HOME`` counts from the working directory that the process had when it was first used: a
    program that changes its directory has one home all the same. A relative ``XDG_STATE_HOME`` is ignored, as the XDG
    specification asks, with a warning.
    """
    environ = os.environ if environ is None else environ
    if chosen := environ.get("LOWTIDE_HOME"):
        return _absolute(os.path.expanduser(chosen))
    state = os.path.expanduser(environ.get("XDG_STATE_HOME") or "")
    if state and not os.path.isabs(state):
        _ignored_state_home(state)
        state = ""
    return Path(os.path.abspath(state or os.path.expanduser("~/.local/state"))) / "lowtide"


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(path)) if os.path.isabs(path) else _resolved_once(path)


@cache
def _resolved_once(path: str) -> Path:
    return Path(os.path.abspath(path))


@cache
def _ignored_state_home(state: str) -> None:
    """Warn, once per process and value."""
    log.warning(
        "XDG_STATE_HOME=%s is not an absolute path and is ignored (XDG base directory specification): lowtide uses "
        "~/.local/state. Set an absolute path, or LOWTIDE_HOME",
        state,
    )


def _check_ownership(path: Path) -> None:
    me = os.geteuid()
    found = os.stat(path)
    if found.st_uid != me:
        raise LedgerError(
            f"the state directory {path} belongs to {_user(found.st_uid)}, and this is {_user(me)}; "
            "set LOWTIDE_HOME to a directory of your own (with sudo: sudo env LOWTIDE_HOME=/root/lowtide ...)"
        )
    if found.st_mode & 0o022:
        raise LedgerError(
            f"other users can write the state directory {path}; run: chmod go-w {shlex.quote(str(path))}"
        )
    for name in _OURS:
        try:
            owner = os.lstat(path / name).st_uid
        except FileNotFoundError:
            continue
        if owner != me:
            raise LedgerError(
                f"{path / name} belongs to {_user(owner)}, left by a run as that user; "
                f"run: sudo chown -R {me} {shlex.quote(str(path))}"
            )


_OURS = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "guardian.log")


def _user(uid: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


@cache
def this_host() -> str:
    """The machine's name, for people. What tells machines apart is `machine_id`."""
    return socket.gethostname()


@cache
def machine_id() -> str:
    """The same for as long as this installation of a system lives, whatever it is called.

    A hash: the number itself is not to be shown around (machine-id(5)).
    """
    number = machine_number()
    if not number:
        return f"name {socket.gethostname()}"
    return hashlib.sha256(f"lowtide {number}".encode()).hexdigest()[:16]


@cache
def machine_number() -> str:
    """The number systemd and D-Bus gave this installation, or nothing."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError), open(path) as file:
            written = file.read().strip()
            if len(written) == 32:  # else it is empty, or not set up yet
                return written
    return ""


UNKNOWN_BOOT = "unknown"


@cache
def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return UNKNOWN_BOOT


# Another boot is over, or is another machine's: images with a baked-in machine-id make two machines look like one that was
# restarted. So every process that owns something holds a shared lock on a file of its boot in the state directory; the
# kernel, or the file server, frees it when the last of them is gone.

_BOOT_LOCK_SECONDS = 1.0
_held_boot: dict[Path, int] = {}


def boot_lock_name(boot: str) -> str:
    return f"boot-{hashlib.sha256(f'{machine_id()} {boot}'.encode()).hexdigest()[:12]}.lock"


def hold_boot(directory: Path) -> None:
    """Hold, for as long as this process lives, the lock that shows other machines that this boot is not over.

    Does nothing if it is held already, or if the filesystem has no locks: then there is no evidence.
    """
    path = directory / boot_lock_name(boot_id())
    if path in _held_boot and _is_file(_held_boot[path], path):
        return
    _held_boot.pop(
        path, None
    )  # not closed: the program may have closed it, and its number may be another file's now
    deadline = time.monotonic() + _BOOT_LOCK_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # looked at by another machine, for a moment
                os.close(fd)
                time.sleep(0.01)
                continue
            except OSError:
                os.close(fd)
                raise
            if _is_file(fd, path):
                _held_boot[path] = fd
                return
            os.close(fd)  # removed as the lock of a boot that was over


def boot_is_over(boot: str, directory: Path) -> bool | None:
    """Whether no process of that earlier boot is left. None if there is no evidence."""
    free = _is_free(directory / boot_lock_name(boot))
    return free if not free or locks_are_shared(directory) else None


def _is_free(path: Path, *, remove: bool = False) -> bool | None:
    """Whether the lock on that file is free; None if that is not known."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            path.unlink(missing_ok=True)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on that file, as far as that is known."""
    return _is_free(path) is False


def remove_ended_boots(directory: Path, needed: Collection[str]) -> None:
    """Remove the locks of boots that are over, but for those `needed` as evidence."""
    keep = {boot_lock_name(boot) for boot in {*needed, boot_id()}}
    for path in directory.glob("boot-*.lock"):
        if path.name not in keep:
            _is_free(path, remove=True)


def locks_are_shared(directory: Path, mounts: str | None = None) -> bool:
    """Whether a lock on a file there is seen by every machine that has the filesystem: a free one is no evidence else."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return False
    where, kind, options = "", "", ""
    resolved = os.path.realpath(directory)
    for line in mounts.splitlines():
        mount, _, filesystem = line.partition(" - ")
        words = mount.split()
        point = (
            re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), words[4]) if len(words) > 4 else ""
        )
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= len(where):  # what is mounted later lies on top
            where, (kind, _, options) = point, filesystem.partition(" ")
    if kind.startswith("nfs"):
        return not {"nolock", "local_lock=all", "local_lock=flock"} & set(options.replace(",", " ").split())
    return bool(kind) and not kind.startswith(_OWN_LOCKS)


_OWN_LOCKS = ("fuse", "9p", "virtiofs", "cifs", "smb3", "vboxsf", "vmhgfs", "prl_fs", "afs", "gofer")
"""Filesystems that may keep the locks of each machine to itself."""


def _is_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


@cache
def namespace() -> str:
    """Where process numbers and start times mean what they mean here: the pid and the time namespace."""
    names = []
    for kind in ("pid", "time"):
        try:
            names.append(str(os.stat(f"/proc/self/ns/{kind}").st_ino))
        except OSError:
            names.append("?")
    return "/".join(names)


# A process stays in its own; a forked child may be in another, and have its parent's number there.
os.register_at_fork(after_in_child=namespace.cache_clear)


def reach() -> str:
    """What a process started from here sees and may do: user and mount namespace, root directory, and what root is left.

    Root in a user namespace of its own, or in a service without CAP_KILL or with read-only control groups, has the same
    number as any other root and cannot end what that one has started. Of capabilities it is the bounding set that an
    exec leaves as it is. The thread's own: a thread that starts a process hands down what it has.
    """
    try:
        thread, top = "/proc/thread-self", os.stat("/")
        namespaces = [str(os.stat(f"{thread}/ns/{kind}").st_ino) for kind in ("user", "mnt")]
        with open(f"{thread}/status", "rb") as file:
            bounding = next((line.split()[1].decode() for line in file if line.startswith(b"CapBnd:")), "?")
    except OSError:
        return "?"
    limits = bounding if os.geteuid() == 0 else ""
    return " ".join([*namespaces, f"{top.st_dev}:{top.st_ino}", limits])


def network_namespace() -> str:
    """Where this process's connections go out: a guardian in another one may not reach the same services."""
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return "?"


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """What of a process is the same for as long as it runs the same program."""

    start_time: int
    """0 where this process does not know its own."""
    image: str
    """Where the kernel placed the program: another place after every exec, except where address randomisation is
    disabled. Empty where it is not shown."""
    random: str = ""
    """A digest of the random bytes that the kernel gave the program at its exec (AT_RANDOM). Empty where this process
    may not read them: they are in the other one's memory, which Yama's ptrace_scope, among others, protects."""


def running_process(pid: int) -> RunningProcess | None:
    """The process of that number in this pid namespace; None when there surely is none that runs.

    Raises OSError where that cannot be told: descriptors are short, /proc hides it or is another namespace's.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it is there, and another user's
    except OverflowError as error:  # of a damaged row: that proves nothing
        raise OSError(errno.EINVAL, "there is no such number") from error
    if not _proc_is_ours():
        raise OSError(errno.ENOENT, "/proc shows another pid namespace")
    try:
        return _read_process(f"/proc/{pid}")
    except (FileNotFoundError, ProcessLookupError):
        pass
    try:  # it has ended between both looks, or /proc does not show the processes of other users
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    raise OSError(errno.EACCES, "/proc does not show it")


def this_process() -> RunningProcess:
    """Its start time is 0 where it cannot be read, or where what is read is not what other processes see.

    QEMU's user mode shows each process a made-up /proc/self/stat (fewer fields than the kernel's, another start time).
    """
    try:
        return _read_process("/proc/self", own=True) or RunningProcess(0, "")
    except OSError:
        return RunningProcess(0, "")


def _proc_is_ours() -> bool:
    return os.readlink("/proc/self") == str(os.getpid())


_STAT_FIELDS = 50
"""That follow the name in /proc/PID/stat, since Linux 3.5."""


def _read_process(path: str, *, own: bool = False) -> RunningProcess | None:
    with open(f"{path}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    if own and len(fields) < _STAT_FIELDS:
        return RunningProcess(0, "")
    # A first thread that has ended while others run looks like a process that has.
    if fields[0] in (b"Z", b"X") and int(fields[17]) <= 1:
        return None
    image = random = ""
    if len(fields) > 44 and fields[25] != b"0":  # hidden where we may not look into it
        placed = b" ".join((fields[23], fields[25], fields[44]))  # start of code, stack and heap
        image = hashlib.sha256(placed).hexdigest()[:12]
        if given := _random_bytes(path):
            # A digest: the bytes themselves are the process's stack protector.
            random = hashlib.sha256(b"lowtide" + given).hexdigest()[:12]
    return RunningProcess(int(fields[19]), image, random)


_AT_NULL, _AT_RANDOM = 0, 25


def _random_bytes(path: str) -> bytes:
    """The 16 bytes that the kernel gives every program it starts; none where this process may not read them."""
    word = struct.Struct("@L")
    try:
        with open(f"{path}/auxv", "rb") as file:
            vector = file.read()
        entries = [number for (number,) in word.iter_unpack(vector[: len(vector) // word.size * word.size])]
        for kind, value in zip(entries[::2], entries[1::2], strict=False):
            if kind == _AT_NULL:
                break
            if kind == _AT_RANDOM:
                with open(f"{path}/mem", "rb", buffering=0) as memory:
                    found = os.pread(memory.fileno(), 16, value)
                return found if len(found) == 16 else b""
    except (OSError, OverflowError, struct.error):
        pass
    return b""
