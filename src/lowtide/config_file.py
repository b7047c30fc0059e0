"""The configuration file, `config.toml` in lowtide's home: keywords of sandboxes, and a table for a provider."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from lowtide.errors import ValidationError

TABLES = ("local",)
"""Of providers; everything else are keywords of a sandbox."""


def path(home: Path) -> Path:
    return home / "config.toml"


def read(file: Path) -> dict[str, Any]:
    """All of it; empty when there is none. Raises ValidationError for what is no TOML, or a table that is none."""
    try:
        changed = os.stat(file).st_mtime_ns
    except OSError:
        return {}
    return dict(_parsed(str(file), changed))


@cache
def _parsed(file: str, _changed: int) -> dict[str, Any]:
    import tomllib

    try:
        with open(file, "rb") as opened:
            found = tomllib.load(opened)
    except tomllib.TOMLDecodeError as error:
        raise ValidationError(f"{file}: {error}") from error
    for name in TABLES:
        if not isinstance(found.get(name, {}), dict):
            raise ValidationError(f"{file}: [{name}] must be a table", argument=name)
    return found
