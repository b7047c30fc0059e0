"""Set-up: takes the configuration and, as root, stages the host's trees where sandboxes can use them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct

from .config import config
from .kernel import (
    AT_EMPTY_PATH,
    NEWNS,
    NEWUSER,
    PR_SET_DUMPABLE,
    SYS_MOUNT_SETATTR,
    SYS_MOVE_MOUNT,
    SYS_OPEN_TREE,
    check,
    libc,
    put,
)
from .wire import Fds, Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODYS_USER = 4_000_000_000  # owns no file: a map of users has to have a line


def configure(message: Message, fds: Fds) -> Message:
    config.base, config.count = message["base"], message["count"]
    config.bound = tuple((group, origin) for group, origin in message["bound"])
    config.sandboxes = f"{message['home']}/sandboxes"
    config.free = (message["free"][0], message["free"][1])
    config.seccomp = bytes.fromhex(message["seccomp"])
    # To be executed and not to be read: what runs from it cannot be looked into, by nobody beside it.
    config.elf_fd = sealed("lowtide", bytes.fromhex(message["elf"]), 0o111)
    config.seccomp_fd = sealed("seccomp", config.seccomp)
    buffer = ctypes.create_string_buffer(config.seccomp, len(config.seccomp))
    config.program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(config.seccomp) // 8, ctypes.addressof(buffer)), 16
    )
    config.program.keep = buffer  # type: ignore[attr-defined]
    if config.base is None:
        return {"staged": try_as_user(message["home"], message["points"]), "idmapped": False}
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # and so its children, until they have executed
    config.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    return stage(message["home"], message["trees"], message["readable_trees"], message["points"])


def sealed(name: str, data: bytes, mode: int = 0o444) -> int:
    """A memory file nobody can change any more, whoever gets hold of it."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | 0x10)  # MFD_EXEC
    except OSError:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    os.fchmod(fd, mode)
    for seals in (
        0x2F,
        0xF,
    ):  # F_ADD_SEALS: seal, shrink, grow, write; and executable or not, since Linux 6.3
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, 1033, seals)
            break
    return fd


def try_as_user(home: str, points: list[str]) -> dict[str, str]:
    """As an ordinary user: whether the state directory can have another name where sandboxes are made.

    The list of mounts in a sandbox shows the names of its layers. Where it cannot (something is mounted below it, no
    namespaces are to be had), it is left as it is; without namespaces the first create says what is wrong.
    """
    point = next((p for p in points if os.path.isdir(p) and not os.path.islink(p)), None)
    if point is None or home.startswith(point + "/"):
        return {}
    config.home, config.point = home, point
    pid = os.fork()
    if pid == 0:
        try:
            stage_as_user()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        config.point = ""
        return {}
    return {home: f"{point}/home"}


def stage_as_user() -> None:
    """Go into namespaces of one's own, in which the state directory has another name.

    Only who makes a sandbox does this: another process of the same user enters it from where it is.
    """
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(NEWUSER | NEWNS), "unshare")
    put("/proc/self/setgroups", b"deny")
    put("/proc/self/uid_map", b"0 %d 1" % user)
    put("/proc/self/gid_map", b"0 %d 1" % group)
    check(libc.mount(None, b"/", None, 0x4000 | 0x80000, None), "make / a slave")
    check(
        libc.mount(b"lowtide", config.point.encode(), b"tmpfs", 0x2 | 0x4, b"mode=0755,size=1m"),
        "mount tmpfs",
    )
    graft(config.home, f"{config.point}/home", None, writable=True)


def stage(home: str, trees: list[str], readable: list[str], points: list[str]) -> Message:
    """As root: a private place where the sandboxes' range of ids sees the host's trees.

    The trees are cloned and id-mapped, so that their owner is the sandbox's root and can be copied up; of the
    readable ones only the groups are mapped, so that what only its owner may read is nobody's in there. `home` is
    cloned as it is, because the range cannot walk through a closed home directory.
    """
    check(libc.unshare(NEWNS), "unshare")
    check(libc.mount(None, b"/", None, 0x4000 | 0x80000, None), "make / a slave")  # MS_REC | MS_SLAVE
    point = next((p for p in points if os.path.isdir(p) and not os.path.islink(p)), None)
    if point is None:
        raise OSError(errno.ENOENT, f"none of {', '.join(points)} exists to stage on")
    check(libc.mount(b"lowtide", point.encode(), b"tmpfs", 0x2 | 0x4, b"mode=0755,size=1m"), "mount tmpfs")
    config.point = point
    staged = {home: graft(home, f"{point}/home", None, writable=True)}
    idmapped = True
    with user_namespace() as namespace:
        for number, tree in enumerate(trees):
            target = f"{point}/{number}"
            try:
                staged[tree] = graft(tree, target, namespace)
            except OSError:
                idmapped = False  # old kernel, or a filesystem that cannot: seen with foreign owners then
                staged[tree] = graft(tree, target, None)
    with user_namespace(users=b"%d %d 1" % (NOBODYS_USER, config.base or 0)) as namespace:
        for number, tree in enumerate(readable, len(trees)):
            target = f"{point}/{number}"
            try:
                staged[tree] = graft(tree, target, namespace)
            except OSError:
                staged[tree] = graft(tree, target, None)
    return {"staged": staged, "idmapped": idmapped}


def stage_more(tree: str) -> Message:
    """One more tree, asked for later: a root filesystem somebody named."""
    target = f"{config.point}/{len(os.listdir(config.point))}"
    with user_namespace() as namespace:
        return {"staged": graft(tree, target, namespace)}


def graft(source: str, target: str, namespace: int | None, *, writable: bool = False) -> str:
    os.mkdir(target, 0o755)
    # OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
    fd = check(libc.syscall(SYS_OPEN_TREE, -100, source.encode(), 1 | os.O_CLOEXEC), f"clone {source}")
    try:
        # nosuid | nodev; the host's trees read-only, and id-mapped where a namespace is given. An id-mapped
        # tree belongs to the sandbox's root: writable, it would be a way out through /proc/1/exe.
        flags = 2 | 4 | (0 if writable else 1) | (0x100000 if namespace is not None else 0)
        attributes = struct.pack("QQQQ", flags, 0, 0, namespace or 0)
        result = libc.syscall(SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(32))
        if result < 0:
            os.rmdir(target)
            check(result, f"idmap {source}")
        check(libc.syscall(SYS_MOVE_MOUNT, fd, b"", -100, target.encode(), 4), f"mount {target}")
    finally:
        os.close(fd)
    return target


@contextlib.contextmanager
def user_namespace(users: bytes | None = None) -> Iterator[int]:
    """A descriptor of a user namespace with the sandboxes' map, or with another one of users, for a while."""
    done_r, done_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        ok = libc.unshare(NEWUSER) == 0
        os.write(done_w, b"1" if ok else b"0")
        while True:
            signal.pause()
    namespace = -1
    try:
        if os.read(done_r, 1) != b"1":
            raise OSError(errno.EPERM, "user namespaces are not allowed")
        write_maps(pid, users)
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        yield namespace
    finally:
        for fd in (done_r, done_w, *((namespace,) if namespace >= 0 else ())):
            os.close(fd)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def write_maps(pid: int, users: bytes | None = None) -> None:
    if config.base is None:
        put(f"/proc/{pid}/setgroups", b"deny")
        put(f"/proc/{pid}/uid_map", b"0 %d 1" % os.geteuid())
        put(f"/proc/{pid}/gid_map", b"0 %d 1" % os.getegid())
    else:
        put(f"/proc/{pid}/uid_map", users or b"0 %d %d" % (config.base, config.count))
        put(f"/proc/{pid}/gid_map", b"0 %d %d" % (config.base, config.count))
