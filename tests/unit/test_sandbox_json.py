"""JSON of a hostile sandbox is measured before it is parsed: what it would become in memory is never underestimated."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from lowtide import sandbox_json

MIB = 1 << 20
COUNT = 1 << 15


def peak(work: Callable[[], Any]) -> int:
    """The most bytes that were allocated at one time."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"":[]}', b"[[[]]]"], ids=bytes.decode)
def test_a_text_that_becomes_many_times_its_size_is_refused_before_anything_is_made(item: bytes) -> None:
    hostile = b"[" + (item + b",") * (36 * MIB // (len(item) + 1)) + item + b"]"

    def refused() -> None:
        with pytest.raises(sandbox_json.TooLargeError, match="1024 MiB"):
            sandbox_json.parse(hostile)

    assert peak(refused) < 8 * MIB


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"[" + b",".join([b"[]"] * COUNT) + b"]", id="lists"),
        pytest.param(b"[" + b",".join([b'{"a":{}}'] * COUNT) + b"]", id="dictionaries"),
        pytest.param(b"{" + b",".join(b'"%d":0' % n for n in range(COUNT)) + b"}", id="keys"),
        pytest.param(b"[" + b",".join(b'"%d"' % n for n in range(COUNT)) + b"]", id="strings"),
        pytest.param(b"[" + b",".join(b"%d" % (n << 40) for n in range(COUNT)) + b"]", id="whole numbers"),
        pytest.param(b"[" + b",".join([b"1.5"] * COUNT) + b"]", id="fractions"),
        pytest.param(b"[" + b",".join([b"9" * 4000] * 300) + b"]", id="long numbers"),
        pytest.param(b'"' + b"x" * (2 * MIB) + b'"', id="text"),
        pytest.param(f'"{"x" * (2 * MIB)}\u00ff"'.encode(), id="text with one Latin character"),
        pytest.param(f'"{"x" * (2 * MIB)}\u4e00"'.encode(), id="text with one character of two bytes"),
        pytest.param(f'"{"x" * (2 * MIB)}\U0001f600"'.encode(), id="text with one character of four bytes"),
        pytest.param(b'"' + b"x" * (2 * MIB) + b"\\u4e00" + b'"', id="text with one escape"),
        pytest.param(b'"' + b"x" * (2 * MIB) + b"\\ud83d\\ude00" + b'"', id="text with a surrogate pair"),
        pytest.param(b'"' + b"\\u0041" * (MIB // 2) + b'"', id="escapes"),
        pytest.param(b'"' + b'\\\\\\"' * (MIB // 2) + b'"', id="backslashes and quotes"),
        pytest.param(b" " * (2 * MIB) + b"[]", id="spaces"),
    ],
)
def test_what_parsing_takes_is_never_underestimated(data: bytes) -> None:
    assert sandbox_json._memory(data) >= peak(lambda: json.loads(data))


def test_brackets_in_a_text_are_text() -> None:
    """Also where a string, or a backslash in it, lies across the pieces in which the data is looked at."""
    for shift in range(4):
        text = " " * shift + '[{",:\\"' * (9 * MIB // 7)
        data = json.dumps([text]).encode()
        assert sandbox_json.parse(data) == [text]
        assert sandbox_json._memory(data) < 8 * len(data)


def test_no_json_is_a_value_error() -> None:
    for data in (b"", b"[", b"\xff", b'"', b"nope" * MIB):
        with pytest.raises(ValueError) as refused:
            sandbox_json.parse(data)
        assert not isinstance(refused.value, sandbox_json.TooLargeError)
