"""Code in an interpreter that keeps its state, on every provider.

A provider with an interpreter of its own runs Python there. Everywhere else, and for its other languages,
one command in the sandbox holds the interpreters (`lowtide.actionserver.interpret`): IPython where the image
has ipykernel, plain Python where it has not, bash and node where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from lowtide import logger, sandbox_json
from lowtide.errors import (
    CommandTimeoutError,
    LowtideError,
    SandboxError,
    SandboxGone,
    SandboxUnavailableError,
    UnsupportedError,
)
from lowtide.providers.base import STDOUT, Capability, ProcessHandle, ProcessSpec
from lowtide.providers.optional import CodeResult

if TYPE_CHECKING:
    from lowtide.held_sandbox import HeldSandbox

log = logger.get("lowtide")

_PYTHON = ("python", "py")
_SAID_BYTES = 2000
# Both are held to inside the sandbox, too; but code that runs there can stop, or speak for, what holds to them.
_ANSWER_BYTES = 256 << 20
_LATE_SECONDS = 30.0
"""How much later than its time limit the answer that it is over may come."""
_TICKS = 5  # of the event loop: a cancellation from another thread takes three to arrive


class CodeRunner:
    """The interpreters of one sandbox, as one handle of it holds them."""

    def __init__(self, life: HeldSandbox) -> None:
        self._life = life
        self._starting = asyncio.Lock()
        self._handle: ProcessHandle | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._said = b""
        self._saying: set[asyncio.Task[None]] = set()
        self._given_up: list[int] = []

    async def run(
        self, code: str, *, language: str, context: str | None, timeout_seconds: float | None
    ) -> CodeResult:
        provider, sandbox_id = await self._life.ready()
        if Capability.CODE in provider.capabilities and (
            language in _PYTHON or provider.name == "e2b"  # whose service has kernels for more
        ):
            ran: CodeResult = await provider.run_code(  # type: ignore[attr-defined]
                sandbox_id, code, language=language, context=context, timeout_seconds=timeout_seconds
            )
            return ran
        answer = await self._ask(
            {"code": code, "language": language, "context": context or "", "timeout": timeout_seconds}
        )
        if "missing" in answer:
            raise UnsupportedError(
                answer["missing"], feature=f"code in {language}", argument="language", **self._life.context
            )
        if "failed" in answer:
            raise SandboxError(f"the interpreter failed: {answer['failed']}", **self._life.context)
        result: Any = answer.get("result")
        if not _is_result(result):
            raise SandboxError(
                "the answer cannot be read: something in the sandbox spoke for the interpreter",
                **self._life.context,
            )
        if result["timed_out"] and timeout_seconds is not None:
            raise CommandTimeoutError(
                f"the code was given up after {timeout_seconds:g} seconds", **self._life.context
            )
        return CodeResult(
            stdout=result["stdout"],
            stderr=result["stderr"],
            results=tuple(result["results"]),
            error=result["error"],
            execution_count=result["execution_count"],
        )

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._starting:
            if self._handle is None:
                await self._start()
            handle = self._handle
            reading = self._reading
            assert handle is not None
            assert reading is not None
            number = next(self._numbers)
            answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._waiting[number] = answer
            line = json.dumps({"id": number, **request}).encode() + b"\n"
            saying = self._begin(self._say(handle, line))
        limit: float | None = request["timeout"]
        try:
            async with asyncio.timeout(None if limit is None else limit + _LATE_SECONDS) as over:
                await asyncio.shield(saying)  # half a line would spoil the next one, too
                return await answer
        except asyncio.CancelledError:
            # Else it goes on, and the next code of its context waits for it. Not waited for: a cancellation is quick.
            self._given_up.append(number)
            self._begin(self._give_up(handle))
            raise
        except TimeoutError as error:
            if not over.expired():
                raise
            with contextlib.suppress(LowtideError, OSError):
                await handle.terminate(0.0)
                await asyncio.wait([reading], timeout=_LATE_SECONDS)  # then the next code starts a new one
            raise CommandTimeoutError(
                f"the code was given up after {limit:g} seconds, and its interpreter ended: it did not answer",
                **self._life.context,
            ) from error
        finally:
            self._waiting.pop(number, None)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._saying.add(task)
        task.add_done_callback(self._said_it)
        return task

    def _said_it(self, task: asyncio.Task[None]) -> None:
        self._saying.discard(task)
        if not task.cancelled():
            task.exception()  # raised to whoever still waits, and of no interest to others

    async def _give_up(self, handle: ProcessHandle) -> None:
        """All that were cancelled in the same moment, the last begun first: none comes to its turn by another's end."""
        for _ in range(_TICKS):
            await asyncio.sleep(0)
        numbers, self._given_up = sorted(self._given_up, reverse=True), []
        if numbers:
            await self._say(handle, json.dumps({"given_up": numbers}).encode() + b"\n")

    async def _say(self, handle: ProcessHandle, line: bytes) -> None:
        async with self._starting:  # one line at a time, in the order in which they were begun
            with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says so
                await handle.write_stdin(line)

    async def _start(self) -> None:
        from lowtide.actionserver.bundle import bundle
        from lowtide.source import chunks_of

        provider, sandbox_id = await self._life.ready()
        made = bundle()
        path = f"/tmp/{made.name}"  # noqa: S108 - inside the sandbox
        await provider.write_file(sandbox_id, path, chunks_of(made.data), size=len(made.data))
        spec = ProcessSpec(argv=("python3", "-I", path, "interpret"), stdin=True)
        self._said = b""
        self._handle = await provider.start_process(sandbox_id, spec)
        self._reading = asyncio.get_running_loop().create_task(self._read(self._handle))

    async def _read(self, handle: ProcessHandle) -> None:
        held = bytearray()
        problem: LowtideError | None = None
        try:
            async for stream, data in handle.output():
                if stream != STDOUT:
                    self._said = (self._said + data)[-_SAID_BYTES:]
                    continue
                *ends, rest = data.split(b"\n")
                for end in ends:
                    answer = sandbox_json.parse(held + end)
                    held.clear()
                    waiting = self._waiting.get(answer["id"])
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
                held += rest
                if len(held) > _ANSWER_BYTES:
                    self._said = b"an answer over %d bytes" % _ANSWER_BYTES
                    await handle.terminate(0.0)
                    break
            problem = self._ended(await handle.wait())
        except SandboxGone as error:
            problem = error
        except sandbox_json.TooLargeError as error:
            self._said = str(error).encode()
            with contextlib.suppress(LowtideError, OSError):
                await handle.terminate(0.0)
        except Exception as error:
            # Of the connection; or this is no answer: everything in the sandbox can write there.
            log.debug("the interpreters are given up", exc_info=error)
            with contextlib.suppress(LowtideError, OSError):
                await handle.terminate(0.0)
        finally:
            self._handle = None
            problem = problem or self._ended(None)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(problem)
            with contextlib.suppress(LowtideError, OSError):
                await handle.aclose()

    def _ended(self, code: int | None) -> LowtideError:
        if code == 127:
            return UnsupportedError(
                "the image has no python3, which holds the interpreters of every language; take one with Python 3.9 "
                "or later",
                feature="code",
                alternative="exec() of the language's own program",
                **self._life.context,
            )
        said = self._said.decode("utf-8", "replace").strip()
        return SandboxUnavailableError(
            f"the interpreters ended (exit code {code}){': ' + said if said else ''}; the next code starts new ones, "
            "without their state",
            **self._life.context,
        )


def _is_result(result: Any) -> bool:
    return (
        isinstance(result, dict)
        and isinstance(result.get("stdout"), str)
        and isinstance(result.get("stderr"), str)
        and isinstance(result.get("results"), list)
        and all(isinstance(bundle, dict) for bundle in result["results"])
        and isinstance(result.get("error"), dict | None)
        and isinstance(result.get("execution_count"), int | None)
        and isinstance(result.get("timed_out"), bool)
    )
