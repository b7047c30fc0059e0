"""What this machine can and cannot do for local sandboxes, with the fix for each."""

from __future__ import annotations


def advice(why: str) -> str:
    """What to change, for the words bwrap or the kernel refused with."""
    return ""
