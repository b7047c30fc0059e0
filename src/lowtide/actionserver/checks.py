"""Checks of single values that a request brings."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_SECONDS = 10 * 365 * 86_400
"""Longer than any sandbox lives, and short enough for every clock."""


def is_seconds(value: Any) -> bool:
    """Whether it is a time to wait."""
    return type(value) in (int, float) and 0 <= value <= MAX_SECONDS


def is_text(value: str) -> bool:
    """Without halves of characters: JSON can say them, no file and no terminal can hold them."""
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def fault_of(name: str, value: Any, default: Any) -> str | None:
    """What is wrong with that field of an action, whose default tells its kind; None where nothing is."""
    if name in ("timeout", "no_change_timeout"):
        right = value is None or is_seconds(value)
    elif isinstance(default, bool):
        right = isinstance(value, bool)
    elif isinstance(default, int):
        right = isinstance(value, int)
    elif name == "insert_line":
        right = value is None or type(value) is int
    elif name == "view_range":
        right = value is None or isinstance(value, (list, tuple))
    else:
        right = value is None or isinstance(value, str)
    if not right:
        return f"may not be {value!r}"
    if isinstance(value, str):
        if name != "content" and "\0" in value:
            return "may not contain a NUL character"
        if not is_text(value):
            return "is no text: it has half a character"
    return None
