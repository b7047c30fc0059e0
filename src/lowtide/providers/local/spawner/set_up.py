"""Set-up: takes the configuration and, as root, stages the host's trees where sandboxes can use them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct

from . import ids
from .config import config
from .kernel import (
    AT_EMPTY_PATH,
    CLONE_VM,
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
OWN = "own"  # below `config.point`: the state directory as one sandbox's range of ids sees it
STACK_BYTES = 16384
DISK = "disk"  # beside it
OVERLAYS_ON_MAPPED = (5, 19)  # the first kernel whose overlays take layers with mapped ids


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
        return {"staged": try_as_user(message["home"], message["points"]), "idmapped": False, "own": ""}
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
    for name in (OWN, DISK):
        os.mkdir(f"{point}/{name}", 0o755)
    config.home = home
    config.own_ranges = can_map(home)
    idmapped = True
    mapped: list[tuple[str, str, str]] = []
    with user_namespace() as namespace:
        for number, tree in enumerate(trees):
            target = f"{point}/{number}"
            try:
                staged[tree] = graft(tree, target, namespace)
                mapped.append((tree, target, "all"))
            except OSError:
                idmapped = False  # old kernel, or a filesystem that cannot: seen with foreign owners then
                staged[tree] = graft(tree, target, None)
    with user_namespace(users=b"%d %d 1" % (NOBODYS_USER, config.base or 0)) as namespace:
        for number, tree in enumerate(readable, len(trees)):
            target = f"{point}/{number}"
            try:
                staged[tree] = graft(tree, target, namespace)
                mapped.append((tree, target, "groups"))
            except OSError:
                staged[tree] = graft(tree, target, None)
    config.trees = tuple(mapped)
    return {"staged": staged, "idmapped": idmapped, "own": point if config.own_ranges else ""}


def can_map(home: str) -> bool:
    """Whether a sandbox can have ids of its own here: the kernel and the state directory's file system decide."""
    release = os.uname().release.split(".")
    if tuple(int("".join(filter(str.isdigit, part[:3])) or 0) for part in release[:2]) < OVERLAYS_ON_MAPPED:
        return False
    try:
        with user_namespace(b"%d %d %d" % (config.base or 0, ids.FIRST, config.count)) as namespace:
            os.close(clone(home, namespace, writable=True))
    except OSError:
        return False
    return True


def probe(tree: str, writable: str = "") -> None:
    """For `lowtide doctor`: print whether the ids of this tree can be mapped, or why not."""
    config.base = 1 << 30
    try:
        if writable and not can_map(tree):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        with user_namespace() as namespace:
            os.close(clone(tree, namespace, writable=bool(writable)))
        print("ok")  # noqa: T201 - read by the doctor
    except OSError as error:
        print(error.strerror or error)  # noqa: T201


def see_as(base: int, everything: int) -> int:
    """In one that becomes a sandbox: mounts of its own, in which the range from `base` on owns what it is to own.

    `everything` is the sandbox's user namespace. Returns the one that maps what is on the disk to the same range.
    """
    check(libc.unshare(NEWNS), "unshare")
    own = b"%d %d %d" % (config.base or 0, base, config.count)
    disk = id_map(own, own)
    attach(clone(config.home, disk, writable=True), f"{config.point}/{OWN}")
    groups = -1
    for tree, target, which in config.trees:
        if which == "groups" and groups < 0:
            groups = id_map(b"%d %d 1" % (NOBODYS_USER, base), b"0 %d %d" % (base, config.count))
        attach(clone(tree, groups if which == "groups" else everything), target)
    return disk


def stage_more(tree: str) -> Message:
    """One more tree, asked for later: a root filesystem somebody named."""
    target = f"{config.point}/{len(os.listdir(config.point))}"
    with user_namespace() as namespace:
        return {"staged": graft(tree, target, namespace)}


def graft(source: str, target: str, namespace: int | None, *, writable: bool = False) -> str:
    fd = clone(source, namespace, writable=writable)
    os.mkdir(target, 0o755)
    attach(fd, target)
    return target


def clone(source: str, namespace: int | None, *, writable: bool = False) -> int:
    """A mount of the same files that is nowhere yet."""
    # OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC
    fd = check(libc.syscall(SYS_OPEN_TREE, -100, source.encode(), 1 | os.O_CLOEXEC), f"clone {source}")
    try:
        # nosuid | nodev; the host's trees read-only, and id-mapped where a namespace is given. An id-mapped
        # tree belongs to the sandbox's root: writable, it would be a way out through /proc/1/exe.
        flags = 2 | 4 | (0 if writable else 1) | (0x100000 if namespace is not None else 0)
        attributes = struct.pack("QQQQ", flags, 0, 0, namespace or 0)
        result = libc.syscall(SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, attributes, ctypes.c_size_t(32))
        check(result, f"idmap {source}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, target: str) -> None:
    try:
        check(libc.syscall(SYS_MOVE_MOUNT, fd, b"", -100, target.encode(), 4), f"mount {target}")
    finally:
        os.close(fd)


def id_map(users: bytes, groups: bytes) -> int:
    """A user namespace without processes, for mounts that map ids."""
    # Nothing of this program runs in what is cloned: the C library's own `pause`, on a stack of its own, in this
    # program's memory, so that nothing has to be copied.
    stack = ctypes.create_string_buffer(STACK_BYTES)
    top = ctypes.c_void_p((ctypes.addressof(stack) + STACK_BYTES) & ~0xF)
    pid = check(
        libc.clone(libc.pause, top, NEWUSER | CLONE_VM | signal.SIGCHLD, None), "make a user namespace"
    )
    try:
        write_maps(pid, users, groups)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def user_namespace(users: bytes | None = None) -> Iterator[int]:
    """A descriptor of a user namespace with the sandboxes' map, or with another one of users, for a while."""
    everything = b"0 %d %d" % (config.base or 0, config.count)
    namespace = id_map(users or everything, everything)
    try:
        yield namespace
    finally:
        os.close(namespace)


def write_maps(pid: int, users: bytes, groups: bytes) -> None:
    if config.base is None:
        put(f"/proc/{pid}/setgroups", b"deny")
    put(f"/proc/{pid}/uid_map", users)
    put(f"/proc/{pid}/gid_map", groups)
