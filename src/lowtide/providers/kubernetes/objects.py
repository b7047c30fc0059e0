"""Pods and their network policies at the API server: made once, read, and ended until they are really gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from lowtide.providers.kubernetes import status
from lowtide.providers.kubernetes.failures import ApiError

if TYPE_CHECKING:
    from lowtide.providers.kubernetes.api import Api

log = logging.getLogger("lowtide.kubernetes")

Json = dict[str, Any]

_START_SECONDS = 2.0
_QUIET_SECONDS = 1.5
_STUCK = frozenset({"FailedCreatePodSandBox", "FailedMount", "FailedAttachVolume", "NetworkNotReady"})
_STUCK_TIMES = 3
_NUDGE_SECONDS = 3.0


class Objects:
    """Raises `ApiError` and what the network raises; the provider maps it."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tasks: set[asyncio.Task[Any]] = set()

    def pods(self, namespace: str) -> str:
        return f"/api/v1/namespaces/{namespace}/pods"

    def policies(self, namespace: str) -> str:
        return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"

    async def create_or_get(self, path: str, body: Json) -> Json:
        try:
            return await self._api.request("POST", path, body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            return await self._api.request("GET", f"{path}/{body['metadata']['name']}")

    async def read(self, path: str) -> Json | None:
        try:
            return await self._api.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def read_policy(self, namespace: str, name: str) -> Json | None:
        try:
            return await self.read(f"{self.policies(namespace)}/{name}")
        except ApiError as error:
            if error.status == 403:
                return None
            raise

    async def delete(self, path: str, body: Json) -> bool:
        try:
            await self._api.request("DELETE", path, body=body)
        except ApiError as error:
            if error.status == 404 or error.reason == "Conflict":  # gone, or another one has its name by now
                return False
            raise
        return True

    async def delete_policy(self, namespace: str, name: str) -> bool:
        try:
            return await self.delete(f"{self.policies(namespace)}/{name}", {})
        except ApiError as error:
            if error.status == 403:
                return False
            raise

    async def delete_policy_of_nothing(self, namespace: str, name: str) -> None:
        """After a refused create. Best effort: the caller has an error to see, and the policy can be found again."""
        try:
            if await self.is_leftover(namespace, name):
                await self.delete_policy(namespace, name)
        except Exception:
            log.info("network policy %s/%s could not be deleted yet", namespace, name)

    async def is_leftover(self, namespace: str, name: str) -> bool:
        return await self.read(f"{self.pods(namespace)}/{name}") is None

    async def delete_pod(self, namespace: str, pod: Json, grace_seconds: float) -> bool:
        """Until the pod is really gone. A grace of 0 would take the object away while its processes still run."""
        name, same = pod["metadata"]["name"], {"uid": pod["metadata"]["uid"]}
        path = f"{self.pods(namespace)}/{name}"
        grace = max(1, math.ceil(grace_seconds))
        await self._let_it_start(namespace, pod)
        if not await self.delete(path, {"gracePeriodSeconds": grace + 1, "preconditions": same}):
            return False
        # A node that was just starting the pod can miss the delete for a minute; a shorter grace tells it again.
        again = asyncio.get_running_loop().call_later(
            grace + _NUDGE_SECONDS,
            lambda: self._spawn(self.delete(path, {"gracePeriodSeconds": grace, "preconditions": same})),
        )
        forced, has_run = False, status.has_run(pod)
        try:
            async for kind, seen in self._api.watch(self.pods(namespace), name=name, version=None):
                if kind == "DELETED" or seen["metadata"]["uid"] != same["uid"]:
                    return True
                has_run = has_run or status.has_run(seen)
                if not forced and (
                    status.all_terminated(seen, has_run=has_run) or status.never_started(seen)
                ):
                    # The node has reported every container dead, or that it never made one. It would take
                    # ten seconds to a minute to let go of the object; with nothing running, taking it
                    # away is safe.
                    forced = True
                    await self.delete(path, {"gracePeriodSeconds": 0, "preconditions": same})
        finally:
            again.cancel()
        return True

    async def _let_it_start(self, namespace: str, pod: Json) -> None:
        """Give a container that is being made a moment: the node ends a running one at once, a half-made one late."""
        if not pod["spec"].get("nodeName") or not status.starting(pod):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                meta = pod["metadata"]
                async for kind, seen in self._api.watch(
                    self.pods(namespace), name=meta["name"], version=meta["resourceVersion"]
                ):
                    if kind == "DELETED" or not status.starting(seen):
                        return

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def stuck(self, namespace: str, name: str) -> status.Trouble:
        """Returns when the node has failed to make the pod again and again.

        A pod without network or volumes shows no reason in its status: it is "creating" for as long as
        the node tries. Only events tell. A single failure is common and heals, so it takes several.
        """
        await asyncio.sleep(_QUIET_SECONDS)
        failures: dict[str, tuple[str, int]] = {}
        try:
            async for event in self._api.events(namespace, name):
                reason = str(event.get("reason"))
                if reason not in _STUCK:
                    continue
                failures[event["metadata"]["name"]] = (reason, int(event.get("count") or 1))
                if sum(count for seen, count in failures.values() if seen == reason) >= _STUCK_TIMES:
                    return status.Trouble(reason=reason, message=str(event.get("message")))
        except ApiError as error:
            log.info("no events of %s/%s can be read: %s", namespace, name, error)
        never: asyncio.Future[status.Trouble] = asyncio.get_running_loop().create_future()
        return await never  # without that right nobody says

    async def last_event(self, namespace: str, name: str) -> Json | None:
        ends = ("Evicted", "Preempted", "TaintManagerEviction", "NodeShutdown", "Killing", "DeadlineExceeded")
        try:
            page = await self._api.request(
                "GET",
                f"/api/v1/namespaces/{namespace}/events",
                params={
                    "fieldSelector": f"involvedObject.name={name},involvedObject.kind=Pod",
                    "limit": "100",
                },
            )
        except ApiError:
            return None  # a nicety that needs a right of its own
        found = [event for event in page.get("items") or [] if event.get("reason") in ends]
        # A drain or an eviction explains more than the kill that follows it.
        return max(
            found,
            key=lambda event: (event["reason"] != "Killing", str(event.get("lastTimestamp"))),
            default=None,
        )
