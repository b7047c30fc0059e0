"""The program lowtide brings into every container, and how it gets there.

`inside.c` says what it does. It lives in a small read-only volume that all sandboxes of an engine
share, so that it works with engines on other machines, costs nothing per create, and needs nothing
from the image, not even a shell.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from functools import cache
from importlib import resources

from lowtide.errors import UnsupportedError
from lowtide.providers.base import ProcessSpec

DIRECTORY = "/.lowtide"
PROGRAM = f"{DIRECTORY}/inside"
CACHE_LABEL = "lowtide-cache"
EXPIRED = 124
"""Exit code of PID 1 when the lifetime is over."""

_ARCHITECTURES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


@cache
def program(architecture: str) -> bytes:
    name = _ARCHITECTURES.get(architecture)
    if name is None:
        raise UnsupportedError(
            f"lowtide's docker provider has no program for engines on {architecture}",
            provider="docker",
            feature=f"architecture {architecture}",
            alternative="an engine on x86_64 or aarch64",
        )
    return resources.files(__package__).joinpath(f"inside.{name}").read_bytes()


@cache
def volume_name(architecture: str) -> str:
    """Named after the content: another version of lowtide on the same engine has its own."""
    return f"lowtide-inside-{hashlib.sha256(program(architecture)).hexdigest()[:12]}"


def volume_archive(architecture: str) -> bytes:
    data = program(architecture)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo("inside")
        entry.size, entry.mode = len(data), 0o555
        tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def run(token: str, spec: ProcessSpec) -> list[str]:
    """The command line under which a command runs."""
    terminal = f"t{spec.tty.rows}x{spec.tty.columns}" if spec.tty else "-"
    return [PROGRAM, "run", token, terminal, spec.cwd or "", *spec.argv]
