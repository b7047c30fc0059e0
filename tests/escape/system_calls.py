"""Attempts on the kernel's doors: every one of these calls is refused as not permitted, not there or not supported."""

from __future__ import annotations

from collections.abc import Callable

from tests.escape.attempt import PROVIDERS, Target, attempt

ENGINES = PROVIDERS
LOCAL = ("local",)

# About, x86-64 number, aarch64 number, arguments, and where it is tried.
CALLS: list[tuple[str, int, int, str, tuple[str, ...]]] = [
    ("mount a tmpfs", 165, 40, "b'none', b'/tmp', b'tmpfs', 0, 0", ENGINES),
    ("bind the root somewhere", 165, 40, "b'/', b'/tmp', b'', 4096, 0", ENGINES),
    ("unmount /proc", 166, 39, "b'/proc', 2", ENGINES),
    ("change the root with pivot_root", 155, 41, "b'/', b'/tmp'", ENGINES),
    ("change the root with chroot", 161, 51, "b'/tmp'", LOCAL),
    ("make a user namespace", 272, 97, "0x10000000", ENGINES),
    ("make a mount namespace", 272, 97, "0x00020000", ENGINES),
    ("make a network namespace", 272, 97, "0x40000000", ENGINES),
    ("make a user namespace with clone", 56, 220, "0x10000000 | 17, 0, 0, 0, 0", ENGINES),
    ("make a user namespace with clone3", 435, 435, "0, 0", LOCAL),
    ("join a namespace", 308, 268, "0, 0", LOCAL),
    ("trace", 101, 117, "0, 0, 0, 0", LOCAL),
    ("add a key", 248, 217, "b'user', b'lowtide', b'x', 1, -3", ENGINES),
    ("ask for a key", 249, 218, "b'user', b'lowtide', 0, -3", ENGINES),
    ("use a keyring", 250, 219, "0, -3, 0", ENGINES),
    ("load a bpf program", 321, 280, "0, 0, 0", ENGINES),
    ("count events of the machine", 298, 241, "0, 0, -1, -1, 0", ENGINES),
    ("load another kernel", 246, 104, "0, 0, 0, 0", ENGINES),
    ("load a module", 175, 105, "0, 0, b''", ENGINES),
    ("load a module from a file", 313, 273, "0, b'', 0", ENGINES),
    ("unload a module", 176, 106, "b'ext4', 0", ENGINES),
    ("restart the machine", 169, 142, "0xfee1dead, 672274793, 0, 0", ENGINES),
    ("swap to a file", 167, 224, "b'/tmp/x', 0", ENGINES),
    ("handle page faults of others", 323, 282, "0", LOCAL),
    ("set up io_uring", 425, 425, "1, 0", LOCAL),
    ("open a file by its handle", 304, 265, "0, 0, 0", ENGINES),
    ("turn accounting on", 163, 89, "b'/tmp/x'", ENGINES),
    ("change quotas", 179, 60, "0, 0, 0, 0", ENGINES),
    ("open a filesystem", 430, 430, "b'tmpfs', 0", ENGINES),
    ("clone a mount", 428, 428, "-100, b'/', 1", ENGINES),
    ("change a mount's attributes", 442, 442, "-100, b'/', 0, 0, 0", ENGINES),
    ("read the kernel's messages", 103, 116, "3, 0, 0", LOCAL),
    ("name the machine", 170, 161, "b'owned', 5", ENGINES),
    ("set the clock", 164, 170, "b'x' * 16, 0", ENGINES),
    ("change the personality", 135, 92, "0x0400000", LOCAL),
    ("move pages of others", 279, 239, "1, 0, 0, 0, 0, 0", LOCAL),
    ("watch the whole filesystem", 300, 262, "0, 0", ENGINES),
    ("take a reserved huge page with mmap", 9, 222, "0, 2 << 20, 3, 0x40022, -1, 0", LOCAL),
    ("take a reserved huge page with memfd_create", 319, 279, "b'huge', 4", LOCAL),
    ("take a reserved huge page with shmget", 29, 194, "0, 2 << 20, 0o5600", LOCAL),
    ("attach a filter to a socket", 54, 208, "0, 1, 26, 0, 16", LOCAL),
    ("open an MPTCP socket", 41, 198, "2, 1, 262", LOCAL),
    ("open an SCTP socket", 41, 198, "10, 1, 132", LOCAL),
]


def _attempt(about: str, x86_64: int, aarch64: int, arguments: str) -> Callable[[Target], str | None]:
    def work(target: Target) -> str | None:
        said = target.python(f"print(*call({x86_64}, {aarch64}, {arguments}))").split()
        refused = (
            len(said) == 2 and said[0] == "-1" and said[1] in ("EPERM", "EACCES", "ENOSYS", "EPROTONOSUPPORT")
        )
        return None if refused else f"the kernel answered {' '.join(said)}"

    work.__name__ = about.replace(" ", "_")
    return work


for _about, _x86_64, _aarch64, _arguments, _where in CALLS:
    attempt(_about, providers=_where)(_attempt(_about, _x86_64, _aarch64, _arguments))
