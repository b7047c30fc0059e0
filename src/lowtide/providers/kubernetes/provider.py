"""Kubernetes as a provider: one Pod per sandbox."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lowtide import errors
from lowtide.providers.base import (
    Capability,
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.kubernetes import access, manifest, status
from lowtide.providers.kubernetes.failures import ApiError, mapped
from lowtide.providers.kubernetes.objects import Objects
from lowtide.providers.kubernetes.options import KubernetesOptions

if TYPE_CHECKING:
    from lowtide.providers.kubernetes.forward import Forward
    from lowtide.providers.kubernetes.process import Explain, PodProcess

log = logging.getLogger("lowtide.kubernetes")

Json = dict[str, Any]

DEFAULT_IMAGE = "python:3.12-slim"
_LEASE = "lowtide-lease"
_KNOWN_OPTIONS = frozenset({"kubeconfig", "context", "namespace", "image"})


class KubernetesProvider:
    """The primitives over the API server. A sandbox id is the pod's name, with ``namespace/`` where it is not ours."""

    name: ClassVar[str] = "kubernetes"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.IMAGE,
            Capability.COMMAND,
            Capability.STDIN,
            Capability.TTY,
            Capability.SIGNALS,
            Capability.CPU_LIMIT,
            Capability.MEMORY_LIMIT,
            Capability.GVISOR,  # the runtime class of that name; a cluster without it refuses the pod
            Capability.NETWORK_NONE,  # by NetworkPolicy: the cluster's network plug-in enforces it
            Capability.NETWORK_FULL,
            Capability.PORTS,
            # activeDeadlineSeconds. The API only ever lets it be lowered, so there is no RENEW.
            Capability.LIFETIME,
        }
    )
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME,
        create_window_seconds=60.0,  # the API server's own limit for a request
        max_lifetime_seconds=float(manifest.MAX_LIFETIME_SECONDS),
        default_lifetime_seconds=float(manifest.DEFAULT_LIFETIME_SECONDS),
    )
    options_type: ClassVar[type | None] = KubernetesOptions

    def __init__(self, where: access.Access, *, image: str | None = None) -> None:
        from lowtide.providers.kubernetes.api import Api

        self._access = where
        self._image = image or DEFAULT_IMAGE
        self._image_named = image
        self._api = Api(where)
        self._objects = Objects(self._api)
        self._versions: dict[str, str] = {}  # of pods just created: where their watch begins
        self._patience: dict[str, float] = {}
        self._without_shell: set[str] = set()
        self._forwards: dict[tuple[str, int], tuple[Forward, int]] = {}
        self._namespaces = {where.namespace}
        self._expiries: dict[str, datetime] = {}
        self._warned = False

    # Connection

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        given = dict(options or {})
        if unknown := sorted(set(given) - _KNOWN_OPTIONS):
            raise errors.ValidationError(
                f"unknown option {unknown[0]!r} for kubernetes; known: {', '.join(sorted(_KNOWN_OPTIONS))}",
                argument=unknown[0],
                provider=cls.name,
            )
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise access.missing_dependency()
        return cls(
            access.Access.resolve(environ, given), image=given.get("image") or environ.get(access.IMAGE)
        )

    @property
    def account(self) -> str:
        return self._access.account

    def credentials(self) -> dict[str, str]:
        known = self._access.credentials()
        if self._image_named:
            known[access.IMAGE] = self._image_named
        return known

    async def aclose(self) -> None:
        forwards, self._forwards = self._forwards, {}
        await asyncio.gather(*(forward.aclose() for forward, _ in forwards.values()), return_exceptions=True)
        await self._api.aclose()

    # Lifecycle

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        with nothing_sent():
            manifest.check(spec)
            options = manifest.options_of(spec)
        namespace = options.namespace or self._access.namespace
        name = manifest.pod_name(spec.lease_id)
        sandbox_id = self._id(namespace, name)
        self._namespaces.add(namespace)
        with mapped(sandbox_id):
            if manifest.wants_policy(spec):
                # Before the pod, so that nothing ever runs without it. Dying in between leaves a policy
                # without a pod, which `find`, `get` and `list` show and `destroy` takes away.
                self._warn_about_policies()
                await self._objects.create_or_get(self._objects.policies(namespace), manifest.policy(spec))
            try:
                pod = await self._objects.create_or_get(
                    self._objects.pods(namespace), manifest.pod(spec, default_image=self._image)
                )
            except Exception:
                if manifest.wants_policy(spec):
                    await self._objects.delete_policy_of_nothing(namespace, name)
                raise
            if (pod["metadata"].get("labels") or {}).get(_LEASE) != spec.lease_id:
                raise errors.SandboxFailedError(
                    f"a pod named {name} exists that is not lowtide's",
                    reason="AlreadyExists",
                    provider=self.name,
                )
            if manifest.wants_policy(spec):
                await self._api.request(
                    "PATCH",
                    f"{self._objects.policies(namespace)}/{name}",
                    body=manifest.owned_by(pod),
                    merge=True,
                )
        self._versions[sandbox_id] = pod["metadata"]["resourceVersion"]
        self._patience[sandbox_id] = options.unschedulable_seconds
        return self._info(pod, sandbox_id)

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        namespace = manifest.options_of(spec).namespace or self._access.namespace
        sandbox_id = self._id(namespace, manifest.pod_name(spec.lease_id))
        try:
            found = await self.get(sandbox_id)
        except errors.SandboxNotFoundError:
            return None
        return found if found.labels.get(_LEASE) == spec.lease_id else None

    async def get(self, sandbox_id: str) -> SandboxInfo:
        namespace, name = self._split(sandbox_id)
        with mapped(sandbox_id):
            pod = await self._objects.read(f"{self._objects.pods(namespace)}/{name}")
            if pod is not None and status.is_ours(pod):
                return self._info(pod, sandbox_id)
            if pod is None:
                policy = await self._objects.read_policy(namespace, name)
                if policy is not None and status.is_ours(policy):
                    return _leftover(policy, sandbox_id)
        raise errors.SandboxNotFoundError(
            f"no sandbox {sandbox_id} in namespace {namespace}", provider=self.name, sandbox_id=sandbox_id
        )

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        namespace, name = self._split(sandbox_id)
        running = asyncio.ensure_future(self._until_running(namespace, name, sandbox_id))
        stuck = asyncio.ensure_future(self._objects.stuck(namespace, name))
        try:
            with mapped(sandbox_id):
                await asyncio.wait((running, stuck), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                raise self._failed(stuck.result(), sandbox_id)
        finally:
            for task in (running, stuck):
                task.cancel()
            await asyncio.gather(running, stuck, return_exceptions=True)

    async def _until_running(self, namespace: str, name: str, sandbox_id: str) -> SandboxInfo:
        patience = self._patience.pop(sandbox_id, 0.0)
        limit = asyncio.timeout(None)
        homeless: status.Trouble | None = None
        try:
            async with limit:
                async for kind, pod in self._api.watch(
                    self._objects.pods(namespace), name=name, version=self._versions.pop(sandbox_id, None)
                ):
                    if kind == "DELETED":
                        raise await self._gone(namespace, name, sandbox_id)
                    if status.running(pod):
                        return self._info(pod, sandbox_id)
                    homeless = status.unschedulable(pod)
                    if homeless is not None and patience > 0:
                        if limit.when() is None:
                            limit.reschedule(asyncio.get_running_loop().time() + patience)
                        continue
                    limit.reschedule(None)
                    if (problem := status.trouble(pod)) is not None:
                        raise self._failed(problem, sandbox_id)
        except TimeoutError:
            if homeless is None or not limit.expired():
                raise
            raise self._failed(homeless, sandbox_id) from None
        raise AssertionError("a watch does not end")

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        selector = ",".join([_LEASE, *(f"{key}={value}" for key, value in labels.items())])
        for namespace in sorted(self._namespaces):
            names = set()
            with mapped():
                async for pod in self._api.pages(
                    self._objects.pods(namespace), params={"labelSelector": selector}
                ):
                    names.add(pod["metadata"]["name"])
                    if status.is_ours(pod):
                        yield self._info(pod, self._id(namespace, pod["metadata"]["name"]))
                try:
                    async for policy in self._api.pages(
                        self._objects.policies(namespace), params={"labelSelector": selector}
                    ):
                        name = policy["metadata"]["name"]
                        if (
                            name not in names
                            and status.is_ours(policy)
                            and await self._objects.is_leftover(namespace, name)
                        ):
                            yield _leftover(policy, self._id(namespace, name))
                except ApiError as error:
                    if error.status != 403:  # without the right to see policies there are none of ours
                        raise

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        try:
            namespace, name = self._split(sandbox_id)
        except errors.SandboxNotFoundError:
            return False  # nothing can have this id
        await self._close_forwards(sandbox_id)
        with mapped(sandbox_id):
            pod = await self._objects.read(f"{self._objects.pods(namespace)}/{name}")
            if pod is not None and not status.is_ours(pod):
                log.warning("pod %s/%s is not lowtide's and was left alone", namespace, name)
                return False
            ended = pod is not None and await self._objects.delete_pod(namespace, pod, grace_seconds)
            ended = await self._objects.delete_policy(namespace, name) or ended
        for known in (self._versions, self._patience, self._expiries):
            known.pop(sandbox_id, None)
        self._without_shell.discard(sandbox_id)
        return ended

    # Commands

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        from lowtide.providers.kubernetes.process import NoShell, PodProcess

        if spec.user is not None:
            raise errors.UnsupportedError(
                "the exec of Kubernetes has no user",
                feature=Capability.USER.value,
                alternative="KubernetesOptions(run_as_user=…) for the whole sandbox",
                provider=self.name,
                sandbox_id=sandbox_id,
            )
        path = self._pod_path(sandbox_id)
        with mapped(sandbox_id):
            if sandbox_id not in self._without_shell:
                try:
                    return await self._running(
                        sandbox_id,
                        lambda: PodProcess.start(
                            self._api, path, spec, explain=self._explains(sandbox_id), sandbox_id=sandbox_id
                        ),
                    )
                except NoShell:
                    self._without_shell.add(sandbox_id)
            if spec.cwd is not None or spec.environment:
                raise errors.UnsupportedError(
                    "a working directory and an environment per command need a shell in the image",
                    feature="cwd and environment",
                    alternative="an image with /bin/sh, or working_dir and environment of the sandbox",
                    provider=self.name,
                    sandbox_id=sandbox_id,
                )
            return await self._running(
                sandbox_id,
                lambda: PodProcess.start_bare(
                    self._api, path, spec, explain=self._explains(sandbox_id), sandbox_id=sandbox_id
                ),
            )

    async def _running(self, sandbox_id: str, start: Callable[[], Awaitable[PodProcess]]) -> PodProcess:
        """What a refused exec means: mostly that there is nothing to run in any more."""
        # At its deadline a pod counts as failed before the node has killed anything in it.
        expiry = self._expiries.get(sandbox_id)
        if expiry is not None and expiry <= datetime.now(UTC):
            gone = await self._explain(sandbox_id)
            if gone is not None:
                raise gone
        try:
            return await start()
        except ApiError as error:
            if error.status in (400, 404, 500):
                gone = await self._explain(sandbox_id)
                if gone is not None:
                    raise gone from error
            raise

    # Files and ports

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        from lowtide.providers.kubernetes import files

        with mapped(sandbox_id):
            async for chunk in files.read(self._starts_text(sandbox_id), path):
                yield chunk

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        from lowtide.providers.kubernetes import files

        with mapped(sandbox_id):
            return await files.write(self._starts_text(sandbox_id), path, chunks, size=size, mode=mode)

    async def url(self, sandbox_id: str, port: int) -> Url:
        from lowtide.providers.kubernetes.forward import Forward

        if not 0 < port < 65536:
            raise errors.ValidationError(f"{port} is no port", argument="port", provider=self.name)
        key = (sandbox_id, port)
        if key not in self._forwards:
            with mapped(sandbox_id):
                gone = await self._explain(sandbox_id)
                if gone is not None:
                    raise gone
                forward = Forward(self._api, self._pod_path(sandbox_id), port)
                self._forwards[key] = (forward, await forward.listen())
        return Url(url=f"http://127.0.0.1:{self._forwards[key][1]}")

    async def _close_forwards(self, sandbox_id: str) -> None:
        for key in [key for key in self._forwards if key[0] == sandbox_id]:
            await self._forwards.pop(key)[0].aclose()

    def _starts_text(self, sandbox_id: str) -> Callable[[str], Awaitable[PodProcess]]:
        from lowtide.providers.kubernetes.process import NoShell, PodProcess

        async def start(text: str) -> PodProcess:
            try:
                return await self._running(
                    sandbox_id,
                    lambda: PodProcess.start_text(
                        self._api,
                        self._pod_path(sandbox_id),
                        text,
                        explain=self._explains(sandbox_id),
                        sandbox_id=sandbox_id,
                    ),
                )
            except NoShell:
                raise errors.UnsupportedError(
                    "files need a shell in the image",
                    feature="files",
                    alternative="an image with /bin/sh",
                    provider=self.name,
                    sandbox_id=sandbox_id,
                ) from None

        return start

    # Why it is gone

    def _explains(self, sandbox_id: str) -> Explain:
        return lambda: self._explain(sandbox_id)

    async def _explain(self, sandbox_id: str) -> errors.LowtideError | None:
        """The `SandboxGone` that says why nothing can run, None while something can."""
        namespace, name = self._split(sandbox_id)
        pod = await self._objects.read(f"{self._objects.pods(namespace)}/{name}")
        if pod is None or not status.is_ours(pod):
            return await self._gone(namespace, name, sandbox_id)
        problem = status.trouble(pod)
        return self._failed(problem, sandbox_id) if problem is not None else None

    async def _gone(self, namespace: str, name: str, sandbox_id: str) -> errors.SandboxGone:
        """The pod is no longer there; the events that outlive it know more."""
        reason, detail = "deleted", "somebody deleted its pod"
        event = await self._objects.last_event(namespace, name)
        if event is not None and event.get("reason") != "Killing":
            reason, detail = status.word(str(event.get("reason"))), str(event.get("message"))
        return errors.SandboxGone(
            f"sandbox {sandbox_id} is gone: {detail}",
            reason=reason,
            provider=self.name,
            sandbox_id=sandbox_id,
        )

    def _failed(self, problem: status.Trouble, sandbox_id: str) -> errors.LowtideError:
        if problem.ended:
            return errors.SandboxGone(
                f"sandbox {sandbox_id} has ended: {problem.reason}: {problem.message}",
                reason=status.word(problem.reason),
                provider=self.name,
                sandbox_id=sandbox_id,
            )
        return errors.SandboxFailedError(
            f"sandbox {sandbox_id} cannot start: {problem.reason}: {problem.message}",
            reason=problem.reason,
            provider=self.name,
            sandbox_id=sandbox_id,
        )

    # Objects

    def _info(self, pod: Json, sandbox_id: str) -> SandboxInfo:
        found = status.info(pod, sandbox_id)
        if found.expires_at is not None:
            self._expiries[sandbox_id] = found.expires_at
        return found

    def _warn_about_policies(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "network='none' is a NetworkPolicy here: it holds only where the cluster's network plug-in enforces policies"
            )

    def _pod_path(self, sandbox_id: str) -> str:
        namespace, name = self._split(sandbox_id)
        return f"{self._objects.pods(namespace)}/{name}"

    def _id(self, namespace: str, name: str) -> str:
        return name if namespace == self._access.namespace else f"{namespace}/{name}"

    def _split(self, sandbox_id: str) -> tuple[str, str]:
        namespace, slash, name = sandbox_id.rpartition("/")
        if not slash:
            namespace = self._access.namespace
        if not manifest.is_name(name) or not manifest.is_name(namespace):
            raise errors.SandboxNotFoundError(
                f"{sandbox_id!r} is no sandbox id of kubernetes", provider=self.name, sandbox_id=sandbox_id
            )
        return namespace, name


def _leftover(policy: Json, sandbox_id: str) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id=sandbox_id,
        state=SandboxState.FAILED,
        labels=policy["metadata"].get("labels") or {},
        reason="its network policy exists, its pod does not",
    )
