"""Why nothing runs in a sandbox any more, or never will: what its pod and the events about it say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from lowtide import errors
from lowtide.providers.base import TerminalSize
from lowtide.providers.inside import InsideProcess
from lowtide.providers.kubernetes import pod as objects
from lowtide.providers.kubernetes import status
from lowtide.providers.kubernetes.client import Api, Json
from lowtide.providers.kubernetes.errors import PROVIDER, ApiError

_ENDS = ("Evicted", "Preempted", "TaintManagerEviction", "NodeShutdown", "Killing", "DeadlineExceeded")
_WITH_ITS_SANDBOX = frozenset({129, 137, 143})
"""SIGHUP, SIGKILL, SIGTERM: also how a command ends whose sandbox is being taken away."""

Explain = Callable[[], Awaitable[errors.LowtideError | None]]
"""Why nothing can run; None while something can."""


async def explain(
    api: Api, namespace: str, name: str, sandbox_id: str
) -> errors.SandboxGone | errors.SandboxFailedError | None:
    try:
        pod: Json | None = await api.request("GET", f"{objects.pods(namespace)}/{name}")
    except ApiError as error:
        if error.status != 404:
            raise
        pod = None
    if pod is None or not status.is_ours(pod):
        return await gone(api, namespace, name, sandbox_id)
    problem = status.trouble(pod)
    return failed(problem, sandbox_id) if problem is not None else None


async def gone(api: Api, namespace: str, name: str, sandbox_id: str) -> errors.SandboxGone:
    """The pod is no longer there; the events that outlive it know more."""
    reason, detail = "deleted", "somebody deleted its pod"
    event = await _last_event(api, namespace, name)
    if event is not None and event.get("reason") != "Killing":
        reason, detail = status.word(str(event.get("reason"))), str(event.get("message"))
    return errors.SandboxGone(
        f"sandbox {sandbox_id} is gone: {detail}", reason=reason, provider=PROVIDER, sandbox_id=sandbox_id
    )


def failed(problem: status.Trouble, sandbox_id: str) -> errors.SandboxGone | errors.SandboxFailedError:
    context: dict[str, Any] = {"provider": PROVIDER, "sandbox_id": sandbox_id}
    words = f"{problem.reason}: {problem.message}"
    if problem.ended:
        reason = status.word(problem.reason)
        return errors.SandboxGone(f"sandbox {sandbox_id} has ended: {words}", reason=reason, **context)
    if problem.reason == "Unschedulable" and "selector" in problem.message:
        words += f" (node_selector; {objects.ARCHITECTURE} is the API server's unless it names another)"
    return errors.SandboxFailedError(
        f"sandbox {sandbox_id} cannot start: {words}", reason=problem.reason, **context
    )


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
