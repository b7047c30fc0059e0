"""Attempts to see or inherit what is the owner's: paths, priorities, signals, limits, descriptors."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import state

from lowtide.machine import home
from tests.escape.attempt import LeftOut, Target, attempt


@attempt("learn from the mounts where lowtide keeps its state")
def home_in_mounts(target: Target) -> str | None:
    seen = target.python("""
for name in ("mountinfo", "mounts", "mountstats"):
    print(tried(lambda: open("/proc/self/" + name).read()) or "")
""")
    return f"{home()} is in the list of mounts" if str(home()) in seen else None


_OWNER = """
import os, sys
from lowtide import Sandbox
with Sandbox.run("sleep", "1000", provider="local") as box:
    for pid in ("self", "2"):
        print(box.exec(["sh", "-c", f"cat /proc/{pid}/{sys.argv[1]}"]).result(60).stdout)
"""


def _as_seen_inside(target: Target, name: str, **keywords: object) -> str:
    """A file of /proc of an entered and of the first process, of an owner that has changed something of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _OWNER, name],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        **keywords,  # type: ignore[call-overload]
    )
    return str(done.stdout)


@attempt("inherit the owner's ignored and blocked signals")
def ignored_signals(target: Target) -> str | None:
    import signal

    def odd() -> None:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGTSTP, signal.SIGRTMIN + 3):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH, signal.SIGRTMIN + 4])

    status = _as_seen_inside(target, "status", preexec_fn=odd)
    # 32 and 33 are the C library's own: its posix_spawn ignores them in whatever it starts.
    bad = [
        line
        for line in status.splitlines()
        if line.startswith(("SigIgn", "SigBlk")) and int(line.split()[1], 16) & ~(3 << 31)
    ]
    return ", ".join(bad) or None


@attempt("inherit the owner's nice value")
def nice_value(target: Target) -> str | None:
    if not target.root:
        raise LeftOut("an ordinary user cannot take a nice value back")
    stats = _as_seen_inside(target, "stat", preexec_fn=lambda: os.nice(7))
    values = {line.rpartition(")")[2].split()[16] for line in stats.splitlines() if line}
    return None if values == {"0"} else f"nice {values}"


@attempt("inherit the owner's umask")
def umask(target: Target) -> str | None:
    status = _as_seen_inside(target, "status", preexec_fn=lambda: os.umask(0o000))
    masks = {line.split()[1] for line in status.splitlines() if line.startswith("Umask")}
    return None if masks == {"0022"} else f"umask {masks}"


@attempt("inherit the owner's resource limits")
def limits(target: Target) -> str | None:
    import resource

    def odd() -> None:
        for name, value in ((resource.RLIMIT_CPU, 4000), (resource.RLIMIT_FSIZE, 1 << 40)):
            resource.setrlimit(name, (value, resource.RLIM_INFINITY))

    text = _as_seen_inside(target, "limits", preexec_fn=odd)
    bad = [
        line
        for line in text.splitlines()
        if line.startswith(("Max cpu time", "Max file size")) and "4000" in line
    ]
    return ", ".join(bad) or None


@attempt("inherit the owner's protection from the out-of-memory killer")
def out_of_memory_score(target: Target) -> str | None:
    if not target.root:
        raise LeftOut("only root can be protected so")

    def odd() -> None:
        Path("/proc/self/oom_score_adj").write_text("-900")

    try:
        text = _as_seen_inside(target, "oom_score_adj", preexec_fn=odd)
    except subprocess.SubprocessError as error:
        raise LeftOut("this machine lets nobody be protected so") from error
    bad = [line for line in text.split() if int(line) < 0]
    return f"oom_score_adj {bad}" if bad else None


@attempt("inherit a descriptor of the owner")
def descriptors(target: Target) -> str | None:
    said = target.python("print(sorted(int(d) for d in os.listdir('/proc/self/fd')))")
    return None if said == "[0, 1, 2, 3]" else said


@attempt("inherit the owner's environment")
def environment(target: Target) -> str | None:
    secret = secrets.token_hex(8)
    os.environ["ESCAPE_SECRET"] = secret
    try:
        with target.make() as box:
            said = target.python(
                """
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    print(tried(lambda: open(f"/proc/{pid}/environ").read()), tried(lambda: open(f"/proc/{pid}/cmdline").read()))
""",
                box=box,
            )
        return "the secret is there" if secret in said else None
    finally:
        del os.environ["ESCAPE_SECRET"]


@attempt("open the owner's terminal")
def terminal(target: Target) -> str | None:
    return (
        target.python("print('opened' if tried(os.open, '/dev/tty', os.O_RDWR) is not None else '')") or None
    )


@attempt("tell another sandbox something through a descriptor that both were given")
def shared_descriptors(target: Target) -> str | None:
    """Flags, signal and owner are of the open file, and whoever else has the same one sees them."""
    say = "import fcntl\nfor fd in (0, 1, 2): tried(fcntl.fcntl, fd, 10, 42 + fd)"  # F_SETSIG
    hear = "import fcntl\nfor fd in (0, 1, 2): print(tried(fcntl.fcntl, fd, 11))"  # F_GETSIG
    with target.make() as other:
        for _ in range(3):  # the first command is started in another way than later ones
            target.python(say)
            heard = target.python(hear, box=other).split()
            if not set(heard) <= {"0", "None"}:
                return f"it heard {heard}"
    return None


@attempt(
    "become the sandbox's user on this machine: a set-user-ID program in a snapshot, for whoever knows its path"
)
def set_user_id_in_a_snapshot(target: Target) -> str | None:
    """The state directory is one that was there before, and open. It does not close what is above the snapshot."""
    place = Path(tempfile.mkdtemp(prefix="escape-", dir="/tmp"))
    place.chmod(0o755)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _SNAPSHOT_OWNER],
            env={**os.environ, "LOWTIDE_HOME": str(place)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        program = Path(done.stdout.strip())
        assert program.stat().st_mode & 0o4000
        on_the_way = [path for path in program.parents if path.is_relative_to(place)]
        closed = any(not path.stat().st_mode & 0o001 for path in on_the_way)
        return None if closed else f"anybody can run {program}"
    finally:
        state.end(place)


_SNAPSHOT_OWNER = """
from lowtide import Sandbox
from lowtide.machine import home
with Sandbox.run(provider="local") as box:
    box.exec(["sh", "-c", "cp /bin/sh /opt/sh; chmod 4755 /opt/sh"], check=True).result(60)
    print(home() / "local" / "snapshots" / box.snapshot().result(60) / "root/opt/sh")
"""


@attempt("tell another sandbox something by a lock on a device node")
def lock_on_a_device(target: Target) -> str | None:
    if not target.root:
        raise LeftOut("an ordinary user's sandboxes have this machine's nodes (docs/security.md)")
    nodes = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/proc/self/fd/0"]
    with target.make() as one, target.make() as other:
        held = "import fcntl, time\nheld = [open(name, 'rb') for name in sys.argv[1:]]\n"
        held += "for file in held[:5]: fcntl.flock(file, fcntl.LOCK_EX)\nprint('held', flush=True)\ntime.sleep(600)"
        process = one.exec(["python3", "-c", "import sys\n" + held, *nodes])
        next(iter(process.stdout))
        seen = target.python(
            """
import fcntl
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(name)
""",
            *nodes,
            box=other,
        )
    return f"locks are seen on {seen.split()}" if seen else None
