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
