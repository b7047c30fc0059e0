"""The system-call filter: every row of its table is asked of the kernel, and every machine's bytes decide as the table says."""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.providers.local import LocalProvider, seccomp, system_calls

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, spec

ROOT = Path(__file__).parents[2]
ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CONDITIONAL = {
    "x86_64": {
        "clone": 56,
        "clone3": 435,
        "ioctl": 16,
        "socket": 41,
        "socketpair": 53,
        "personality": 135,
        "setsockopt": 54,
        "mmap": 9,
        "memfd_create": 319,
        "shmget": 29,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "ioctl": 29,
        "socket": 198,
        "socketpair": 199,
        "personality": 92,
        "setsockopt": 208,
        "mmap": 222,
        "memfd_create": 279,
        "shmget": 194,
    },
}


def decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would answer, by its own rules: the filter's bytes, run here."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("iIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *padded)
    code = list(struct.iter_unpack("HBBI", seccomp.filter_bytes(machine)))
    at, value = 0, 0
    while True:
        operation, then, otherwise, operand = code[at]
        if operation == 0x20:
            value = struct.unpack_from("I", data, operand)[0]
            at += 1
        elif operation == 0x06:
            return int(operand)
        else:
            tests = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}
            at += 1 + (then if tests[operation] else otherwise)


def refusal(code: int) -> int:
    return 0x00050000 | code


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_bytes_decide_as_the_table_says(machine: str) -> None:
    outright = {number: answer for _, number, answer in system_calls.refused(machine)}
    odd = set(CONDITIONAL[machine].values())
    for number in range(512):
        if number in outright:
            assert decide(machine, number) == refusal(outright[number]), number
        elif number not in odd:
            assert decide(machine, number) == ALLOW, number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_conditions_are_in_the_bytes(machine: str) -> None:
    calls = CONDITIONAL[machine]
    assert set(calls) == {condition.call for condition in system_calls.CONDITIONS}
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, calls["clone"], flag | 17) == refusal(errno.EPERM)
    assert decide(machine, calls["clone"], 0x003D0F00) == ALLOW  # a thread
    assert decide(machine, calls["clone3"]) == refusal(errno.ENOSYS)
    for family in range(64):
        allowed = family in (1, 2, 10, 16)
        assert (decide(machine, calls["socket"], family) == ALLOW) is allowed, family
        assert (decide(machine, calls["socketpair"], family) == ALLOW) is (family == 1), family
    for protocol in range(1, 32):
        assert decide(machine, calls["socket"], 16, 3, protocol) == refusal(errno.EPROTONOSUPPORT)
    for family in (2, 10):
        for protocol in (33, 115, 132, 262):
            assert decide(machine, calls["socket"], family, 1, protocol) == refusal(errno.EPROTONOSUPPORT)
        for protocol in (0, 1, 6, 17, 58, 136):
            assert decide(machine, calls["socket"], family, 1, protocol) == ALLOW
    for option in range(80):
        allowed = option not in (26, 50, 51, 52)
        assert (decide(machine, calls["setsockopt"], 3, 1, option) == ALLOW) is allowed, option
        assert decide(machine, calls["setsockopt"], 3, 6, option) == ALLOW
    for name, index, flag in (("mmap", 3, 0x40000), ("memfd_create", 1, 4), ("shmget", 2, 0o4000)):
        assert decide(machine, calls[name], *[0] * index, flag | 3) == refusal(errno.EPERM)
        assert decide(machine, calls[name], *[0] * index, 3) == ALLOW
        assert decide(machine, calls[name], *[0xFFFFFFFF] * index, 0) == ALLOW
    for request in (0x5412, 0x541C, 0x5423):
        assert decide(machine, calls["ioctl"], 0, request) == refusal(errno.EPERM)
    assert decide(machine, calls["ioctl"], 0, 0x5413) == ALLOW  # the window's size
    assert decide(machine, calls["personality"], 0x0400000) == refusal(errno.EPERM)
    assert decide(machine, calls["personality"], 0xFFFFFFFF) == ALLOW


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_another_architectures_calls_end_the_process(machine: str) -> None:
    for architecture in (0x40000003, 0x40000028, 0xC00000F3):  # i386, arm, riscv64
        assert decide(machine, 39, architecture=architecture) == KILL
    assert decide(machine, 0x40000000 | 39) == refusal(errno.ENOSYS)  # x32


def test_an_unknown_machine_has_no_filter() -> None:
    assert not seccomp.supported("riscv64")
    with pytest.raises(KeyError):
        seccomp.filter_bytes("riscv64")


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/aarch64-linux-gnu/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_are_the_kernels_own(machine: str, header: str) -> None:
    if not os.path.exists(header):
        pytest.skip(f"{header} is not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    for name, number, _ in system_calls.refused(machine):
        if name in known:
            assert int(known[name]) == number, name
        else:
            assert name in ("open_tree_attr", "uselib", "lookup_dcookie", "nfsservctl"), (
                name
            )  # newer or older than it


_ASK = """
import ctypes, errno, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
for row in sys.argv[1:]:
    name, number, answer = row.split(",")
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(int(number)), *[ctypes.c_long(-1)] * 6)
    if result != -1 or ctypes.get_errno() != int(answer):
        print(name, result, ctypes.get_errno())
for family in range(64):
    for make in (socket.socket, socket.socketpair):
        try:
            made = make(family, socket.SOCK_DGRAM)
        except OSError as error:
            wanted = (1, 2, 10, 16) if make is socket.socket else (1,)
            if family in wanted or error.errno != errno.EAFNOSUPPORT:
                print(make.__name__, family, error)
        else:
            if family not in ((1, 2, 10, 16) if make is socket.socket else (1,)):
                print(make.__name__, family, "was made")
try:
    socket.socket(16, socket.SOCK_RAW, 12)
    print("netfilter")
except OSError as error:
    if error.errno != errno.EPROTONOSUPPORT:
        print("netfilter", error)
"""


async def test_the_kernel_refuses_every_call_of_the_table(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    rows = [f"{name},{number},{answer}" for name, number, answer in system_calls.refused(os.uname().machine)]
    assert len(rows) > 50
    assert await run(provider, made.sandbox_id, "python3", "-c", _ASK, *rows) == (0, "", "")


def test_the_table_in_the_docs_is_current() -> None:
    script = ROOT / "scripts" / "system_call_table.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
