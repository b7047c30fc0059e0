"""Virtual environments of their own for the frameworks, under the cache directory and never in this repository."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide-tests/frameworks"


class NotHere(Exception):
    """Why a framework cannot be run on this machine."""


def environment(name: str, version: str, packages: list[str], extras: str | None) -> Path:
    """The Python of the virtual environment `name`, made or mended if need be.

    `version` is the oldest Python that will do; `extras` are those of lowtide, which is not installed there for None.
    """
    project = (ROOT / "pyproject.toml").read_bytes().partition(b"\n[tool.")[0] if extras is not None else b""
    key = hashlib.sha256("\0".join([str(ROOT), *packages, extras or ""]).encode() + project).hexdigest()[:12]
    place = CACHE / f"{name}-{key}"
    python = place / "bin/python"
    if (place / "ready").exists():
        return python
    base = find_python(version)
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(f"{name}-????????????"):  # of another state of this or another checkout
        if old != place and time.time() - old.stat().st_mtime > 7 * 86400:
            shutil.rmtree(old, ignore_errors=True)
    wanted = [*packages, *(["-e", f"{ROOT}[{extras}]"] if extras is not None else [])]
    uv = [sys.executable, "-m", "uv"]
    if subprocess.run([*uv, "--version"], capture_output=True).returncode == 0:
        must([*uv, "venv", "-q", "--clear", "-p", base, str(place)])
        must([*uv, "pip", "install", "-q", "--compile-bytecode", "-p", str(python), *wanted])
    else:
        must([base, "-m", "venv", "--clear", str(place)])
        must([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted])
    (place / "ready").touch()
    return python


def source(package: str, version: str) -> Path:
    """The unpacked source distribution, for the tests that only it has."""
    place = CACHE / f"source-{package}-{version}"
    if not place.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as new:
            download = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--disable-pip-version-check",
                "--no-deps",
            ]
            must([*download, "--no-binary", package, "-d", new, f"{package}=={version}"])
            (archive,) = Path(new).glob("*.tar.gz")
            with tarfile.open(archive) as file:
                file.extractall(Path(new, "all"), filter="data")
            (whole,) = Path(new, "all").iterdir()
            whole.rename(place)
    return place


def must(command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as own:  # uv leaves its locks there
        environ = {**os.environ, "TMPDIR": own}
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise NotHere(f"it cannot be installed: {' '.join(done.stderr.split())[-300:]}")


def find_python(oldest: str) -> str:
    """This one, if it is new enough; else another that `scripts/pythons` finds."""
    least = tuple(map(int, oldest.split(".")))
    if sys.version_info[:2] >= least:
        return sys.executable
    listed = subprocess.run([str(ROOT / "scripts/pythons")], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        version, _, path = line.partition(" ")
        if path and tuple(map(int, version.split("."))) >= least:
            return path.strip()
    raise NotHere(f"it needs Python {oldest}, which is not on this machine")
