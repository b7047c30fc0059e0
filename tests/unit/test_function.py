"""A function that runs in a sandbox of its own: what goes there, what comes back, and what is left."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import sys
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from json import dumps
from math import sqrt
from pathlib import Path
from random import choice

import pytest

from lowtide import Sandbox, Session
from lowtide.errors import SandboxError, SandboxExecutionError, SessionClosedError, ValidationError

FACTOR = 3
HANDLE = object()


def tripled(value: int) -> int:
    return value * FACTOR


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(tags=["functions"]) as session:
        yield session
    assert Sandbox.list(tags=["functions"]).result() == []


def test_it_takes_along_what_it_uses(session: Session) -> None:
    words = ["a", "b"]

    @session.function(environment_variables={"WORD": "in the sandbox"})
    def work(x: int, *, more: list[int] | None = None) -> list[object]:
        import os

        return [tripled(x), math.floor(2.5), words, more, os.environ["WORD"]]

    assert work.remote(2, more=[1]).result(60) == [6, 2, ["a", "b"], [1], "in the sandbox"]
    assert session.sandbox_count == 0


def test_what_it_imported_from_a_module_is_imported_there_too(session: Session) -> None:
    @session.function()
    def work() -> list[object]:
        counted = Counter("aab")
        return [
            dumps(counted, sort_keys=True),
            sqrt(4.0),
            Path("/a").name,
            choice([5]),
            reduce(int.__add__, [1, 2]),
        ]

    assert work.remote().result(60) == ['{"a": 2, "b": 1}', 2.0, "a", 5, 3]


def test_what_it_prints_is_not_its_result(session: Session) -> None:
    @session.function()
    def loud() -> str:
        print(json.dumps("printed"))
        return "returned"

    assert loud.remote().result(60) == "returned"


def test_what_it_raises_is_told_with_its_traceback(session: Session) -> None:
    @session.function()
    def broken() -> None:
        raise ZeroDivisionError("in there")

    with pytest.raises(SandboxExecutionError) as caught:
        broken.remote().result(60)
    assert caught.value.result is not None
    assert "ZeroDivisionError: in there" in caught.value.result.stderr


async def test_it_is_awaited_in_async_code(session: Session) -> None:
    @session.function()
    def double(x: int) -> int:
        return 2 * x

    assert [await one for one in double.map([(1,), (2,)])] == [2, 4]


def test_what_cannot_go_there_is_refused_before_anything_is_made(session: Session) -> None:
    handle = object()

    @session.function()
    def takes(x: object) -> None: ...

    with pytest.raises(ValidationError, match="not JSON but set"):
        takes.remote({1, 2})
    with pytest.raises(ValidationError, match="no string"):
        takes.remote({1: 2})
    with pytest.raises(ValidationError, match="handle, which uses uses,"):

        @session.function()
        def uses() -> object:
            return handle

    with pytest.raises(ValidationError, match="async"):

        @session.function()
        async def later() -> None: ...

    assert session.sandbox_count == 0


def test_its_own_names_are_not_those_of_its_module(session: Session) -> None:
    @session.function()
    def work(HANDLE: int, count: int = FACTOR) -> list[int]:
        tripled = [FACTOR for FACTOR in range(count)]
        return [HANDLE, *tripled]

    assert work.remote(7).result(60) == [7, 0, 1, 2]


def test_it_may_call_itself(session: Session) -> None:
    @session.function()
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)  # type: ignore[operator]

    assert factorial.remote(5).result(60) == 120


def test_one_name_for_two_things_is_refused(session: Session) -> None:
    FACTOR = 4

    with pytest.raises(ValidationError, match="FACTOR is one thing in mixed and another in tripled"):

        @session.function()
        def mixed() -> list[int]:
            return [FACTOR, tripled(1)]


@pytest.mark.parametrize(
    "answer", ["'[' * 200_000", "'1' * 10_000", "'nonsense'", "'[' + '[],' * 30_000_000 + '0]'"]
)
def test_a_hostile_answer_is_an_error_of_ours(session: Session, answer: str) -> None:
    @session.function()
    def hostile(answer: str) -> None:
        import os
        import sys

        with open(sys.argv[1], "w") as out:
            out.write(eval(answer))
        os._exit(0)

    with pytest.raises(SandboxError):
        hostile.remote(answer).result(60)


def test_an_argument_without_an_end_is_refused_and_none_of_many_runs(session: Session) -> None:
    endless: list[object] = []
    endless.append(endless)

    @session.function()
    def takes(x: object) -> None: ...

    for argument in (endless, 10**5000):
        with pytest.raises(ValidationError, match="an argument is not JSON"):
            takes.map([(1,), (argument,)])
    assert session.sandbox_count == 0


def test_one_that_ends_without_a_result_is_no_missing_file(session: Session) -> None:
    @session.function()
    def leaves() -> None:
        sys.exit(0)

    with pytest.raises(SandboxError, match="leaves ended without a result") as caught:
        leaves.remote().result(60)
    assert not isinstance(caught.value, OSError)


def test_what_is_no_function_of_its_own_is_refused(session: Session) -> None:
    for given in (functools.partial(tripled, 1), operator.itemgetter(0), session.close):
        with pytest.raises(ValidationError, match="cannot be run in a sandbox"):
            session.function()(given)


@pytest.mark.parametrize("item", [1, "ab", b"ab", None])
def test_arguments_of_a_map_come_in_tuples(session: Session, item: object) -> None:
    @session.function()
    def takes(*x: object) -> None: ...

    with pytest.raises(ValidationError, match="a tuple of arguments for each call"):
        takes.map([(1,), item])  # type: ignore[list-item]
    assert session.sandbox_count == 0


def test_names_of_a_decorated_one_mean_what_they_do_where_it_was_written(session: Session) -> None:
    @session.function()
    @contextlib.contextmanager
    def wrapped() -> Iterator[int]:
        yield FACTOR

    assert "FACTOR" in wrapped._parts.values

    @session.function()
    @functools.cache
    def cached(x: int) -> int:
        return tripled(x)

    assert cached.remote(2).result(60) == 6


def test_a_closed_session_takes_no_calls() -> None:
    session = Session()

    @session.function()
    def late() -> None: ...

    session.close().result(60)
    with pytest.raises(SessionClosedError):
        late.remote()
