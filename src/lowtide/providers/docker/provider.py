"""`DockerProvider`: the seam's primitives on a Docker or Podman engine."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lowtide import arguments, logger, machine
from lowtide.errors import (
    LowtideError,
    RequestTimeoutError,
    SandboxError,
    SandboxNotFoundError,
    SandboxUnavailableError,
    UnsupportedError,
)
from lowtide.providers import hosted
from lowtide.providers.base import (
    Capability,
    DeniedConnection,
    Labels,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
    nothing_sent,
)
from lowtide.providers.docker import container, ended, images, network
from lowtide.providers.docker.access import KEEP, Endpoint, fingerprint, resolve
from lowtide.providers.docker.channel import ExecChannel, key_of, open_channel
from lowtide.providers.docker.client import EngineClient, checked_id
from lowtide.providers.docker.create import Creation, check_gvisor
from lowtide.providers.docker.errors import SERVICE, mapped
from lowtide.providers.docker.options import DockerOptions
from lowtide.providers.inside import Clients, InsideProcess
from lowtide.providers.network.denied import DeniedFiles

if TYPE_CHECKING:
    from lowtide.providers.docker.images import PullProgress

log = logger.get("lowtide.docker")

DEFAULT_IMAGE = "python:3.11"
_DELETE_SECONDS = 120.0  # how long an engine may take to remove a container and its files
_RESTART_SECONDS = 30.0  # how long a command waits for an engine that was stopped: a restart takes seconds


class DockerProvider(hosted.Hosted):
    """One container per sandbox. The sandbox id is the lease id, which is in its labels and is its first name. Every call
    after the create goes to the engine's own id of the container."""

    name: ClassVar[str] = "docker"
    capabilities: ClassVar[frozenset[Capability]] = hosted.INSIDE | {
        Capability.IMAGE,
        Capability.COMMAND,
        Capability.LOGS,
        Capability.USER,
        Capability.CPU_LIMIT,
        Capability.MEMORY_LIMIT,
        Capability.PIDS_LIMIT,
        Capability.NETWORK_NONE,
        Capability.NETWORK_INTERNET,
        Capability.NETWORK_ALLOW,  # where the engine is on this machine, for root
        Capability.NETWORK_PORTS,
        Capability.DENIED_CONNECTIONS,
        Capability.GVISOR,  # where the engine knows its runtime
        Capability.SNAPSHOT,
        Capability.PAUSE,
        Capability.LIFETIME,
        Capability.RENEW,
    }
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME,
        offline=True,
        # gVisor has a network stack of its own: what is set up in the namespace behind it has no effect inside.
        gvisor_lacks=frozenset({Capability.NETWORK_ALLOW}),
    )
    options_type: ClassVar[type | None] = DockerOptions

    def __init__(self, endpoint: Endpoint, environ: Mapping[str, str]) -> None:
        self.endpoint = endpoint
        self._environ = {key: environ[key] for key in KEEP if environ.get(key)}
        self._environ.update(endpoint.environ())
        self._account: str | None = None
        self._client: EngineClient | None = None
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._ours: dict[str, SandboxInfo] = {}
        """Sandboxes this process made: known to be ready without asking."""
        self._containers: dict[str, str] = {}
        """What the engine calls them. A name can be given away and taken; this cannot."""
        self._network: str | None = None
        self._making_network = asyncio.Lock()
        self.sound_images: set[str] = set()
        """Images in which the engine finds the users without waiting."""
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._ended: dict[str, SandboxInfo] = {}
        """How main processes of the caller's choice ended; the engine has removed them by then."""
        self._keys: dict[str, bytes] = {}
        self.asleep: set[str] = set()
        """Sandboxes this process has paused: nothing in them answers."""
        super().__init__(self._new_clients())
        self.on_pull: Callable[[PullProgress], None] | None = None
        """Told about each step of a pull."""

    # -- connecting

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        given = hosted.chosen("docker", {"host": "DOCKER_HOST"}, options, environ, sent=False)
        environ = {**environ, "DOCKER_HOST": given["host"] or ""}
        return cls(resolve(environ), environ)

    @property
    def account(self) -> str:
        if self._account is None:
            self._account = fingerprint(self.endpoint)
        return self._account

    def credentials(self) -> dict[str, str]:
        return {**dict.fromkeys(KEEP, ""), **self._environ}

    async def client(self) -> EngineClient:
        """One per event loop: a forked child or another loop gets its own."""
        client = self._client
        if client is None or client.loop is not asyncio.get_running_loop():
            client = self._client = EngineClient(self.endpoint)
            self._pulls, self._watched = {}, {}
            self._making_network = asyncio.Lock()
            self.begin_calls(self._new_clients())
        with mapped():
            await client.agree()
        return client

    def _new_clients(self) -> Clients:
        return Clients("docker", self._open_channel, self._key, bound_seconds=_RESTART_SECONDS)

    async def aclose(self) -> None:
        for task in (*self._watched.values(), *self._pulls.values()):
            task.cancel()
        self.end_calls()
        self._watched.clear()
        client, self._client = self._client, None
        if client is not None and client.loop is asyncio.get_running_loop():
            await client.aclose()

    # -- creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        allow = spec.network.allow if spec.network is not None else ()
        with nothing_sent():
            arguments.sandbox_environment("environment_variables", spec.environment)
            client = await self.client()
            if spec.isolation is not None:
                await check_gvisor(client, spec)
            if allow:
                network.check(self.endpoint)
        image = spec.snapshot or spec.image or self._environ.get("LOWTIDE_DOCKER_IMAGE") or DEFAULT_IMAGE
        creation = Creation(self, client, spec, image)
        await creation.run()
        self._keys[spec.lease_id] = creation.key
        self._containers[spec.lease_id] = creation.container_id
        if allow:
            with suppress(SandboxNotFoundError):  # its main command has ended already
                assert spec.network is not None
                denied = self._denied_files().prepare(spec.lease_id)
                await network.connect(spec.lease_id, await self.inspect(spec.lease_id), spec.network, denied)
        info = self._ours[spec.lease_id] = container.created_now(spec)
        return info

    async def network_id(self) -> str:
        """Of the network that sandboxes share; looked for, and made, once."""
        async with self._making_network:
            if self._network is None:
                self._network = await network.own_network(await self.client())
            return self._network

    def forget_network(self) -> None:
        self._network = None

    def watch(self, client: EngineClient, spec: SandboxSpec, container_id: str) -> None:
        self._watched[spec.lease_id] = client.loop.create_task(self._watch(client, spec, container_id))

    async def _watch(self, client: EngineClient, spec: SandboxSpec, container_id: str) -> None:
        """Learn how the caller's own main process ends: with auto-remove the engine tells it only now."""
        code: int | None
        try:
            with mapped(spec.lease_id):
                answer = await client.container(container_id).wait(condition="next-exit")
            code = int(answer.get("StatusCode", -1))
        except LowtideError:  # Podman looks now and then, and may find it removed
            _, code = await ended.how_it_ended(self, spec.lease_id)
        if code is not None:
            self._ended[spec.lease_id] = replace(
                container.created_now(spec),
                state=SandboxState.COMPLETED if code == 0 else SandboxState.FAILED,
                exit_code=code,
                reason=ended.how(code),
            )
        self._watched.pop(spec.lease_id, None)

    async def pull(self, image: str, on_progress: Callable[[PullProgress], None] | None = None) -> None:
        """Fetch an image. Many at once for the same image are one pull."""
        client = await self.client()
        self.sound_images.discard(image)  # the name may be another image's now
        task = self._pulls.get(image)
        if task is None:
            directory = Path(self._environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
            work = images.pull(client, image, directory, on_progress or self.on_pull)
            task = self._pulls[image] = client.loop.create_task(work)
            task.add_done_callback(lambda _: self._pulls.pop(image, None))
        await asyncio.shield(task)

    async def has_image(self, image: str) -> bool:
        """Whether `image` is on the engine."""
        import aiodocker

        client = await self.client()
        with mapped():
            try:
                await client.docker.images.inspect(image)
            except aiodocker.DockerError as error:
                if error.status != 404:
                    raise
                return False
        return True

    # -- looking

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        """The engine's own description of a sandbox's container, whatever its name is now.

        Raises SandboxNotFoundError, also where the name is another container's.
        """
        checked_id(sandbox_id)
        client = await self.client()
        known = self._containers.get(sandbox_id)
        with mapped(sandbox_id):
            if known is not None:
                facts = await client.inspect(known)
                if facts["Id"] != known or not _is(sandbox_id, facts):
                    words = "the engine describes another container than the one it was asked for"
                    raise SERVICE.error(SandboxUnavailableError, words, sandbox_id)
                return facts
            taken = False
            try:
                facts = await client.inspect(sandbox_id)
                taken = not _is(sandbox_id, facts)
            except Exception as error:
                if not isinstance(SERVICE.translated(error, sandbox_id), SandboxNotFoundError):
                    raise
                facts = {}
            if not facts or taken:
                facts = await self._renamed(client, sandbox_id)
        if not facts:
            words = f"no sandbox {sandbox_id} on this engine"
            if taken:
                words += ": the container of that name is somebody else's and was not touched"
            raise SERVICE.error(SandboxNotFoundError, words, sandbox_id)
        self._containers[sandbox_id] = str(facts["Id"])
        return facts

    async def _renamed(self, client: EngineClient, sandbox_id: str) -> dict[str, Any]:
        """The container of a sandbox that has another name now, by its labels; empty: there is none."""
        for one in await self._listed(client, [f"lowtide-lease={container.lease_of(sandbox_id)}"]):
            with suppress(SandboxNotFoundError), mapped(sandbox_id):
                facts = await client.inspect(str(one.get("Id")))
                if _is(sandbox_id, facts):
                    return facts
        return {}

    def known_container(self, sandbox_id: str) -> str | None:
        return self._containers.get(sandbox_id)

    async def container_id(self, sandbox_id: str) -> str:
        """What the engine calls a sandbox's container. Raises SandboxNotFoundError."""
        checked_id(sandbox_id)
        return self._containers.get(sandbox_id) or str((await self.inspect(sandbox_id))["Id"])

    async def get(self, sandbox_id: str) -> SandboxInfo:
        try:
            info = container.from_inspect(await self.inspect(sandbox_id))
        except SandboxNotFoundError:
            watching = self._watched.get(sandbox_id)
            if watching is not None:
                await asyncio.wait([watching], timeout=15)
            ended = self._ended.get(sandbox_id)
            if ended is None:
                raise
            return ended
        if info is None:
            raise SERVICE.error(SandboxNotFoundError, f"{sandbox_id} is not a lowtide sandbox", sandbox_id)
        return info

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        for name in (spec.lease_id, container.carrier_name(spec.lease_id)):
            with suppress(SandboxNotFoundError):
                info = container.from_inspect(await self.inspect(name))
                if info is not None and info.labels.get("lowtide-ledger") == spec.labels.ledger_id:
                    return info
        return None

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        made = self._ours.get(sandbox_id)
        if made is not None and sandbox_id not in self._watched and sandbox_id not in self._ended:
            return made  # create has waited for the engine to start it
        info = await self.get(sandbox_id)
        if info.state.terminal:
            raise ended.gone(sandbox_id, info.reason or "exited")
        return info

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        client = await self.client()
        wanted = [f"{key}={value}" for key, value in labels.items()] or ["lowtide-lease"]
        for one in await self._listed(client, wanted):
            info = container.from_list(one)
            if info is None and Labels.from_dict(container.own_labels(one.get("Labels"))) is not None:
                with suppress(SandboxNotFoundError), mapped():  # renamed, or somebody else's with our labels
                    info = container.from_inspect(await client.inspect(str(one.get("Id"))))
            if info is not None:
                yield info

    async def _listed(self, client: EngineClient, labels: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        query = {"all": "1", "filters": json.dumps({"label": labels})}
        for attempt in range(10):
            try:
                with mapped():
                    found = await client.request("GET", "containers/json", params=query)
                break
            except SandboxNotFoundError:  # Podman's whole answer fails when one goes away meanwhile
                if attempt == 9:
                    raise
                await asyncio.sleep(0.05)
        if not isinstance(found, list):
            words = "the engine did not answer with a list of containers"
            raise SERVICE.error(SandboxUnavailableError, words)
        return [one for one in found if isinstance(one, dict)]

    # -- ending

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        import aiodocker

        if not hosted.is_word(sandbox_id):
            return False  # nothing can have this id
        client = await self.client()
        self._let_go(sandbox_id)
        try:
            box = str((await self.inspect(sandbox_id))["Id"])
        except SandboxNotFoundError as error:
            if "somebody else's" in str(error):
                log.warning("%s", error)
            self._forget(sandbox_id)
            return False
        with mapped(sandbox_id):
            if grace_seconds > 0:
                try:
                    await client.container(box).stop(t=math.ceil(grace_seconds))
                except aiodocker.DockerError as error:
                    if error.status not in (304, 404, 409, 500):  # paused, or already on its way out
                        raise
            try:
                await client.order(
                    f"containers/{box}",
                    method="DELETE",
                    params={"force": "1", "v": "1"},
                    seconds=_DELETE_SECONDS,
                )
            except aiodocker.DockerError as error:
                if error.status == 409 or "in progress" in error.message:
                    await self._until_removed(client, sandbox_id, box)
                elif not isinstance(SERVICE.translated(error, sandbox_id), SandboxNotFoundError):
                    raise
        self._forget(sandbox_id)
        return True

    def _denied_files(self) -> DeniedFiles:
        return DeniedFiles(machine.home() / "docker" / "denied")

    async def denied_connections(self, sandbox_id: str) -> builtins.list[DeniedConnection]:
        """What an allow-list refused, oldest first; also after the sandbox's end, for a week."""
        return self._denied_files().read(checked_id(sandbox_id))

    async def _until_removed(self, client: EngineClient, sandbox_id: str, container_id: str) -> None:
        """The engine is removing it already. Only its absence is proof."""
        deadline = time.monotonic() + 60
        for delay in hosted.backoff(0.005, 0.25):
            try:
                with mapped(sandbox_id):
                    await client.inspect(container_id)
            except SandboxNotFoundError:
                return
            if time.monotonic() > deadline:
                words = "the engine is still removing the container"
                raise SERVICE.error(RequestTimeoutError, words, sandbox_id)
            await asyncio.sleep(delay)

    def _forget(self, sandbox_id: str) -> None:
        self._ours.pop(sandbox_id, None)
        self._containers.pop(sandbox_id, None)
        self._denied_files().settle(sandbox_id)

    def _let_go(self, sandbox_id: str) -> None:
        self.forget_calls(sandbox_id)
        self._ended.pop(sandbox_id, None)
        self._keys.pop(sandbox_id, None)
        self.asleep.discard(sandbox_id)
        task = self._watched.pop(sandbox_id, None)
        if task is not None:
            task.cancel()

    # -- the program inside

    async def _open_channel(self, sandbox_id: str, first: bytes) -> ExecChannel:
        return await open_channel(self, sandbox_id, first)

    async def _key(self, sandbox_id: str) -> bytes:
        try:
            return self._keys.get(sandbox_id) or await key_of(self, sandbox_id)
        except SandboxNotFoundError as error:
            raise await ended.explained(self, sandbox_id, error) from error

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> InsideProcess:
        if sandbox_id in self.asleep:
            raise ended.paused(sandbox_id)
        client = await self.clients.get(sandbox_id)
        starting = asyncio.ensure_future(client.start(spec))
        try:
            while not (await asyncio.wait([starting], timeout=10))[0]:
                if (await self.get(sandbox_id)).state is SandboxState.PAUSED:
                    raise ended.paused(sandbox_id)
        finally:
            if not starting.done():
                starting.cancel()
        return starting.result()

    # -- what Docker does beyond the primitives

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """PID 1 keeps the clock, and takes a new time only from who has the key. A paused sandbox has no clock that runs:
        it is not renewed, and lowtide's own processes end it (docs/docker.md)."""
        info = await self.get(sandbox_id)
        if info.state is SandboxState.PAUSED:
            return None
        if info.state is not SandboxState.RUNNING:
            raise SERVICE.error(SandboxNotFoundError, f"the sandbox is {info.state}", sandbox_id)
        return await self.renew_inside(sandbox_id, lifetime_seconds)

    async def logs(self, sandbox_id: str, *, follow: bool, tail_lines: int | None) -> AsyncIterator[bytes]:
        await self.get(sandbox_id)  # ours, and there
        params = {"stdout": "1", "stderr": "1", "follow": "1" if follow else "0"}
        params["tail"] = str(tail_lines) if tail_lines is not None else "all"
        client = await self.client()
        with mapped(sandbox_id):
            box = await self.container_id(sandbox_id)
            async with contextlib.aclosing(client.printed(box, params)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        await self.get(sandbox_id)  # ours, and there
        client, box = await self.client(), await self.container_id(sandbox_id)
        if (path := await images.blocks_engine(client, box)) is not None:
            words = f"{path} in the sandbox is not a file, and an engine would wait for ever to start a snapshot with it: put a file there"
            raise SERVICE.error(SandboxError, words, sandbox_id)
        return await images.commit(client, box, sandbox_id, name)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await images.delete_snapshot(await self.client(), snapshot_id)

    async def list_snapshots(self) -> Sequence[str]:
        return await images.list_snapshots(await self.client())

    async def pause(self, sandbox_id: str) -> None:
        """The engine freezes PID 1, which holds the lifetime, with everything else. From then on only a lowtide process can end
        the sandbox. So an engine that may outlive this machine is refused."""
        client = await self.client()
        with mapped(sandbox_id):
            here = await client.on_this_machine()
        if not here:
            raise SERVICE.error(
                UnsupportedError,
                "the docker provider pauses sandboxes only on an engine of this machine, and this one is on another machine, in a "
                "virtual machine or outside of this container: a paused container's lifetime does not run, so nothing would "
                "end it if this machine were lost",
                sandbox_id,
                feature="pause",
                alternative="snapshot() and start from it later, or leave it running",
            )
        if (await self.get(sandbox_id)).state is not SandboxState.PAUSED:
            with mapped(sandbox_id):
                await client.order(f"containers/{await self.container_id(sandbox_id)}/pause")
        self.asleep.add(sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        client = await self.client()
        if (await self.get(sandbox_id)).state is SandboxState.PAUSED:
            with mapped(sandbox_id):
                await client.order(f"containers/{await self.container_id(sandbox_id)}/unpause")
        self.asleep.discard(sandbox_id)

    async def url(self, sandbox_id: str, port: int) -> Url:
        facts = await self.inspect(sandbox_id)
        if self.endpoint.local:
            for published in (facts.get("NetworkSettings", {}).get("Ports") or {}).get(f"{port}/tcp") or ():
                return Url(url=f"http://127.0.0.1:{published['HostPort']}")
        return await self.forwarded_url(sandbox_id, port)


def _is(sandbox_id: str, facts: Mapping[str, Any]) -> bool:
    info = container.from_inspect(facts)
    return info is not None and info.sandbox_id == sandbox_id
