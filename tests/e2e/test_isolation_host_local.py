"""Attempts to get out of a local sandbox: through other processes, the host's files, the network.

Each attempt must fail, and the machine must stay as it was.
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import socket
from pathlib import Path

import pytest
from isolation_attempts import ANSWER_SECONDS, attempt, inside_file

from lowtide import Sandbox
from lowtide.machine import home
from lowtide.testing.conformance.isolation import Listener

pytestmark = pytest.mark.usefixtures("healthy_host")


# Other processes.


def test_only_its_own_processes_are_there(box: Sandbox) -> None:
    pids = {
        int(pid) for pid in attempt(box, "print(*[p for p in os.listdir('/proc') if p.isdigit()])").split()
    }
    assert os.getpid() not in pids or os.getpid() < 1000
    assert len(pids) < 20
    names = attempt(
        box, "print(*[open(f'/proc/{p}/comm').read().strip() for p in os.listdir('/proc') if p.isdigit()])"
    )
    assert "pytest" not in names


def test_killing_everything_kills_nothing_outside(box: Sandbox) -> None:
    with Sandbox.run(provider="local") as victim, Sandbox.run(provider="local") as bystander:
        steady = bystander.exec(["sh", "-c", "echo up; exec sleep 1000"])
        next(iter(steady.stdout))
        victim.exec(["sh", "-c", "kill -9 -1; kill -9 1; kill -9 0"]).exception(ANSWER_SECONDS)
        code = "for pid in range(1, 70000):\n  try: os.kill(pid, 9)\n  except OSError: pass"
        victim.exec(["python3", "-c", "import os\n" + code]).exception(ANSWER_SECONDS)
        assert steady.poll() is None


def test_roots_and_descriptors_of_other_processes_lead_nowhere(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret " + secrets.token_hex(8))
    code = """
path = sys.argv[1]
tries = [path] + [f"/proc/{p}/{way}{path}" for p in os.listdir("/proc") if p.isdigit() or p in ("self", "thread-self")
    for way in ("root", "cwd", "root/proc/1/root", "task/1/root")]
for p in [p for p in os.listdir("/proc") if p.isdigit()]:
    try:
        descriptors = os.listdir(f"/proc/{p}/fd")
    except OSError:
        continue
    tries += [f"/proc/{p}/fd/{d}{path}" for d in descriptors] + [f"/proc/{p}/fd/{d}/../../../../../..{path}" for d in descriptors]
for candidate in tries:
    try:
        with open(candidate) as file:
            print(candidate, file.read())
    except OSError:
        pass
"""
    assert attempt(box, code, str(secret)) == ""


def test_an_exec_inherits_no_descriptor(box: Sandbox) -> None:
    code = "print(sorted(int(d) for d in os.listdir('/proc/self/fd')))"
    # 3 is the listing itself.
    assert attempt(box, code) == "[0, 1, 2, 3]\n"


def test_the_first_process_inherits_no_descriptor() -> None:
    with Sandbox.run("sh", "-c", "ls /proc/self/fd > /tmp/fds; exec sleep 1000", provider="local") as box:
        while not (listing := inside_file(box, "/tmp/fds").split()):
            pass
        assert set(listing) <= {"0", "1", "2", "3"}
        for pid in ("1", "2"):
            links = box.exec(["sh", "-c", f"ls -l /proc/{pid}/fd"]).result(ANSWER_SECONDS).stdout
            assert str(home()) not in links


RESTRICTIONS = (
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
)


def restrictions(status: str) -> dict[str, str]:
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return {name: fields.get(name, "").strip() for name in RESTRICTIONS}


def real_limits(box: Sandbox, path: str) -> list[str]:
    """Without the one the kernel ignores: a command wears its mark there."""
    return [line for line in inside_file(box, path).splitlines() if not line.startswith("Max file locks")]


@pytest.mark.parametrize(
    "limits", [None, {"limits": {"memory": "256Mi", "pids": 100, "cpu": "1"}}], ids=["plain", "limits"]
)
def test_an_exec_is_restricted_exactly_as_the_first_process(
    limits: dict[str, dict[str, object]] | None,
) -> None:
    if limits and os.geteuid() != 0:
        pytest.skip("limits need a cgroup that this user may make")
    script = (
        "cat /proc/self/status > /tmp/status; cat /proc/self/cgroup > /tmp/cgroup; cat /proc/self/limits > /tmp/limits;"
        "cat /proc/self/oom_score_adj > /tmp/oom; cat /proc/self/mountinfo > /tmp/mounts;"
        "ls -l /proc/self/ns | sed 's/.* //' > /tmp/ns; echo > /tmp/done; exec sleep 1000"
    )
    keywords = {"resources": limits} if limits else {}
    with Sandbox.run("sh", "-c", script, provider="local", **keywords) as box:  # type: ignore[arg-type]
        while not box.exists("/tmp/done").result(ANSWER_SECONDS):
            pass
        first, entered = (
            restrictions(inside_file(box, path)) for path in ("/tmp/status", "/proc/self/status")
        )
        assert entered == first
        assert first["NoNewPrivs"] == "1"
        assert first["Seccomp"] == "2"
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(first[name], 16) == 0
        assert inside_file(box, "/proc/self/cgroup") == inside_file(box, "/tmp/cgroup")
        assert real_limits(box, "/proc/self/limits") == real_limits(box, "/tmp/limits")
        assert inside_file(box, "/proc/self/oom_score_adj") == inside_file(box, "/tmp/oom")
        assert inside_file(box, "/proc/self/mountinfo") == inside_file(box, "/tmp/mounts")
        entered_ns = (
            box.exec(["sh", "-c", "ls -l /proc/self/ns | sed 's/.* //'"]).result(ANSWER_SECONDS).stdout
        )
        assert entered_ns == inside_file(box, "/tmp/ns")
        # Seen from the host as well: the cgroup is the kernel's word, not the sandbox's.
        pid_one = restrictions(inside_file(box, "/proc/1/status"))
        assert pid_one["Seccomp"] == "2"
        assert int(pid_one["CapEff"], 16) == 0


def test_every_namespace_is_its_own(box: Sandbox) -> None:
    inside = attempt(
        box,
        "print(*[os.readlink('/proc/self/ns/' + n) for n in ('user','pid','mnt','net','ipc','uts','cgroup')])",
    )
    outside = {os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    assert not set(inside.split()) & outside


def test_a_process_that_is_just_entering_shows_nothing_to_those_inside(box: Sandbox, tmp_path: Path) -> None:
    """Between joining the sandbox and executing, an entering process is the host's: nobody may look into it."""
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    spy = """
import time
path, end, seen, home = sys.argv[1], time.monotonic() + 6, set(), sys.argv[2]
print("watching", flush=True)
while time.monotonic() < end:
    for p in os.listdir("/proc"):
        if not p.isdigit() or int(p) == os.getpid():
            continue
        try:
            if os.path.exists(f"/proc/{p}/root{path}") or os.path.exists(f"/proc/{p}/cwd{path}"):
                seen.add("root")
        except OSError: pass
        try:
            for d in os.listdir(f"/proc/{p}/fd"):
                link = os.readlink(f"/proc/{p}/fd/{d}")
                if home in link or link.endswith(("spawner.py", ".db", "-wal")):
                    seen.add("fd " + link)
        except OSError: pass
        try:
            with open(f"/proc/{p}/maps") as maps:
                if "python" in (text := maps.read()) and "spawner" in open(f"/proc/{p}/cmdline").read():
                    seen.add("maps")
        except OSError: pass
        try:
            with open(f"/proc/{p}/cmdline", "rb") as file:
                entering = b"spawner" in file.read()
            if entering:
                os.close(os.open(f"/proc/{p}/mem", os.O_RDWR))
                with open(f"/proc/{p}/cmdline", "rb") as file:
                    if b"spawner" in file.read():  # so it was not the program it has executed since
                        seen.add("mem")
        except OSError: pass
print(sorted(seen))
"""
    watcher = box.exec(["python3", "-c", "import os, sys\n" + spy, str(secret), str(home())])
    chunks = iter(watcher.stdout)
    assert next(chunks) == "watching\n"
    while watcher.poll() is None:
        box.exec(["true"]).result(ANSWER_SECONDS)
        box.exists("/tmp").result(ANSWER_SECONDS)
    assert watcher.result(ANSWER_SECONDS).stdout == "watching\n[]\n"


def test_the_hosts_keys_are_not_there(box: Sandbox) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    name = f"lowtide-{secrets.token_hex(6)}".encode()
    add_key, keyctl = (248, 250) if platform.machine() == "x86_64" else (217, 219)
    key = libc.syscall(add_key, b"user", name, b"secret", 6, -4)  # the user keyring
    if key < 0:
        pytest.skip("this machine has no kernel keyring to hide")
    try:
        with Sandbox.run(provider="local") as fresh:
            assert name.decode() not in inside_file(fresh, "/proc/keys")
    finally:
        libc.syscall(keyctl, 9, key, -4)  # unlink


# Files and environment of the host.


def test_homes_credentials_and_the_state_directory_are_not_there(box: Sandbox) -> None:
    code = """
for path in sys.argv[1:]:
    try:
        entries = os.listdir(path)
    except OSError:
        continue
    if entries:
        print(path, entries)
"""
    places = [
        str(home()),
        str(home() / "local"),
        "/home",
        "/mnt",
        "/srv",
        "/media",
        "/run/lock",
        "/boot",
        "/var/lib/dpkg",
    ]
    assert attempt(box, code, *places) in ("", "/home ['user']\n")
    listing = attempt(box, "print(*os.listdir('/root'))").split()
    assert not set(listing) & {
        ".ssh",
        ".aws",
        ".config",
        ".cache",
        ".git-credentials",
        ".netrc",
        ".docker",
    }
    shadow = box.exec(["cat", "/etc/shadow"]).result(ANSWER_SECONDS)
    assert shadow.returncode != 0 or "$" not in shadow.stdout


def test_writing_everywhere_changes_nothing_outside(box: Sandbox) -> None:
    mark = f"mark-{secrets.token_hex(8)}"
    code = """
mark = sys.argv[1]
for folder in ("/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/tmp", "/var/tmp", "/root", "/home", "/opt", "/dev", "/dev/shm", "/run", "/mnt", "/srv"):
    try:
        open(os.path.join(folder, mark), "w").close()
    except OSError:
        pass
try:
    os.remove("/usr/bin/env")
except OSError:
    pass
"""
    with Sandbox.run(provider="local") as other:
        attempt(other, code, mark)
        for folder in (
            "/",
            "/usr",
            "/usr/bin",
            "/usr/lib",
            "/etc",
            "/tmp",
            "/var/tmp",
            "/root",
            "/home",
            "/opt",
            "/dev",
            "/dev/shm",
            "/run",
            "/mnt",
            "/srv",
        ):
            assert not os.path.lexists(os.path.join(folder, mark))
            assert not box.exists(os.path.join(folder, mark)).result(ANSWER_SECONDS)
        assert os.path.exists("/usr/bin/env")


def test_the_running_python_cannot_be_changed_from_inside(box: Sandbox) -> None:
    import sys

    target = os.path.join(sys.prefix, "lib", f"python{sys.version_info.major}.{sys.version_info.minor}")
    mark = f"mark_{secrets.token_hex(8)}.pth"
    box.exec(["sh", "-c", f"echo x > {target}/{mark}; echo x > {target}/site-packages/{mark}"]).result(
        ANSWER_SECONDS
    )
    assert not list(Path(target).rglob(mark))


# The network.


def test_no_network_means_no_way_out(box: Sandbox) -> None:
    listener = Listener()
    try:
        code = """
import socket
port = int(sys.argv[1])
for host in ("127.0.0.1", "::1", "0.0.0.0", "localhost"):
    try:
        socket.create_connection((host, port), 2)
        print("connected", host)
    except OSError:
        pass
for family, kind, protocol in ((socket.AF_PACKET, socket.SOCK_RAW, 3), (socket.AF_INET, socket.SOCK_RAW, 1)):
    try:
        socket.socket(family, kind, protocol)
        print("raw", family)
    except OSError:
        pass
print(*[name for _, name in socket.if_nameindex() if name != "lo"])
"""
        assert attempt(box, code, str(listener.port)).strip() == ""
        assert listener.visitors == 0
    finally:
        listener.close()


def test_sockets_in_the_file_system_and_in_the_abstract_are_not_reached(box: Sandbox, tmp_path: Path) -> None:
    name = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as plain:
        abstract.bind(f"\0{name}")
        abstract.listen()
        path = f"/tmp/{name}"
        plain.bind(path)
        try:
            plain.listen()
            code = """
import socket
for address in (chr(0) + sys.argv[1], sys.argv[2]):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        print("connected", repr(address))
    except OSError:
        pass
"""
            assert attempt(box, code, name, path) == ""
        finally:
            os.unlink(path)


def test_a_published_port_listens_on_loopback_only() -> None:
    with Sandbox.run(provider="local", ports=[8000]) as box:
        url = box.url(8000).result(ANSWER_SECONDS).url
        assert url.startswith(("http://127.0.0.1:", "http://localhost:", "http://[::1]:"))
        port = f"{int(url.rsplit(':', 1)[1].strip('/')):04X}"
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in Path(table).read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if local.endswith(":" + port) and state == "0A":
                    assert local.split(":")[0] in ("0100007F", "0" * 24 + "01000000")
