"""The end of a log: what is left of the oldest line goes, and so many lines stay."""

from __future__ import annotations


def last_lines(data: bytes, lines: int | None, *, cut: bool) -> bytes:
    """`cut`: what was before `data` is not kept, so that it begins anywhere in a line."""
    if cut:
        data = data[data.find(b"\n") + 1 :]
    if lines is None:
        return data
    at = len(data) - data.endswith(b"\n")
    while lines and at >= 0:
        at = data.rfind(b"\n", 0, at) if at else -1
        lines -= 1
    return data[at + 1 :]
