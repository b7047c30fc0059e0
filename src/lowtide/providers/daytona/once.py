"""A command in one call: run once however often it is sent, answered at once when it is short.

The daemon's plain exec has no run-once of its own, merges the streams and says nothing before the end.
So what it is given is `once.pl`: it takes a name that can be taken only once, runs the command, and either
answers with all it came to, or, when it takes longer or says much, that it goes on and can be followed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers.base import STDERR, STDOUT, ProcessSpec, TerminalSize
from lowtide.providers.daytona.deadline import within
from lowtide.providers.daytona.failures import status_of, translated, was_cut
from lowtide.providers.daytona.script import Wrapping, perl, quoted

if TYPE_CHECKING:
    from daytona import AsyncSandbox

log = logging.getLogger("lowtide.daytona")

CALL_SECONDS = 60.0
LONGEST = 100_000
"""A program's argument has at most 128 KiB, and the daemon hands the whole text on as one."""
_TRIES = 6
_LOST = (None, 502, 503, 504)
"""What says nothing about the command: no answer at all, or one from somebody on the way."""
_NOT_FOUND, _KILLED = 127, 128
_ANSWER = re.compile(r"([-!]|\+\d+|=\d+;\d+;[^;\s]*;[^;\s]*);")
_DROPPED_AT_ONCE = 16
_MARK_SECONDS = 600.0
"""How long a request may be under way: after that nobody sends its command any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn:
    """Its streams come out of a command of this text, which is run in a session."""

    leader: int
    follow: str


class NothingRan(Exception):
    """The sandbox has not what this needs; the command was not started."""


class NoPerl(NothingRan):
    pass


@dataclass(slots=True)
class Calls:
    """What the calls into one sandbox have left there, for a later one to take away."""

    usable: bool = True
    """Until an answer shows otherwise."""
    _answers: list[str] = field(default_factory=list)
    _marks: deque[tuple[float, str]] = field(default_factory=deque)

    def drop(self) -> list[str]:
        """Files that nobody needs any more: answers that have arrived, and names nobody can send again."""
        taken, self._answers = self._answers[:_DROPPED_AT_ONCE], self._answers[_DROPPED_AT_ONCE:]
        while self._marks and len(taken) < 2 * _DROPPED_AT_ONCE:
            if time.monotonic() - self._marks[0][0] < _MARK_SECONDS:
                break
            taken.append(self._marks.popleft()[1])
        return taken

    def answered(self, path: str) -> None:
        self._answers.append(f"{path}.a")
        self._marks.append((time.monotonic(), path))


def fits(spec: ProcessSpec) -> bool:
    """Whether a call can carry it: no input, no terminal, and not too long."""
    if spec.stdin or spec.tty is not None:
        return False
    words = (*spec.argv, *spec.environment, *spec.environment.values(), spec.cwd or "")
    return sum(len(quoted(word).encode("utf-8", "replace")) + 4 for word in words) < LONGEST


async def run(
    box: AsyncSandbox, calls: Calls, wrapping: Wrapping, spec: ProcessSpec, working_dir: str | None
) -> Ended | GoesOn:
    """Raises NothingRan, and what the SDK raises."""
    path = f"/tmp/.lowtide-{secrets.token_hex(10)}"  # noqa: S108 - inside the sandbox, and nobody can guess it
    text = _text(path, wrapping, spec, working_dir, calls.drop())
    answer, code = await _asked(box, text)
    calls.answered(path)
    at = answer.find(wrapping.mark)
    said = _ANSWER.match(answer, at + len(wrapping.mark)) if at >= 0 else None
    if said is None:
        if code == _NOT_FOUND or "-e line" in answer:  # the second is Perl's own, before it runs anything
            raise NoPerl("there is no Perl, or one that does not understand the program")
        if 0 <= code < _KILLED:
            raise errors.SandboxUnavailableError(
                f"what ran the command did not say how it ended (exit code {code})",
                retryable=False,
                provider="daytona",
                sandbox_id=box.id,
            )
        return Ended(code=code if code > 0 else 137)  # it was killed, and what runs it too
    kind, rest = said[1][0], said[1][1:]
    if kind == "!":
        raise NothingRan("its name could not be taken")
    if kind == "-":
        raise errors.SandboxUnavailableError(
            "the command was run, but what it came to was lost with its connection",
            retryable=False,
            provider="daytona",
            sandbox_id=box.id,
        )
    if kind == "+":
        follow = f'cat "$0.o"& cat "$0.e" >&2;wait;exit {_KILLED + 9}'
        return GoesOn(leader=int(rest), follow=f"/bin/sh -c {quoted(follow)} {path}")
    number, _, stdout, stderr = rest.split(";")
    try:
        return Ended(code=int(number), stdout=base64.b64decode(stdout), stderr=base64.b64decode(stderr))
    except (binascii.Error, ValueError) as error:
        raise errors.SandboxError(
            f"the answer of a command cannot be read: {error}", provider="daytona", sandbox_id=box.id
        ) from error


async def _asked(box: AsyncSandbox, text: str) -> tuple[str, int]:
    """Sent again while its answer is lost: what was started is not started again."""
    delay = 0.05
    for left in reversed(range(_TRIES)):
        try:
            ran = await within(CALL_SECONDS, box.process.exec(text), "run a command", box.id)
            return str(ran.result or ""), int(ran.exit_code if ran.exit_code is not None else -1)
        except Exception as error:
            found = translated(error, box.id)
            lost = found is not None and was_cut(found) and status_of(error) in _LOST
            if not lost or not left:
                raise
            log.info("sandbox %s: asking again for a command after: %s", box.id, found)
        await asyncio.sleep(delay)
        delay = min(delay * 2, 2.0)
    raise AssertionError  # the last try returns or raises


def _text(path: str, wrapping: Wrapping, spec: ProcessSpec, working_dir: str | None, drop: list[str]) -> str:
    variables = [f"{name}={value}" for name, value in spec.environment.items()]
    before = (path, wrapping.mark, str(wrapping.tag))
    after = (
        *(spec.cwd or "", working_dir or ""),
        *(str(len(drop)), *drop),
        *(str(len(variables)), *variables),
        *spec.argv,
    )
    programs = (perl("again"), perl("streams", "gather"), perl("follow"))
    words = (*map(quoted, before), *programs, *map(quoted, after))
    return f"PERL_BADLANG=0 perl -e {perl('once')} {' '.join(words)}"


class EndedProcess:
    """A `ProcessHandle` of a command that has ended."""

    def __init__(self, ended: Ended, terminate: Callable[[float], Awaitable[None]]) -> None:
        self._ended, self._terminate = ended, terminate

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for stream, data in ((STDOUT, self._ended.stdout), (STDERR, self._ended.stderr)):
            if data:
                yield stream, data

    async def wait(self) -> int:
        return self._ended.code

    async def write_stdin(self, data: bytes) -> None:
        raise BrokenPipeError("the command has ended")

    async def close_stdin(self) -> None:
        return None

    async def resize(self, size: TerminalSize) -> None:
        return None

    async def signal(self, number: int) -> None:
        return None

    async def terminate(self, grace_seconds: float) -> None:
        """What it left running is part of its tree."""
        await self._terminate(grace_seconds)

    async def aclose(self) -> None:
        return None
