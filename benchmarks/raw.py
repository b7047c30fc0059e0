"""The raw mechanism: bubblewrap and nsenter as one would call them by hand, with the mounts of a local sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lowtide.providers.local import bwrap, skeleton
from lowtide.providers.local.prerequisites import ID_BASE


class RawBubblewrap:
    """Starts bwrap with what a default sandbox has: two overlays, /dev, /proc, a small /dev/shm, the Python prefixes."""

    def __init__(self, home: Path) -> None:
        self.program = bwrap.find(os.environ).path
        self._layers = Path(tempfile.mkdtemp(prefix="raw-", dir=home))
        # The skeleton of lowtide's own sandboxes, so that both look up the same files.
        owner = ID_BASE if os.geteuid() == 0 else None
        self.skeleton = skeleton.skeleton(home / "local" / "base", owner).root
        self._count = 0

    def argv(self, *command: str) -> list[str]:
        """The whole command line, with a fresh upper layer that is made here and not in the measured time."""
        self._count += 1
        place = self._layers / str(self._count)
        for name in ("root", "root-work", "usr", "usr-work"):
            (place / name).mkdir(parents=True)
        argv = [self.program, "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL"]
        argv += ["--overlay-src", self.skeleton, "--overlay", f"{place}/root", f"{place}/root-work", "/"]
        argv += ["--overlay-src", "/usr", "--overlay", f"{place}/usr", f"{place}/usr-work", "/usr"]
        for prefix in sorted({sys.base_prefix, sys.prefix}):
            if not prefix.startswith("/usr"):
                argv += ["--ro-bind", prefix, prefix]
        argv += ["--dev", "/dev", "--size", str(bwrap.SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
        argv += ["--remount-ro", "/dev", "--proc", "/proc", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
        return [*argv, "--chdir", "/root", "--", *command]

    def close(self) -> None:
        shutil.rmtree(self._layers, ignore_errors=True)


def run(argv: list[str]) -> None:
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)


def nsenter(pid: int, *command: str) -> list[str]:
    """Into every namespace of a process. None of the restrictions of a sandbox: the speed reference only."""
    program = shutil.which("nsenter")
    if program is None:
        raise SystemExit("nsenter is not installed; it is in Debian's util-linux")
    kinds = ("--user", "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
    return [program, "--target", str(pid), *kinds, "--", *command]
