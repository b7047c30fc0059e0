"""What can be followed of a Dockerfile without a builder."""

from __future__ import annotations

import contextlib
import shlex


def variables(text: str) -> dict[str, str]:
    """Its ENV lines; one that cannot be read is left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.upper().startswith("ENV "):
            with contextlib.suppress(ValueError):
                for word in shlex.split(line[4:]):
                    key, equals, value = word.partition("=")
                    if equals:
                        found[key] = value
    return found
