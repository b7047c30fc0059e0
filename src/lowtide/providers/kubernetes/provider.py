"""Kubernetes as a provider: one Pod per sandbox, the program inside as its first process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar

from lowtide import errors, logger
from lowtide.providers import hosted
from lowtide.providers.base import (
    Capability,
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.inside import Clients, program
from lowtide.providers.kubernetes import pod, status
from lowtide.providers.kubernetes.access import Access
from lowtide.providers.kubernetes.errors import PROVIDER, SERVICE, ApiError, mapped
from lowtide.providers.kubernetes.options import KubernetesOptions

if TYPE_CHECKING:
    from lowtide.providers.inside import Channel

log = logger.get("lowtide.kubernetes")

DEFAULT_IMAGE = "python:3.12-slim"
_RIGHTS_SECONDS = 300.0


class KubernetesProvider(hosted.Hosted):
    """The primitives over the API server. A sandbox id is the pod's name, with ``namespace/`` where it is not ours."""

    name: ClassVar[str] = PROVIDER
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        Capability.IMAGE,
        Capability.COMMAND,
        Capability.LOGS,
        Capability.USER,
        Capability.CPU_LIMIT,
        Capability.MEMORY_LIMIT,
        Capability.GVISOR,  # the runtime class of that name; a cluster without it refuses the pod
        Capability.NETWORK_NONE,  # by NetworkPolicy: the cluster's network plug-in enforces it
        Capability.NETWORK_INTERNET,
        Capability.LIFETIME,
        Capability.RENEW,  # by the program's clock: the API lets activeDeadlineSeconds only be lowered
    }
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME,
        offline=True,
        recovery_options=("namespace",),
        create_window_seconds=60.0,  # the API server's own limit for a request
        max_lifetime_seconds=float(pod.MAX_LIFETIME_SECONDS),
        default_lifetime_seconds=float(pod.DEFAULT_LIFETIME_SECONDS),
    )
    options_type: ClassVar[type | None] = KubernetesOptions
    access_type = Access
    _access: Access

    def __init__(self, access: Access) -> None:
        # Here, so that the class and its capabilities can be read without the extra.
        from lowtide.providers.kubernetes.client import Api
        from lowtide.providers.kubernetes.lookup import Lookup

        self._access = access
        self._api = Api(access)
        self._lookup = Lookup(self._api, access.namespace)
        self._keys: dict[str, bytes] = {}
        self._rights: dict[tuple[str, bool], float] = {}
        """Until when what is needed in a namespace, without or with a policy, counts as allowed."""
        self._architecture: str | None = None
        self._warned = False
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(Clients(PROVIDER, self._open_channel, self._key))

    # -- connecting

    async def aclose(self) -> None:
        self._begin()
        self.end_calls()
        await asyncio.sleep(0)  # their last words go out before the connections do
        await self._api.aclose()

    def _begin(self) -> None:
        """A forked child, or another event loop, has no use for the listeners of the old one; clients see to it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self.begin_calls(self.clients)

    # -- the sandbox

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        from lowtide.providers.kubernetes.create import Creation

        with nothing_sent():
            pod.check(spec)
            options = pod.options_of(spec)
            architecture = options.node_selector.get(pod.ARCHITECTURE) or await self._servers_architecture()
            program.program(architecture, provider=PROVIDER)
        namespace = self._lookup.here(options.namespace)
        if pod.wants_policy(spec):
            self._warn_about_policies()
        image = self._access.image or DEFAULT_IMAGE
        creation = Creation(self._api, spec, namespace, image, architecture)
        asked = (namespace, pod.wants_policy(spec))
        if time.monotonic() > self._rights.get(asked, 0.0):
            with nothing_sent(), mapped():
                await creation.check_rights()
            self._rights[asked] = time.monotonic() + _RIGHTS_SECONDS
        with mapped(self._lookup.id_of(namespace, pod.pod_name(spec.lease_id))):
            made = await creation.run()
        sandbox_id = self._lookup.made(namespace, made, options.unschedulable_seconds)
        self._keys[sandbox_id] = creation.key
        return status.info(made, sandbox_id)

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        return await self._lookup.find(spec.lease_id, pod.options_of(spec).namespace)

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return await self._lookup.get(sandbox_id)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        return await self._lookup.until_running(sandbox_id)

    def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        return self._lookup.list(labels)

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        from lowtide.providers.kubernetes import destroy

        try:
            namespace, name = self._lookup.split(sandbox_id)
        except errors.SandboxNotFoundError:
            return False  # nothing can have this id
        self.forget_calls(sandbox_id)
        self._lookup.forget(sandbox_id)
        with mapped(sandbox_id):
            found = await self._api.get(f"{pod.pods(namespace)}/{name}")
            if found is not None and not status.is_ours(found):
                log.warning("pod %s/%s is not lowtide's and was left alone", namespace, name)
                return False
            ended = found is not None and await destroy.delete_pod(self._api, namespace, found, grace_seconds)
            ended = await destroy.delete_beside(self._api, namespace, name) or ended
        self._keys.pop(sandbox_id, None)
        return ended

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """PID 1 keeps the clock, and takes a new time only from who has the key. The pod's own deadline stays."""
        with mapped(sandbox_id):
            found = await self._lookup.pod(sandbox_id)
            if found is None or not status.running(found):
                state = "gone" if found is None else status.info(found, sandbox_id).state
                raise SERVICE.error(errors.SandboxNotFoundError, f"the sandbox is {state}", sandbox_id)
            until = await self.renew_inside(sandbox_id, lifetime_seconds)
        fixed = status.deadline(found)
        return min(until, fixed) if fixed is not None else until

    # -- what goes on in it

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        from lowtide.providers.kubernetes.ended import PodProcess

        with mapped(sandbox_id):
            process = await (await self.clients.get(sandbox_id)).start(spec)
        return PodProcess(process, lambda: self._explain(sandbox_id))

    async def url(self, sandbox_id: str, port: int) -> Url:
        if not 0 < port < 65536:
            raise SERVICE.error(errors.ValidationError, f"{port} is no port", argument="port")
        self._begin()
        gone = await self._explain(sandbox_id)
        if gone is not None:
            raise gone
        return await self.forwarded_url(sandbox_id, port)

    async def logs(self, sandbox_id: str, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
        """As the node keeps it. Takes the right to get pods/log."""
        namespace, name = self._lookup.split(sandbox_id)
        params = {"container": pod.CONTAINER, "follow": "true" if follow else "false"}
        if tail_lines is not None:
            params["tailLines"] = str(tail_lines)
        with mapped(sandbox_id):
            pieces = self._api.text(f"{pod.pods(namespace)}/{name}/log", params)
            async with contextlib.aclosing(pieces):  # type: ignore[type-var]
                async for data in pieces:
                    yield data

    async def _open_channel(self, sandbox_id: str, first: bytes) -> Channel:
        from lowtide.providers.kubernetes.channel import open_channel

        return await open_channel(self._lookup, sandbox_id, first)

    async def _key(self, sandbox_id: str) -> bytes:
        """From the create call, else from where that left it: the secret, or the pod where there is none."""
        from lowtide.providers.kubernetes import ended

        known = self._keys.get(sandbox_id)
        if known is not None:
            return known
        namespace, name = self._lookup.split(sandbox_id)
        with mapped(sandbox_id):
            found = await self._lookup.pod(sandbox_id)
            if found is None:
                raise await ended.gone(self._lookup, sandbox_id)
            key = pod.key_in_pod(found)
            if key is None:
                secret = await self._api.get(f"{pod.secrets(namespace)}/{name}")
                key = pod.key_in_secret(secret) if secret is not None and status.is_ours(secret) else None
        if key is None:
            words = "this pod has no key: its secret is gone, or another version of lowtide made it"
            raise SERVICE.error(errors.SandboxUnavailableError, words, sandbox_id, retryable=False)
        self._keys[sandbox_id] = key
        return key

    async def _explain(self, sandbox_id: str) -> errors.LowtideError | None:
        from lowtide.providers.kubernetes.ended import explain

        return await explain(self._lookup, sandbox_id)

    async def _servers_architecture(self) -> str:
        """The API server's, which is most often the nodes' too; reading those takes a right over the whole cluster."""
        if self._architecture is None:
            try:
                with mapped():
                    platform = str((await self._api.request("GET", "/version")).get("platform") or "")
            except errors.AuthenticationError as error:
                if not isinstance(error.__cause__, ApiError):
                    raise
                platform = ""  # not everybody may ask; who may do nothing at all hears it from the create
            self._architecture = platform.partition("/")[2] or "amd64"
        return self._architecture

    def _warn_about_policies(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "network='none' is a NetworkPolicy here: it holds only where the cluster's network plug-in enforces policies"
            )
