"""Malformed gRPC messages: each field of a message wrong in turn, and bytes that are no message at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

TEXTS = ("", "x", "\0", "a\0b", "٣", "a" * 200_000, "../../../etc/passwd", "\ud7ff", "-")
NUMBERS = (-(2**31), -1, 0, 1, 2**31 - 1)
BYTES = (
    b"\xff",
    b"\x08",
    b"\x0a\x05ab",
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0a\x02\xff\xfe",
    b"\x12" * 400,
    b"\x0b" * 200,
    bytes(range(256)),
)
"""What is no message of any method."""


def kind_of(descriptor: Any) -> type[Message]:
    from google.protobuf.message_factory import GetMessageClass

    found: type[Message] = GetMessageClass(descriptor)
    return found


def wrongly(descriptor: Any, sample: Any, depth: int = 0) -> Iterator[Message]:
    """The sample with one field wrong, each in turn, also in the messages it holds."""
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for text in TEXTS:
                one = _copy(sample)
                try:
                    getattr(one, field.name)[text] = text
                except (TypeError, ValueError, AttributeError):
                    continue
                yield one
            continue
        many = repeated(field)
        if field.message_type is not None:
            if depth > 4 or field.message_type.full_name.startswith("google.protobuf"):
                continue
            inner = getattr(sample, field.name)
            base = (inner[0] if inner else kind_of(field.message_type)()) if many else inner
            for wrong in wrongly(field.message_type, base, depth + 1):
                one = _copy(sample)
                if many:
                    del getattr(one, field.name)[:]
                    getattr(one, field.name).append(wrong)
                else:
                    getattr(one, field.name).CopyFrom(wrong)
                yield one
            continue
        for value in _values(field):
            one = _copy(sample)
            try:
                if many:
                    getattr(one, field.name).extend([value, value])
                else:
                    setattr(one, field.name, value)
            except (TypeError, ValueError):
                continue
            yield one


def repeated(field: Any) -> bool:
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def _values(field: Any) -> tuple[Any, ...]:
    if field.type == field.TYPE_STRING:
        return TEXTS
    if field.type == field.TYPE_BYTES:
        return (b"", b"\0", b"\xff" * 100_000)
    if field.type == field.TYPE_BOOL:
        return (False,) if field.name == "follow" else (True, False)  # followed, a log has no end
    return NUMBERS


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made
