"""JSON that a sandbox has written: parsed only when what it becomes fits into memory.

A few bytes of JSON become many in memory: ``[]`` takes 30 times its size as a list. The text alone says how many lists,
dictionaries and strings there are, so that the answer of a hostile sandbox is refused before any of them is made.
"""

from __future__ import annotations

import json
from typing import Any

MOST_MEMORY = 1 << 30
"""What the decoded text and everything parsed from it may take, estimated from above."""
_SMALL = 1 << 20  # whatever it holds, it becomes less than 64 MiB
_WINDOW = 1 << 18
# What one of each takes at most, with its place in the list or dictionary around it.
_LIST, _DICTIONARY, _MEMBER, _KEY, _STRING = 96, 240, 48, 160, 64
_LATIN = bytes(range(0xC4))  # how characters begin that take one byte in memory
_WIDE = bytes(range(0xF0))  # and up to two


class TooLargeError(ValueError):
    """What it would become takes more memory than an answer may."""


def parse(data: bytes | bytearray) -> Any:
    """What `data` says. ValueError or RecursionError: it is no JSON; TooLargeError, a ValueError: it is too much."""
    if len(data) > _SMALL and _memory(data) > MOST_MEMORY:
        raise TooLargeError(
            f"{len(data)} bytes of JSON would take more than {MOST_MEMORY >> 20} MiB of memory"
        )
    return json.loads(data)


def _memory(data: bytes | bytearray) -> int:
    """At least the bytes that parsing takes. In one pass, and with no more memory than two windows."""
    structure = text = escapes = 0
    character = text_character = 1  # bytes that the widest one takes: in the decoded text, and in a string
    inside, rest = 0, b""  # whether the window begins in a string; a backslash whose character is in the next
    for at in range(0, len(data), _WINDOW):
        window = rest + data[at : at + _WINDOW]
        if not window.isascii():
            character = max(character, _width(window))
        window = window.replace(b"\\\\", b"__")
        rest = b"\\" if window.endswith(b"\\") else b""
        window = window[: len(window) - len(rest)]
        if b"\\u" in window:
            escapes += window.count(b"\\u")
            surrogates = b"\\ud" in window or b"\\uD" in window
            text_character = max(text_character, 4 if surrogates else 2)
        parts = window.replace(b'\\"', b"__").split(b'"')
        outside = b"".join(parts[inside::2])
        text += len(window) - len(outside)
        structure += (
            outside.count(b"[") * _LIST
            + outside.count(b"{") * _DICTIONARY
            + outside.count(b",") * _MEMBER
            + outside.count(b":") * _KEY
            + (len(parts) // 2) * _STRING
        )
        inside ^= (len(parts) - 1) & 1
    text_character = max(text_character, character)
    # A string with escapes is put together from pieces, of a byte for each character, in a buffer a quarter too large.
    return (
        structure + len(data) * (character + 1) + max(0, text - 5 * escapes) * (5 * text_character + 4) // 4
    )


def _width(window: bytes | bytearray) -> int:
    """Of its widest character: CPython gives all characters of a text as many bytes as the widest one needs."""
    beyond = window.translate(None, _LATIN)
    if not beyond:
        return 1
    return 4 if beyond.translate(None, _WIDE) else 2
