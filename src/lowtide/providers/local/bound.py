"""The bound around all sandboxes of one home: defaults from this machine's size, so that they cannot use it up.

Each value comes from an argument, else a variable, else the table `[local]` of the configuration file, else from
this machine's size. None, or the word `none`, is no bound.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide import config_file
from lowtide.errors import ValidationError

VARIABLES = {
    "memory_bytes": "LOWTIDE_LOCAL_MEMORY_BYTES",
    "pids": "LOWTIDE_LOCAL_PIDS",
    "cpu_weight": "LOWTIDE_LOCAL_CPU_WEIGHT",
    "free_bytes": "LOWTIDE_LOCAL_FREE_BYTES",
    "free_inodes": "LOWTIDE_LOCAL_FREE_INODES",
}
_MEMORY_SHARE = 0.75
_PIDS_SHARE = 0.5
_CPU_WEIGHT = 50
_MOST = {"cpu_weight": 10_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What all sandboxes together may use. None: as much as they like."""

    memory_bytes: int | None
    pids: int | None
    cpu_weight: int | None
    """In hundredths of what one of this machine's own processes has, on each processor that both want."""
    free_bytes: int | None
    free_inodes: int | None
    """What they leave free on the disk of lowtide's home, where that is asked for: below it, the one that holds the
    most is ended."""
    sources: Mapping[str, str]
    """Where each came from: `argument`, a variable's name, a file's path, or `default`."""

    @classmethod
    def resolve(
        cls, environ: Mapping[str, str], home: Path, options: Mapping[str, Any] | None = None
    ) -> Bound:
        """`home` is lowtide's, which has the configuration file."""
        usual: dict[str, int | None] = {
            "memory_bytes": int(_memory() * _MEMORY_SHARE),
            "pids": int(_most_processes() * _PIDS_SHARE),
            "cpu_weight": _CPU_WEIGHT,
            # None: nobody's sandbox is ended because a disk is full, unless somebody has asked for that.
            "free_bytes": None,
            "free_inodes": None,
        }
        path = config_file.path(home)
        table = config_file.read(path).get("local", {})
        for where, keys in ((path, table), ("the local provider", options or {})):
            if unknown := sorted(keys.keys() - usual.keys()):
                known = ", ".join(usual)
                raise ValidationError(
                    f"{where}: unknown bound {', '.join(unknown)}; known are {known}", argument="local"
                )
        variables = {key: text for key, name in VARIABLES.items() if (text := environ.get(name, "").strip())}
        values: dict[str, int | None] = {}
        sources: dict[str, str] = {}
        for key in usual:
            layers = (options or {}, "argument"), (variables, VARIABLES[key]), (table, str(path))
            given, source = next(((said, where) for said, where in layers if key in said), (usual, "default"))
            values[key], sources[key] = _number(given[key], key, source), source
        return cls(**values, sources=sources)


def _number(value: Any, key: str, source: str) -> int | None:
    text = str(value).strip().lower()
    if value is None or text == "none":
        return None
    most = _MOST.get(key, 10**18 - 1)
    if isinstance(value, bool) or not re.fullmatch(r"[1-9][0-9]{0,17}", text) or int(text) > most:
        what = key if source == "argument" else f"{source} ({key})" if "/" in source else source
        raise ValidationError(
            f"{what} must be a positive whole number of at most {most} or none, not {str(value)!r}",
            argument=what,
        )
    return int(text)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _most_processes() -> int:
    found = []
    for file in ("kernel/pid_max", "kernel/threads-max"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path("/proc/sys", file).read_text()))
    return min(found, default=32_768)
