"""Text for people: one-line messages, ages, sizes, tables, JSON. No rich here: `lowtide ls` has to start fast."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any


def clean(text: str) -> str:
    """Without control characters: names and messages can come from a sandbox, terminals obey escapes."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def one_line(text: str) -> str:
    return clean(" ".join(text.split()))


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """Columns as wide as their widest cell; `empty` is what is said instead of a table without rows."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if not cells:
        print(empty)
        return
    widths = [max(len(line[i]) for line in [list(heads), *cells]) for i in range(len(heads))]
    styled = sys.stdout.isatty()
    columns = shutil.get_terminal_size((0, 0)).columns if styled or os.environ.get("COLUMNS") else 0
    if 0 < columns < sum(widths) + 2 * (len(widths) - 1):
        for line in cells:
            _print_narrow(heads, line, columns)
        return
    for number, line in enumerate([[head.upper() for head in heads], *cells]):
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        print(f"\x1b[1m{text}\x1b[0m" if styled and number == 0 else text)


def _print_narrow(heads: Sequence[str], cells: Sequence[str], columns: int) -> None:
    """One row as lines that fit: what it is first, then the rest with its names."""
    print(cells[0])
    line = ""
    for head, cell in zip(heads[1:], cells[1:], strict=True):
        if cell == "-":
            continue
        word = f"{head} {cell}"
        if line and len(line) + 3 + len(word) > columns:
            print(line[:columns])
            line = ""
        line = f"{line}, {word}" if line else f"  {word}"
        while len(line) > columns:
            print(line[:columns])
            line = f"    {line[columns:]}"
    if line:
        print(line)


def timestamp(seconds: float | datetime | None) -> str | None:
    """ISO 8601 in UTC, for JSON."""
    if seconds is None:
        return None
    moment = seconds if isinstance(seconds, datetime) else datetime.fromtimestamp(seconds, UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix(moment: float | datetime | None) -> float | None:
    return moment.timestamp() if isinstance(moment, datetime) else moment


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h`, `2 d`: one unit is enough for a person."""
    seconds = max(0.0, seconds)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds / divisor)} {unit}"
    return f"{int(seconds / 86_400)} d"


def age(created_at: float | datetime | None) -> str:
    created = unix(created_at)
    return "-" if created is None else duration(time.time() - created)


def until(moment: float | datetime | None) -> str:
    end = unix(moment)
    if end is None:
        return "-"
    left = end - time.time()
    return f"in {duration(left)}" if left > 0 else "overdue"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
