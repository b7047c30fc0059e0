"""The table behind the system-call filter: what is refused to every process in a sandbox, how, and why.

docs/security.md shows this table (`scripts/system_call_table.py` writes it), and a test asks the kernel for every
call in it from inside a sandbox.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Calls that are refused for one reason. Numbers: x86-64 and aarch64, None where there is no such call."""

    reason: str
    calls: Mapping[str, tuple[int | None, int | None]]
    answer: int = errno.EPERM


GROUPS = (
    Group(
        reason="mounts: a sandbox keeps the files it was given",
        calls={
            "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
            "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
            "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
        },
    ),
    Group(
        reason="namespaces: in one of its own a process has every capability, and with it the kernel's rarely tried code",
        calls={"unshare": (272, 97), "setns": (308, 268)},
    ),
    Group(
        reason="other processes' memory and descriptors",
        calls={
            "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
            "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "move_pages": (279, 239),
            "migrate_pages": (256, 238),
        },
    ),
    Group(
        reason="programs for the kernel, and counters of the whole machine",
        calls={"bpf": (321, 280), "perf_event_open": (298, 241)},
    ),
    Group(
        reason="faults and completions handled by a process: what most ways out of the last years were built with",
        calls={
            "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
            "io_uring_register": (427, 427),
        },
    ),
    Group(
        reason="slots that all users of the machine share; programs do without",
        calls={"io_setup": (206, 0)},
        answer=errno.ENOSYS,
    ),
    Group(
        reason="keyrings, which know users and not namespaces",
        calls={"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    ),
    Group(
        reason="files by number instead of by path, and watches on whole filesystems",
        calls={
            "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
            "lookup_dcookie": (212, 18),
        },
    ),
    Group(
        reason="the machine itself: modules, another kernel, swap, quotas, its name, its clock, its messages",
        calls={
            "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
            "create_module": (174, None), "get_kernel_syms": (177, None), "query_module": (178, None),
            "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
            "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
            "nfsservctl": (180, 42), "sethostname": (170, 161), "setdomainname": (171, 162),
            "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
            "adjtimex": (159, 171), "syslog": (103, 116), "vhangup": (153, 58),
        },
    ),
    Group(
        reason="doors to old hardware and formats, and memory hidden from the machine's owner",
        calls={
            "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
            "_sysctl": (156, None), "sysfs": (139, None), "ustat": (136, None), "memfd_secret": (447, 447),
        },
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A call of which a part is refused."""

    call: str
    refused: str
    reason: str


# What `seccomp.filter_bytes` decides by arguments, in words.
CONDITIONS = (
    Condition(call="clone", refused="any flag that makes a namespace", reason="as unshare"),
    Condition(
        call="clone3",
        refused="all (as not there)",
        reason="no filter sees its flags; the C library takes clone instead",
    ),
    Condition(
        call="socket",
        refused="any family but Unix, IPv4, IPv6 and netlink; netlink but for routes; DCCP, L2TP, SCTP and MPTCP",
        reason="packet, vsock, xdp and the old families reach past the network namespace or are hardly tried code, and "
        "so are those protocols, for which the kernel loads modules",
    ),
    Condition(
        call="socketpair", refused="any family but Unix", reason="the others that have pairs are old ones"
    ),
    Condition(
        call="ioctl",
        refused="TIOCSTI, TIOCLINUX, TIOCSETD",
        reason="typing for somebody else, and line disciplines, which load modules",
    ),
    Condition(
        call="setsockopt",
        refused="attaching a filter or a BPF program to a socket",
        reason="compiled filters come out of one memory of the whole machine (`net.core.bpf_jit_limit`)",
    ),
    Condition(
        call="mmap",
        refused="MAP_HUGETLB",
        reason="no limit of memory counts the huge pages that a machine has reserved",
    ),
    Condition(call="memfd_create", refused="MFD_HUGETLB", reason="as mmap"),
    Condition(call="shmget", refused="SHM_HUGETLB", reason="as mmap"),
    Condition(call="personality", refused="any but the usual one", reason="turns address randomisation off"),
)

MACHINES = ("x86_64", "aarch64")


def refused(machine: str) -> Iterator[tuple[str, int, int]]:
    """Name, number and answer (an errno) of every call refused outright there."""
    column = MACHINES.index(machine)
    for group in GROUPS:
        for name, numbers in group.calls.items():
            number = numbers[column]
            if number is not None:
                yield name, number, group.answer
