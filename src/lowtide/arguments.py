"""Arguments that are text: strings, commands, paths, environments, each checked and refused by name.

What an image says of itself goes through the same functions as what a user says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lowtide.errors import ValidationError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_VARIABLES = frozenset({"LOWTIDE_KEY", "LOWTIDE_FIRST"})
"""Of the program inside, on every provider (`providers.inside.program`)."""


def wrong(argument: str, problem: str) -> ValidationError:
    return ValidationError(f"{argument} {problem}", argument=argument)


def refuse(argument: str, problem: str) -> NoReturn:
    raise wrong(argument, problem)


def text(argument: str, value: Any) -> str:
    if not isinstance(value, str):
        refuse(argument, f"must be a string, not {type(value).__name__}")
    if not value:
        refuse(argument, "must not be empty")
    _passable(argument, value)
    return value


def content(argument: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            refuse(argument, "must not contain half a character, a lone surrogate")
    if not isinstance(value, bytes | bytearray | memoryview):
        refuse(argument, f"must be bytes or a string, not {type(value).__name__}")
    return bytes(value)


def path(argument: str, value: Any) -> str:
    """A path in the sandbox: a string, or what stands for one (`pathlib.PurePosixPath`)."""
    return text(argument, os.fspath(value) if isinstance(value, os.PathLike) else value)


def strings(argument: str, value: Any) -> tuple[str, ...]:
    """A list of strings. A bare string is refused: it would be taken apart into its characters."""
    if isinstance(value, str | bytes):
        refuse(argument, f"must be a list of strings, not one string; write [{value!r}]")
    if not isinstance(value, Sequence):
        refuse(argument, f"must be a list of strings, not {type(value).__name__}")
    for item in value:
        if not isinstance(item, str):
            refuse(argument, f"must be a list of strings; it contains {type(item).__name__} {item!r}")
        _passable(argument, item)
    return tuple(value)


def command(argument: str, value: Any) -> str | tuple[str, ...]:
    return text(argument, value) if isinstance(value, str) else argv(argument, value)


def argv(argument: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        refuse(
            argument,
            f"must be a list of strings, not one string: no shell takes it apart; "
            f'write ["sh", "-c", {value!r}] for a shell',
        )
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        value = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in value]
    words = strings(argument, value)
    if not words or not words[0]:
        refuse(argument, "must name a program")
    return words


def absolute_path(argument: str, value: Any) -> str:
    found = path(argument, value)
    if not found.startswith("/"):
        refuse(argument, f"must be an absolute path, not {found!r}")
    return found


def environment(argument: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        refuse(argument, f"must be a mapping of names to strings, not {type(value).__name__}")
    for name, content in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            refuse(argument, f"has a bad name {name!r}: letters, digits and underscores, no digit first")
        if not isinstance(content, str):
            refuse(argument, f"must map to strings; {name} is a {type(content).__name__}")
        _passable(argument, content, f"; {name} does")
    return dict(value)


def sandbox_environment(argument: str, value: Any) -> dict[str, str]:
    """As `environment`, for the variables of a whole sandbox: without those that lowtide's program in there takes out of them."""
    found = environment(argument, value)
    for name in sorted(RESERVED_VARIABLES.intersection(found)):
        refuse(
            argument,
            f"must not have {name}: lowtide's program in the sandbox takes this variable for itself. Choose another name",
        )
    return found


def _passable(argument: str, value: str, which: str = "") -> None:
    """What cannot be handed to a program as an argument or a variable."""
    if "\0" in value:
        refuse(argument, f"must not contain a NUL byte{which}")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        refuse(argument, f"must not contain half a character, a lone surrogate{which}")
