"""Process 1 of every sandbox: a static program of one page. The source is ``first.c``, built by ``build.py``."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def program(architecture: str | None = None) -> bytes | None:
    """The program for this machine, or None for an architecture nobody has compiled it for."""
    try:
        return Path(__file__).with_name(f"first.{architecture or os.uname().machine}").read_bytes()
    except FileNotFoundError:
        return None
