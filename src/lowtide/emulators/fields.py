"""The types of a request's fields, by table: what a service's own schema says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.emulators.request_check import Malformed


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field may be, in a word for the error and as a test."""

    name: str
    holds: Callable[[Any], bool]


def _is_text(given: Any) -> bool:
    return isinstance(given, str) and "\0" not in given


def _is_texts(given: Any) -> bool:
    return isinstance(given, dict) and all(_is_text(one) for pair in given.items() for one in pair)


TEXT = Kind("a string without null bytes", _is_text)
FLAG = Kind("true or false", lambda given: isinstance(given, bool))
TEXTS = Kind("an object of strings", _is_texts)
OBJECT = Kind("an object", lambda given: isinstance(given, dict))
LIST_OF_TEXT = Kind("a list of strings", lambda given: isinstance(given, list) and all(map(_is_text, given)))
LIST_OF_OBJECTS = Kind(
    "a list of objects",
    lambda given: isinstance(given, list) and all(isinstance(one, dict) for one in given),
)


def whole(lowest: int, largest: int) -> Kind:
    return Kind(
        f"a whole number from {lowest} to {largest}",
        lambda given: type(given) is int and lowest <= given <= largest,
    )


def seconds(largest: float) -> Kind:
    return Kind(
        f"a number of seconds from 0 to {largest:g}",
        lambda given: (
            isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= largest
        ),
    )


def check_fields(
    body: Mapping[str, Any], kinds: Mapping[str, Kind], *, required: tuple[str, ...] = ()
) -> None:
    """Raise `Malformed` for the first field that is not what it may be. None counts as not given."""
    for name in required:
        if body.get(name) is None:
            raise Malformed(f"{name} is required")
    for name, kind in kinds.items():
        if body.get(name) is not None and not kind.holds(body[name]):
            raise Malformed(f"{name} must be {kind.name}")
