"""The end of a sandbox: its pod until it is really gone, then what stood beside it."""

from __future__ import annotations

import asyncio
import contextlib
import math

import aiohttp

from lowtide.in_background import in_background
from lowtide.providers.kubernetes import pod as objects
from lowtide.providers.kubernetes import status
from lowtide.providers.kubernetes.client import Api
from lowtide.providers.kubernetes.errors import ApiError, where_allowed
from lowtide.providers.kubernetes.pod import Json

_START_SECONDS = 8.0
_NUDGE_SECONDS = 3.0


async def delete_pod(api: Api, namespace: str, pod: Json, grace_seconds: float) -> bool:
    """Until the pod is really gone. A grace of 0 would take the object away while its processes still run."""
    name, same = pod["metadata"]["name"], {"uid": pod["metadata"]["uid"]}
    path = f"{objects.pods(namespace)}/{name}"
    grace = max(1, math.ceil(grace_seconds))
    await _let_it_start(api, namespace, pod)
    if not await _delete(api, path, {"gracePeriodSeconds": grace + 1, "preconditions": same}):
        return False
    # A node that was just starting the pod can miss the delete for a minute; a shorter grace tells it again.
    again = asyncio.get_running_loop().call_later(
        grace + _NUDGE_SECONDS,
        lambda: in_background(
            _delete(api, path, {"gracePeriodSeconds": grace, "preconditions": same}), silent=True
        ),
    )
    forced, has_run = False, status.has_run(pod)
    try:
        async for kind, seen in api.watch(objects.pods(namespace), name=name, version=None):
            if kind == "DELETED" or seen["metadata"]["uid"] != same["uid"]:
                now = await api.get(path)  # what a watch says may be a proxy's word
                if now is None or now["metadata"]["uid"] != same["uid"]:
                    return True
                continue
            has_run = has_run or status.has_run(seen)
            if not forced and (status.all_terminated(seen, has_run=has_run) or status.never_started(seen)):
                # The node has reported every container dead, or that it never made one. It would take
                # ten seconds to a minute to let go of the object; with nothing running, taking it
                # away is safe.
                forced = True
                await _delete(api, path, {"gracePeriodSeconds": 0, "preconditions": same})
    finally:
        again.cancel()
    return True  # the watch ends by itself only when the pod was not found


async def delete_beside(api: Api, namespace: str, name: str) -> bool:
    """Whether anything was there. What is under our name and not ours stays."""

    async def one(path: str) -> bool:
        with where_allowed():
            thing = await api.get(path)
            if thing is not None and status.is_ours(thing):
                return await _delete(api, path, {"preconditions": {"uid": thing["metadata"]["uid"]}})
        return False

    return any(await asyncio.gather(*(one(f"{path(namespace)}/{name}") for path in objects.BESIDE)))


async def _delete(api: Api, path: str, body: Json) -> bool:
    try:
        await api.request("DELETE", path, body=body)
    except ApiError as error:
        if error.status == 404 or error.reason == "Conflict":  # gone, or another one has its name by now
            return False
        raise
    return True


async def _let_it_start(api: Api, namespace: str, pod: Json) -> None:
    """Give a container that is being made a moment: the node ends a running one at once, a half-made one late."""
    if not pod["spec"].get("nodeName") or not status.starting(pod):
        return
    meta = pod["metadata"]
    with contextlib.suppress(
        TimeoutError, OSError, ApiError, aiohttp.ClientError
    ):  # the delete says what is wrong
        async with asyncio.timeout(_START_SECONDS):
            async for kind, seen in api.watch(
                objects.pods(namespace), name=meta["name"], version=meta["resourceVersion"]
            ):
                if kind == "DELETED" or not status.starting(seen):
                    return
