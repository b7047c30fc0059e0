"""What this machine can and cannot do for local sandboxes, with the fix for each."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide import isolated

_NEWUSER = 0x10000000
_SYSCTLS = (
    # (file, the value that forbids, what to run)
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (or an AppArmor profile with `userns,` for bwrap)",
    ),
)
_BOUNDS = {
    "memory_bytes": "memory of all sandboxes together",
    "pids": "processes of all sandboxes together",
    "cpu_weight": "weight on processors of all sandboxes together",
    "free_bytes": "bytes that all sandboxes leave on the disk",
    "free_inodes": "inodes that all sandboxes leave on the disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing the machine can do or not. `needed`: without it there are no local sandboxes at all."""

    name: str
    ok: bool
    why: str
    fix: str | None = None
    needed: bool = True


def doctor(environ: Mapping[str, str] | None = None) -> list[Check]:
    environ = os.environ if environ is None else environ
    return [
        _machine(),
        _bwrap(environ),
        _user_namespaces(),
        _overlay(),
        *_idmap(environ),
        _python(),
        *(_controller(name) for name in ("memory", "cpu", "pids")),
        _disk(),
        _allow_list(),
        _gvisor(),
        *_defaults(environ),
    ]


def _machine() -> Check:
    from lowtide.providers.local import first, seccomp

    machine = os.uname().machine
    ok = sys.platform == "linux" and seccomp.supported() and first.program() is not None
    return Check(
        name="machine",
        ok=ok,
        why=f"Linux {os.uname().release} on {machine}",
        fix=None if ok else "use docker",
    )


def _bwrap(environ: Mapping[str, str]) -> Check:
    from lowtide.errors import MissingDependencyError
    from lowtide.providers.local import bwrap

    try:
        found = bwrap.find(environ)
    except MissingDependencyError as error:
        return Check(name="bwrap", ok=False, why=str(error), fix=error.install)
    return Check(name="bwrap", ok=True, why=f"{found.path} ({'.'.join(map(str, found.version))})")


def _user_namespaces() -> Check:
    """Tried, because asking is the only sure way; in a process of its own, because only one without threads may."""
    from lowtide.errors import MissingDependencyError

    try:
        tried = subprocess.run(isolated.command(__name__), check=False)
    except (MissingDependencyError, OSError) as error:
        return Check(name="user namespaces", ok=False, why=f"not tried: {error}", fix="set LOWTIDE_PYTHON")
    if tried.returncode == 0 and not _forbidden():
        return Check(name="user namespaces", ok=True, why="allowed")
    return Check(name="user namespaces", ok=False, why="this machine forbids them", fix=_namespace_fix())


def main() -> int:
    """In that process: whether it may have a user namespace, as the exit code."""
    return 0 if ctypes.CDLL(None).unshare(_NEWUSER) == 0 else 1


def _forbidden() -> list[str]:
    if os.geteuid() == 0:
        return []
    found = []
    for file, value, fix in _SYSCTLS:
        with contextlib.suppress(OSError):
            if Path("/proc/sys", file).read_text().strip() == value:
                found.append(fix)
    return found


def _namespace_fix() -> str:
    fixes = _forbidden()
    if fixes:
        return "as root: " + "; ".join(fixes)
    return (
        "in a container, run it with a seccomp profile that allows unshare and clone (docker run "
        "--security-opt seccomp=unconfined --security-opt systempaths=unconfined), or use another provider"
    )


def _allow_list() -> Check:
    """Whether the kernel has nf_tables, which `network=[...]` redirects connections with."""
    import socket

    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).close()
        ok = True
    except OSError:
        ok = False
    return Check(
        name="allow-list",
        ok=ok,
        why="the kernel has netfilter" if ok else "the kernel has no netfilter",
        fix=None if ok else "modprobe nf_tables nft_redir",
        needed=False,
    )


def _gvisor() -> Check:
    """A second wall that this machine can have."""
    found = os.environ.get("LOWTIDE_RUNSC") or shutil.which("runsc")
    return Check(
        name="gvisor",
        ok=found is not None,
        why=f"{found}: isolation='gvisor'; through docker or kubernetes once they know it"
        if found
        else "runsc is not installed; the walls here are namespaces, seccomp and control groups",
        fix=None if found else "install gVisor (Debian: apt install runsc), then isolation='gvisor'",
        needed=False,
    )


def _overlay() -> Check:
    try:
        ok = "\toverlay\n" in Path("/proc/filesystems").read_text() or Path("/sys/module/overlay").is_dir()
    except OSError:
        ok = False
    return Check(
        name="overlay",
        ok=ok,
        why="the kernel has it" if ok else "not loaded",
        fix=None if ok else "modprobe overlay",
    )


def _idmap(environ: Mapping[str, str]) -> list[Check]:
    """Tried in another process, as the spawner does it. Only root needs it: the host's files must become its own."""
    from lowtide.providers.local.prerequisites import NO_OWN_IDS
    from lowtide.providers.local.provider import home_of

    if os.geteuid() != 0:
        return []
    home = home_of(environ)
    while not home.is_dir():
        home = home.parent
    why = _try_idmap("/usr")
    own = _try_idmap(str(home), "writable")
    return [
        Check(
            name="id-mapped mounts",
            ok=why == "ok",
            why="/usr can be mounted as the sandbox's own" if why == "ok" else f"refused for /usr: {why}",
            fix=None
            if why == "ok"
            else "Linux 5.19 or later, and /usr on ext4, xfs, btrfs or overlay; without, only the usual directories of "
            "/usr are writable in sandboxes",
            needed=False,
        ),
        Check(
            name="ids for each sandbox",
            ok=own == "ok",
            why="every sandbox has a range of its own" if own == "ok" else f"refused for {home}: {own}",
            fix=None if own == "ok" else f"{NO_OWN_IDS}; without, all sandboxes of root share one range",
            needed=False,
        ),
    ]


def _try_idmap(*arguments: str) -> str:
    import subprocess

    package = str(Path(__file__).parent)
    program = (
        "import sys; sys.path.append(sys.argv[1]); from spawner.set_up import probe; probe(*sys.argv[2:])"
    )
    done = subprocess.run(
        [isolated.python(), "-I", "-S", "-c", program, package, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or done.stderr.strip()[-200:] or "no answer"


def _python() -> Check:
    from lowtide.providers.local import python_trees

    version, prefixes, trees = sys.version.split()[0], python_trees.prefixes(), python_trees.trees()
    hidden = [prefix for prefix in prefixes if f"{prefix}/lib" not in trees]
    if hidden:
        why = f"{version} at {', '.join(hidden)} is not seen in sandboxes: only its owner may read it"
        fix = f"chmod -R go+rX {' '.join(hidden)}"
        return Check(name="python", ok=False, why=why, fix=fix, needed=False)
    where = ", ".join(trees) if trees else "in /usr"
    return Check(name="python", ok=True, why=f"{version}, visible read-only in sandboxes: {where}")


def _controller(name: str) -> Check:
    from lowtide.providers.local import cgroups

    place = cgroups.hierarchy(name)
    if isinstance(place, str):
        if name == "pids":
            return Check(
                name="pids limit",
                ok=True,
                why="by RLIMIT_NPROC of the sandbox's user namespace",
                needed=False,
            )
        return Check(name=f"{name} limit", ok=False, why=place, fix=cgroups.FIX, needed=False)
    return Check(
        name=f"{name} limit", ok=True, why=f"cgroup v{place.version} at {place.parent}", needed=False
    )


def _disk() -> Check:
    from lowtide.providers.local import disk

    why = disk.missing(0 if os.geteuid() == 0 else None)
    fix = "run as root, install e2fsprogs, load the loop module" if why else None
    return Check(
        name="disk limit", ok=why is None, why=why or "a loop device for each", fix=fix, needed=False
    )


def _defaults(environ: Mapping[str, str]) -> list[Check]:
    """What all sandboxes together may use, and where that comes from."""
    from lowtide.providers.local import bound, bound_groups, cgroups
    from lowtide.providers.local.provider import home_of

    found = bound.Bound.resolve(environ, home_of(environ))
    missing = bound_groups.missing(found)
    checks = []
    for attribute, what in _BOUNDS.items():
        value, source = getattr(found, attribute), found.sources[attribute]
        why = f"{value if value is not None else 'none'} ({source})"
        held = attribute not in missing
        checks.append(
            Check(
                name=what,
                ok=held,
                why=why if held else f"{why}, but it cannot be held here: {missing[attribute]}",
                fix=None if held else cgroups.FIX,
                needed=False,
            )
        )
    return checks


def advice(why: str) -> str:
    """What to change, for the words bwrap or the kernel refused with."""
    text = why.lower()
    if "setting up uid map" in text or "no permissions to creat" in text or "user namespace" in text:
        return f". This machine forbids user namespaces; {_namespace_fix()}"
    if "overlay" in text:
        return (
            ". The kernel refused an overlay mount: it needs Linux 5.11 or later, and LOWTIDE_HOME on a filesystem "
            "that can be an upper layer (ext4, xfs, btrfs, tmpfs; not another overlay, as in a container)"
        )
    if "proc" in text and "not permitted" in text:
        return ". In a container, /proc must not be masked: docker run --security-opt systempaths=unconfined"
    return ". `lowtide doctor` says what this machine can do"
