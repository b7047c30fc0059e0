"""What a sandbox is now: by id, by label, and watched until commands can run in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from lowtide import errors, logger
from lowtide.providers.base import SandboxInfo, SandboxState
from lowtide.providers.kubernetes import ended, status
from lowtide.providers.kubernetes import pod as objects
from lowtide.providers.kubernetes.client import Api
from lowtide.providers.kubernetes.errors import SERVICE, ApiError, mapped, where_allowed
from lowtide.providers.kubernetes.pod import Json

log = logger.get("lowtide.kubernetes")

_LEASE = "lowtide-lease"
_QUIET_SECONDS = 1.5
_STUCK = frozenset({"FailedCreatePodSandBox", "FailedMount", "FailedAttachVolume", "NetworkNotReady"})
_STUCK_TIMES = 3


class Lookup:
    """The sandboxes of one provider. An id is the pod's name, with ``namespace/`` where it is not the usual one."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self._namespace = api, namespace
        self._namespaces = {namespace}
        self._created: dict[str, tuple[str, float]] = {}
        """Of pods just made: where their watch begins, and how long they may wait for a node."""

    def id_of(self, namespace: str, name: str) -> str:
        return name if namespace == self._namespace else f"{namespace}/{name}"

    def split(self, sandbox_id: str) -> tuple[str, str]:
        """Namespace and name. SandboxNotFoundError for what cannot be an id: it must not become part of a path."""
        namespace, slash, name = sandbox_id.rpartition("/")
        namespace = namespace if slash else self._namespace
        if not objects.is_name(name) or not objects.is_name(namespace):
            words = f"{sandbox_id!r} is no sandbox id of kubernetes"
            raise SERVICE.error(errors.SandboxNotFoundError, words, sandbox_id)
        return namespace, name

    def made(self, namespace: str, pod: Json, patience: float) -> str:
        sandbox_id = self.id_of(namespace, pod["metadata"]["name"])
        self._created[sandbox_id] = (pod["metadata"]["resourceVersion"], patience)
        return sandbox_id

    def here(self, namespace: str | None) -> str:
        """The namespace of a new sandbox; `list` looks there from now on."""
        self._namespaces.add(namespace or self._namespace)
        return namespace or self._namespace

    def forget(self, sandbox_id: str) -> None:
        self._created.pop(sandbox_id, None)

    async def pod(self, sandbox_id: str) -> Json | None:
        """The pod, when it is one of ours."""
        namespace, name = self.split(sandbox_id)
        pod = await self.api.get(f"{objects.pods(namespace)}/{name}")
        return pod if pod is not None and status.is_ours(pod) else None

    async def get(self, sandbox_id: str) -> SandboxInfo:
        namespace, name = self.split(sandbox_id)
        with mapped(sandbox_id):
            pod = await self.api.get(f"{objects.pods(namespace)}/{name}")
            if pod is not None and status.is_ours(pod):
                return status.info(pod, sandbox_id)
            for path in objects.BESIDE if pod is None else ():
                with where_allowed():
                    thing = await self.api.get(f"{path(namespace)}/{name}")
                    if thing is not None and status.is_ours(thing):
                        return _leftover(thing, sandbox_id)
        words = f"no sandbox {sandbox_id} in namespace {namespace}"
        raise SERVICE.error(errors.SandboxNotFoundError, words, sandbox_id)

    async def find(self, lease_id: str, namespace: str | None) -> SandboxInfo | None:
        sandbox_id = self.id_of(namespace or self._namespace, objects.pod_name(lease_id))
        try:
            found = await self.get(sandbox_id)
        except errors.SandboxNotFoundError:
            return None
        return found if found.labels.get(_LEASE) == lease_id else None

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        query = {"labelSelector": ",".join([_LEASE, *(f"{key}={value}" for key, value in labels.items())])}
        for namespace in sorted(self._namespaces):
            names = set()
            with mapped():
                async for pod in self.api.pages(objects.pods(namespace), params=query):
                    names.add(pod["metadata"]["name"])
                    if status.is_ours(pod):
                        yield status.info(pod, self.id_of(namespace, pod["metadata"]["name"]))
                for path in objects.BESIDE:
                    with where_allowed():
                        async for thing in self.api.pages(path(namespace), params=query, only_metadata=True):
                            name = thing["metadata"]["name"]
                            if name in names or not status.is_ours(thing):
                                continue
                            names.add(name)
                            if await self.api.get(f"{objects.pods(namespace)}/{name}") is None:
                                yield _leftover(thing, self.id_of(namespace, name))

    async def until_running(self, sandbox_id: str) -> SandboxInfo:
        namespace, name = self.split(sandbox_id)
        running = asyncio.ensure_future(self._watched(namespace, name, sandbox_id))
        stuck = asyncio.ensure_future(self._stuck(namespace, name))
        try:
            with mapped(sandbox_id):
                await asyncio.wait((running, stuck), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                raise ended.failed(stuck.result(), sandbox_id)
        finally:
            for task in (running, stuck):
                task.cancel()
            await asyncio.gather(running, stuck, return_exceptions=True)

    async def _watched(self, namespace: str, name: str, sandbox_id: str) -> SandboxInfo:
        version, patience = self._created.pop(sandbox_id, (None, 0.0))
        limit = asyncio.timeout(None)
        homeless: status.Trouble | None = None
        try:
            async with limit:
                async for kind, pod in self.api.watch(objects.pods(namespace), name=name, version=version):
                    if kind == "DELETED":
                        raise await ended.gone(self, sandbox_id)
                    if status.running(pod):
                        return status.info(pod, sandbox_id)
                    homeless = status.unschedulable(pod)
                    if homeless is not None and patience > 0:
                        if limit.when() is None:
                            limit.reschedule(asyncio.get_running_loop().time() + patience)
                        continue
                    limit.reschedule(None)
                    if (problem := status.trouble(pod)) is not None:
                        raise ended.failed(problem, sandbox_id)
        except TimeoutError:
            if homeless is None or not limit.expired():
                raise
            raise ended.failed(homeless, sandbox_id) from None
        raise AssertionError("a watch does not end")

    async def _stuck(self, namespace: str, name: str) -> status.Trouble:
        """Returns when the node has failed to make the pod again and again.

        A pod without network or volumes shows no reason in its status: it is "creating" for as long as
        the node tries. Only events tell. A single failure is common and heals, so it takes several.
        """
        await asyncio.sleep(_QUIET_SECONDS)
        failures: dict[str, tuple[str, int]] = {}
        try:
            async for event in self.api.events(namespace, name):
                reason = str(event.get("reason"))
                if reason not in _STUCK:
                    continue
                failures[event["metadata"]["name"]] = (reason, int(event.get("count") or 1))
                if sum(count for seen, count in failures.values() if seen == reason) < _STUCK_TIMES:
                    continue
                problem = status.Trouble(reason=reason, message=str(event.get("message")))
                if not await self._late_secret(namespace, name, problem):
                    return problem
        except ApiError as error:
            log.info("no events of %s/%s can be read: %s", namespace, name, error)
        never: asyncio.Future[status.Trouble] = asyncio.get_running_loop().create_future()
        return await never  # without that right nobody says

    async def _late_secret(self, namespace: str, name: str, problem: status.Trouble) -> bool:
        """Whether it is only that a busy node does not see yet what was made before the pod."""
        if f'secret "{name}" not found' not in problem.message:
            return False
        return await self.api.get(f"{objects.secrets(namespace)}/{name}") is not None


def _leftover(thing: Json, sandbox_id: str) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id=sandbox_id,
        state=SandboxState.FAILED,
        labels=thing["metadata"].get("labels") or {},
        reason="what stands beside its pod exists, its pod does not",
    )
