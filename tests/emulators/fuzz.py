"""Random requests after a client's own models: mostly of the right shape, so that they get far, and wrong somewhere."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin
from urllib.parse import quote

from google.protobuf.message import Message
from hypothesis import strategies as st

from tests.emulators.hostile import BODIES, HEADERS, WRONG, Call
from tests.emulators.hostile_messages import BYTES, repeated

WORDS = (
    "",
    "x",
    "true",
    "echo hi",
    "exit 3",
    "/tmp/a",
    "/",
    "..",
    "~",
    "\0",
    "a\0b",
    "\ud800",
    "\u0663",
    "é" * 300,
    "-1",
    "1e9",
)
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 15, 3600, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64, 10**30)
_SEGMENTS = ("none", "%00", "%FF", "..%2F..", "%D9%A3", "9" * 30, "x" * 300, "%F0%9F%92%A9", "%20", "a%2Fb")

texts = st.sampled_from(WORDS) | st.text(max_size=12)
numbers = st.sampled_from(NUMBERS) | st.integers(-5, 5000)
anything: st.SearchStrategy[Any] = st.sampled_from(WRONG) | st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def sometimes_wrong(draw: Any, right: st.SearchStrategy[Any]) -> Any:
    return draw(anything if draw(st.integers(0, 7)) == 3 else right)


def values(kind: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """What a field of that type may hold; now and then what it may not."""
    return sometimes_wrong(_right(kind, depth))


def _like(sample: Any) -> st.SearchStrategy[Any]:
    """Values of the same types as a sample has; it itself more often than not."""
    if isinstance(sample, dict):
        return st.fixed_dictionaries({name: sometimes_wrong(_like(one)) for name, one in sample.items()})
    kinds = {bool: st.booleans(), int: numbers, str: texts}
    return st.just(sample) | kinds.get(type(sample), anything)


def _right(kind: Any, depth: int) -> st.SearchStrategy[Any]:
    if isinstance(kind, dict):
        return _like(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is typing.Annotated or str(origin).endswith(("Required", "NotRequired")):
        return _right(arguments[0], depth)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([_right(one, depth) for one in arguments if one is not type(None)] or [st.none()])
    if depth > 3 or kind is Any:
        return anything
    if origin in (dict, Mapping) or kind is dict:
        return st.dictionaries(texts, values(arguments[1] if arguments else Any, depth + 1), max_size=3)
    if origin is not None and inspect.isclass(origin) and issubclass(origin, typing.Iterable) and arguments:
        return st.lists(values(arguments[0], depth + 1), max_size=3)
    if not inspect.isclass(kind):
        return anything
    if issubclass(kind, enum.Enum):
        return st.sampled_from([one.value for one in kind])
    if issubclass(kind, bool):
        return st.booleans()
    if issubclass(kind, int):
        return numbers
    if issubclass(kind, float):
        return numbers | st.floats()
    if issubclass(kind, str):
        return texts
    found = _fields(kind)
    if not found:
        return anything
    return st.fixed_dictionaries({}, optional={name: values(one, depth + 1) for name, one in found.items()})


def _fields(kind: type) -> dict[str, Any]:
    """The JSON names of a model's fields and their types: pydantic's, attrs', or a TypedDict's."""
    if hasattr(kind, "model_fields"):
        return {info.alias or name: info.annotation for name, info in kind.model_fields.items()}
    module = inspect.getmodule(kind)
    names = dict(vars(module)) if module is not None else {}
    if hasattr(kind, "__attrs_attrs__"):
        package = __import__(kind.__module__.rpartition(".")[0], fromlist=["x"])
        hints = typing.get_type_hints(kind, {**vars(package), **names})
        source = inspect.getsource(kind.from_dict)  # type: ignore[attr-defined]
        told = dict(re.findall(r'_?(\w+) = (?:\w+\()?d\.pop\(\s*"(\w+)"', source))
        return {told[name]: hint for name, hint in hints.items() if name in told}
    if typing.is_typeddict(kind) or hasattr(kind, "__total__"):
        return dict(typing.get_type_hints(kind, names))
    return {}


KNOWN = "known-"
"""Stands for an id of that name until the request is sent: what is drawn must not depend on the server."""


@st.composite
def requests(
    draw: Any, calls: list[Call], known: tuple[str, ...], samples: Mapping[str, dict[str, Any]]
) -> tuple[Call, str, bytes, dict[bytes, bytes]]:
    """A call with its path and query, a body and headers."""
    call = draw(st.sampled_from(calls))

    def segment(found: re.Match[str]) -> str:
        wrong = found[1] not in known or draw(st.integers(0, 5)) == 3
        return str(draw(st.sampled_from(_SEGMENTS))) if wrong else KNOWN + found[1]

    path = re.sub(r"\{(\w+)\}", segment, call.path)
    for name in call.query:
        if draw(st.booleans()):
            text = str(draw(st.one_of(texts, numbers.map(str))))
            path += ("&" if "?" in path else "?") + f"{name}={quote(text.encode(errors='surrogatepass'))}"
    body = b""
    if call.method not in ("GET", "HEAD"):
        if draw(st.integers(0, 15)) == 3:
            body = draw(st.sampled_from(BODIES))
        else:
            given = draw(_right(call.model, 0) if call.model is not None else values(dict))
            sample = samples.get(call.path)
            if sample is not None and isinstance(given, dict) and draw(st.integers(0, 2)) != 1:
                given = {**given, **sample}
            body = json.dumps(given).encode()
    headers = draw(st.sampled_from(HEADERS)) if draw(st.integers(0, 19)) == 3 else {}
    return call, path, body, headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """A message, once the ids are known: fields that are set, and a byte that is another one."""

    message: Message
    place: int | None
    byte: int
    instead: bytes | None

    def data(self, known: Mapping[str, str]) -> bytes:
        if self.instead is not None:
            return self.instead
        _name(self.message, known)
        data = self.message.SerializeToString()
        if data and self.place is not None:
            place = self.place % len(data)
            data = data[:place] + bytes([self.byte]) + data[place + 1 :]
        return data


@st.composite
def messages(draw: Any, descriptor: Any, sample: Message, known: tuple[str, ...]) -> Edits:
    """A message with some of its fields set, over a sample that would do; now and then bytes that are none."""
    raw = draw(st.sampled_from(BYTES)) if draw(st.integers(0, 15)) == 3 else None
    made = type(sample)()
    made.CopyFrom(sample)
    for _ in range(draw(st.integers(0, 3))):
        _set_one(draw, descriptor, made, known, 0)
    place = draw(st.integers(0, 10_000)) if draw(st.integers(0, 15)) == 3 else None
    return Edits(message=made, place=place, byte=draw(st.integers(0, 255)), instead=raw)


def _name(message: Any, known: Mapping[str, str]) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry:
                for one in value if repeated(field) else (value,):
                    _name(one, known)
        elif isinstance(value, str) and value.startswith(KNOWN):
            setattr(message, field.name, known[value.removeprefix(KNOWN)])


def _set_one(draw: Any, descriptor: Any, message: Any, known: tuple[str, ...], depth: int) -> None:
    if not descriptor.fields:
        return
    field = draw(st.sampled_from(tuple(descriptor.fields)))
    inner = field.message_type
    try:
        if inner is not None and inner.GetOptions().map_entry:
            value = inner.fields_by_name["value"]
            if value.message_type is None:
                getattr(message, field.name)[draw(texts)] = draw(_scalar(value))
            else:
                _set_one(
                    draw, value.message_type, getattr(message, field.name)[draw(texts)], known, depth + 1
                )
        elif inner is not None:
            here = getattr(message, field.name)
            target = (here[0] if here and draw(st.booleans()) else here.add()) if repeated(field) else here
            if not repeated(field):
                target.SetInParent()
            for _ in range(draw(st.integers(0, 2)) if depth < 4 else 0):
                _set_one(draw, inner, target, known, depth + 1)
        elif field.name in known and draw(st.integers(0, 4)) != 2:
            setattr(message, field.name, KNOWN + field.name)
        elif repeated(field):
            getattr(message, field.name).extend(draw(st.lists(_scalar(field), max_size=3)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    except (TypeError, ValueError):  # what this field cannot even carry
        pass


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    if field.name in ("follow", "wait_until_ready"):  # followed, a log has no end
        return st.just(False)
    if field.type == field.TYPE_STRING:
        return texts
    if field.type == field.TYPE_BYTES:
        return st.sampled_from((b"", b"\0", b"\xff" * 5000, b"text"))
    if field.type == field.TYPE_BOOL:
        return st.booleans()
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return st.floats() | numbers.map(float)
    if field.type == field.TYPE_ENUM:
        return st.sampled_from([one.number for one in field.enum_type.values]) | st.just(99)
    return st.sampled_from((-(2**31), -1, 0, 1, 2, 15, 600, 2**31 - 1, 2**32 - 1, 2**63 - 1))
