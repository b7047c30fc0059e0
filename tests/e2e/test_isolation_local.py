"""Attempts to get out of a local sandbox: through system calls, /proc, devices, the terminal.

Each attempt must fail, and the machine must stay as it was.
"""

from __future__ import annotations

import os
import platform

import pytest
from isolation_attempts import ANSWER_SECONDS, attempt, refused

from lowtide import Sandbox
from lowtide.machine import home

pytestmark = pytest.mark.usefixtures("healthy_host")


# The kernel's doors. Each call is asked for in tests/escape and in tests/unit/test_local_seccomp.py.


def test_the_kernel_refuses_the_same_to_another_user_inside(box: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's sandbox has one user")
    for call in (("mount", b"none", b"/tmp", b"tmpfs", 0, 0), ("unshare", 0x10000000), ("keyctl", 0, -3, 0)):
        assert refused(box, *call, user="1000")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the 32-bit door is an x86 one")
def test_the_32_bit_door_is_closed(box: Sandbox) -> None:
    code = """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # mov eax, getpid; int 0x80; ret
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print("answer", call())
"""
    result = box.exec(["python3", "-c", "import ctypes\n" + code]).result(ANSWER_SECONDS)
    pid_answered = result.returncode == 0 and int(result.stdout.split()[1]) > 0
    assert not pid_answered, "a system call through the 32-bit entry was answered"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x32 is an x86 thing")
def test_the_x32_door_is_closed(box: Sandbox) -> None:
    code = "ctypes.set_errno(0); r = libc.syscall(ctypes.c_long(0x40000000 | 39)); print(r)"
    result = box.exec(
        ["python3", "-c", "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n" + code]
    ).result(ANSWER_SECONDS)
    assert result.returncode != 0 or result.stdout.strip() == "-1"


def test_setuid_gives_nothing(box: Sandbox) -> None:
    box.exec(["sh", "-c", "cp /usr/bin/id /opt/id && chmod 4755 /opt/id"], check=True).result(ANSWER_SECONDS)
    users = ["0", "1000"] if os.geteuid() == 0 else ["0"]
    for user in users:
        result = box.exec(["/opt/id"], user=user).result(ANSWER_SECONDS)
        assert "euid=0" not in result.stdout
        if user != "0":
            assert "uid=0" not in result.stdout


def test_what_a_sandbox_makes_setuid_is_not_roots_on_the_host(box: Sandbox) -> None:
    box.exec(["sh", "-c", "cp /usr/bin/id /opt/id2 && chmod 6755 /opt/id2"], check=True).result(
        ANSWER_SECONDS
    )
    assert box.lease_id is not None
    made = [path for path in (home() / "local" / "sandboxes" / box.lease_id).rglob("id2")]
    assert made, "the file was expected in the sandbox's own layer"
    for path in made:
        assert path.lstat().st_uid != 0


def test_no_device_can_be_made_or_reached(box: Sandbox) -> None:
    code = """
import stat
for name, mode, device in (("mem", stat.S_IFCHR, (1, 1)), ("disk", stat.S_IFBLK, (254, 0)), ("null", stat.S_IFCHR, (1, 3))):
    try:
        os.mknod("/opt/" + name, mode | 0o666, os.makedev(*device))
        print("made", name)
    except OSError:
        pass
for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/loop-control", "/dev/loop0",
             "/dev/fuse", "/dev/kvm", "/dev/net/tun", "/dev/mapper/control", "/dev/cpu/0/msr"):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        print("opened", path)
    except OSError:
        pass
"""
    assert attempt(box, code) == ""


# /proc and /sys.


def test_kernel_settings_cannot_be_written(box: Sandbox) -> None:
    code = """
candidates = ["/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug",
    "/proc/sys/kernel/hostname", "/proc/sys/kernel/sysrq", "/proc/sysrq-trigger", "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/panic_on_oom", "/proc/sys/kernel/panic", "/proc/sys/fs/file-max",
    "/proc/sys/kernel/unprivileged_bpf_disabled", "/proc/irq/default_smp_affinity",
    "/proc/acpi", "/proc/scsi/scsi", "/proc/fs", "/proc/mtrr"]
for folder, _, names in os.walk("/proc/sys"):
    candidates += [os.path.join(folder, name) for name in names]
OWN = ("/proc/sys/net/", "/proc/sys/fs/mqueue/", "/proc/sys/kernel/msg", "/proc/sys/kernel/shm", "/proc/sys/kernel/sem",
    "/proc/sys/kernel/auto_msgmni", "/proc/sys/kernel/ns_last_pid", "/proc/sys/kernel/pid_max")
for path in candidates:
    if path.startswith(OWN) or not os.path.isfile(path):
        continue  # these belong to the sandbox's own network, IPC and process namespaces
    try:
        os.close(os.open(path, os.O_WRONLY))
        print(path)
    except OSError:
        pass
"""
    assert attempt(box, code) == ""


def test_kernel_memory_and_messages_cannot_be_read(box: Sandbox) -> None:
    code = """
for path in ("/proc/kcore", "/proc/kmsg", "/dev/kmsg", "/proc/vmallocinfo", "/proc/kpageflags", "/proc/1/mem", "/proc/iomem"):
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(4096)
        if data.strip(b"\\0") and b"00000000-00000000" not in data:
            print(path)
    except OSError:
        pass
addresses = {line.split()[0] for line in open("/proc/kallsyms")} if os.access("/proc/kallsyms", os.R_OK) else set()
if any(int(address, 16) for address in addresses):
    print("kallsyms")
"""
    assert attempt(box, code) == ""


def test_sysfs_and_cgroups_offer_nothing_to_write(box: Sandbox) -> None:
    code = """
for root in ("/sys", "/sys/fs/cgroup", "/sys/kernel", "/sys/firmware"):
    for folder, folders, names in os.walk(root):
        folders[:] = folders[:50]
        for name in names[:50]:
            path = os.path.join(folder, name)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                print(path)
            except OSError:
                pass
"""
    assert attempt(box, code) == ""


def test_the_oom_killer_cannot_be_turned_away(box: Sandbox) -> None:
    code = """
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    print("turned away")
except OSError:
    pass
"""
    assert attempt(box, code) == ""


# The terminal.


def test_a_terminal_takes_no_typed_ahead_input(box: Sandbox) -> None:
    code = """
import fcntl, termios
for request, argument in ((termios.TIOCSTI, b"x"), (0x541C, bytes([3]))):
    try:
        fcntl.ioctl(0, request, argument)
        print("taken", request)
    except OSError:
        pass
print("end")
"""
    result = box.exec(["python3", "-c", code], tty=True).result(ANSWER_SECONDS)
    assert "taken" not in result.stdout
    assert "end" in result.stdout
