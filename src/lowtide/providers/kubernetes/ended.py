"""Why nothing runs in a sandbox any more, or never will: what its pod and the events about it say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.providers.base import TerminalSize
from lowtide.providers.inside import InsideProcess
from lowtide.providers.kubernetes import pod as objects
from lowtide.providers.kubernetes import status
from lowtide.providers.kubernetes.client import Api
from lowtide.providers.kubernetes.errors import SERVICE, ApiError, mapped
from lowtide.providers.kubernetes.pod import Json

if TYPE_CHECKING:
    from lowtide.providers.kubernetes.lookup import Lookup

_ENDS = ("Evicted", "Preempted", "TaintManagerEviction", "NodeShutdown", "Killing", "DeadlineExceeded")
_WITH_ITS_SANDBOX = frozenset({129, 137, 143})
"""SIGHUP, SIGKILL, SIGTERM: also how a command ends whose sandbox is being taken away."""

Explain = Callable[[], Awaitable[errors.LowtideError | None]]
"""Why nothing can run; None while something can."""


async def explain(lookup: Lookup, sandbox_id: str) -> errors.LowtideError | None:
    with mapped(sandbox_id):
        pod = await lookup.pod(sandbox_id)
        if pod is None:
            return await gone(lookup, sandbox_id)
    problem = status.trouble(pod)
    return failed(problem, sandbox_id) if problem is not None else None


async def gone(lookup: Lookup, sandbox_id: str) -> errors.SandboxGone:
    """The pod is no longer there; the events that outlive it know more."""
    reason, detail = "deleted", "somebody deleted its pod"
    event = await _last_event(lookup.api, *lookup.split(sandbox_id))
    if event is not None and event.get("reason") != "Killing":
        reason, detail = status.word(str(event.get("reason"))), str(event.get("message"))
    words = f"sandbox {sandbox_id} is gone: {detail}"
    return SERVICE.error(errors.SandboxGone, words, sandbox_id, reason=reason)


def failed(problem: status.Trouble, sandbox_id: str) -> errors.SandboxGone | errors.SandboxFailedError:
    words = f"{problem.reason}: {problem.message}"
    if problem.ended:
        words, reason = f"sandbox {sandbox_id} has ended: {words}", status.word(problem.reason)
        return SERVICE.error(errors.SandboxGone, words, sandbox_id, reason=reason)
    if problem.reason == "Unschedulable" and "selector" in problem.message:
        words += f" (node_selector; {objects.ARCHITECTURE} is the API server's unless it names another)"
    words = f"sandbox {sandbox_id} cannot start: {words}"
    return SERVICE.error(errors.SandboxFailedError, words, sandbox_id, reason=problem.reason)


async def _last_event(api: Api, namespace: str, name: str) -> Json | None:
    about = f"involvedObject.name={name},involvedObject.kind=Pod"
    try:
        page = await api.request(
            "GET",
            f"/api/v1/namespaces/{namespace}/events",
            params={"fieldSelector": about, "limit": "100"},
        )
    except ApiError:
        return None  # a nicety that needs a right of its own
    found = [event for event in page.get("items") or [] if event.get("reason") in _ENDS]
    # A drain or an eviction explains more than the kill that follows it.
    return max(
        found,
        key=lambda event: (event["reason"] != "Killing", str(event.get("lastTimestamp"))),
        default=None,
    )


class PodProcess:
    """A command whose end together with its sandbox is no exit code of its own: the pod is asked."""

    def __init__(self, process: InsideProcess, explain: Explain) -> None:
        self._process, self._explain = process, explain
        self._signalled = False

    @property
    def exited(self) -> bool:
        return self._process.exited

    @property
    def streams_open(self) -> bool:
        return self._process.streams_open

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        async for chunk in self._process.output():
            yield chunk
        await self.wait()

    async def wait(self) -> int:
        try:
            code = await self._process.wait()
        except errors.SandboxUnavailableError as error:
            if (why := await self._why()) is not None:
                raise why from error
            raise
        if code in _WITH_ITS_SANDBOX and not self._signalled and (why := await self._why()) is not None:
            raise why
        return code

    async def _why(self) -> errors.LowtideError | None:
        with suppress(errors.LowtideError):
            return await self._explain()
        return None

    async def write_stdin(self, data: bytes) -> None:
        await self._process.write_stdin(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def resize(self, size: TerminalSize) -> None:
        await self._process.resize(size)

    async def signal(self, number: int) -> None:
        self._signalled = True
        await self._process.signal(number)

    async def terminate(self, grace_seconds: float) -> None:
        self._signalled = True
        await self._process.terminate(grace_seconds)

    async def aclose(self) -> None:
        await self._process.aclose()
