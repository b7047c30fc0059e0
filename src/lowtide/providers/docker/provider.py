"""`DockerProvider`: the seam's primitives on a Docker or Podman engine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lowtide.errors import (
    LowtideError,
    RequestTimeoutError,
    SandboxError,
    SandboxFailedError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import (
    Capability,
    FileEntry,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
    Traits,
    Url,
)
from lowtide.providers.docker import container, files, images, inside
from lowtide.providers.docker.channel import Channel, ChannelFull, ChannelProcess
from lowtide.providers.docker.client import EngineClient, RawStream
from lowtide.providers.docker.endpoint import KEEP, Endpoint, fingerprint, resolve
from lowtide.providers.docker.forward import Forward
from lowtide.providers.docker.options import DockerOptions, PullPolicy
from lowtide.providers.docker.process import ExecProcess

if TYPE_CHECKING:
    from lowtide.providers.docker.images import PullProgress

DEFAULT_IMAGE = "python:3.11"
_HOW = {str(inside.EXPIRED): "expired", "137": "deleted"}
"""What the exit code of PID 1 says about the end of a sandbox; nothing inside can kill it."""


class DockerProvider:
    """One container per sandbox. The sandbox id is the container's name, which is the lease id."""

    name: ClassVar[str] = "docker"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.IMAGE,
            Capability.COMMAND,
            Capability.STDIN,
            Capability.TTY,
            Capability.USER,
            Capability.SIGNALS,
            Capability.CPU_LIMIT,
            Capability.MEMORY_LIMIT,
            Capability.PIDS_LIMIT,
            Capability.NETWORK_NONE,
            Capability.NETWORK_FULL,
            Capability.PORTS,
            Capability.SNAPSHOT,
            Capability.PAUSE,
            Capability.LIFETIME,
            Capability.RENEW,
        }
    )
    traits: ClassVar[Traits] = Traits(
        recovery=Recovery.BY_NAME, create_window_seconds=60.0, outlives_machine=True
    )
    options_type: ClassVar[type | None] = DockerOptions

    def __init__(self, endpoint: Endpoint, environ: Mapping[str, str]) -> None:
        self.endpoint = endpoint
        self._environ = {key: environ[key] for key in KEEP if environ.get(key)}
        self._environ["DOCKER_HOST"] = endpoint.url
        self._account: str | None = None
        self._client: EngineClient | None = None
        self._architecture: str | None = None
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._ours: dict[str, SandboxInfo] = {}
        """Sandboxes this process made: known to be ours without asking."""
        self._watched: dict[str, asyncio.Task[None]] = {}
        self._ended: dict[str, SandboxInfo] = {}
        """How main processes of the caller's choice ended; the engine has removed them by then."""
        self._channels: dict[str, asyncio.Task[Channel]] = {}
        self._asleep: set[str] = set()
        """Sandboxes this process has paused."""
        self._forwards: dict[tuple[str, int], Forward] = {}
        self.on_pull: Callable[[PullProgress], None] | None = None
        """Told about each step of a pull."""

    # -- connecting

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        given = dict(options or {})
        host = given.pop("host", None)
        if given:
            raise ValidationError(
                f"the docker provider takes the option `host`, not {sorted(given)}",
                argument=sorted(given)[0],
                provider="docker",
            )
        environ = {**environ, "DOCKER_HOST": host} if host else environ
        return cls(resolve(environ), environ)

    @property
    def account(self) -> str:
        if self._account is None:
            from lowtide.lifecycle.lease import this_host

            self._account = fingerprint(self.endpoint, this_host())
        return self._account

    def credentials(self) -> dict[str, str]:
        return dict(self._environ)

    async def client(self) -> EngineClient:
        """One per event loop: a forked child or another loop gets its own."""
        client = self._client
        if client is None or client.loop is not asyncio.get_running_loop():
            client = self._client = EngineClient(self.endpoint)
            self._pulls, self._forwards, self._watched, self._channels = {}, {}, {}, {}
        return client

    async def aclose(self) -> None:
        for forward in self._forwards.values():
            forward.close()
        for task in (*self._watched.values(), *self._pulls.values()):
            task.cancel()
        for opening in self._channels.values():
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            opening.cancel()
        self._channels.clear()
        self._forwards.clear()
        self._watched.clear()
        client, self._client = self._client, None
        if client is not None and client.loop is asyncio.get_running_loop():
            await client.aclose()

    # -- creating

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        import aiodocker

        client = await self.client()
        options: DockerOptions = spec.options or DockerOptions()
        image = spec.snapshot or spec.image or self._environ.get("LOWTIDE_DOCKER_IMAGE") or DEFAULT_IMAGE
        with client.translated(spec.lease_id):
            volume = inside.volume_name(await self._engine_architecture(client))
            body = container.create_body(spec, image, volume=volume, publish=self.endpoint.local)
            if spec.snapshot:
                try:
                    for key in await images.inherited_labels(client, spec.snapshot):
                        body["Labels"].setdefault(key, "")
                except aiodocker.DockerError as error:
                    if error.status != 404:
                        raise
            elif options.pull is PullPolicy.ALWAYS:
                await self.pull(image)
            for attempt in range(3):
                made = False
                try:
                    await client.docker.containers.create(body, name=spec.lease_id)
                    made = True
                    await self._start(client, spec)
                    break
                except aiodocker.DockerError as error:
                    if made:  # never remove what this call has not made: the name may be somebody else's
                        await self._discard(client, spec.lease_id)
                    if _no_such_image(error) and attempt == 0:
                        await self._get_image(spec, image, options)
                    elif _name_taken(error) and attempt < 2:
                        if await self._is_this(client, spec):
                            break
                    elif inside.PROGRAM in error.message and attempt < 2:
                        await self._fill_volume(client, spec, image, volume)
                    else:
                        raise _not_started(error, spec) from error
        info = self._ours[spec.lease_id] = container.created_now(spec)
        return info

    async def _start(self, client: EngineClient, spec: SandboxSpec) -> None:
        if spec.command is not None:
            self._watched[spec.lease_id] = client.loop.create_task(self._watch(client, spec))
        await client.container(spec.lease_id).start()

    async def _watch(self, client: EngineClient, spec: SandboxSpec) -> None:
        """Learn how the caller's own main process ends: with auto-remove the engine tells it only now."""
        with suppress(LowtideError):
            with client.translated(spec.lease_id):
                answer = await client.container(spec.lease_id).wait(condition="next-exit")
            code = int(answer.get("StatusCode", -1))
            info = container.created_now(spec)
            self._ended[spec.lease_id] = replace(
                info,
                state=SandboxState.COMPLETED if code == 0 else SandboxState.FAILED,
                exit_code=code,
                reason="exited" if code != inside.EXPIRED else "expired",
            )
        self._watched.pop(spec.lease_id, None)

    async def _is_this(self, client: EngineClient, spec: SandboxSpec) -> bool:
        """The name is taken: by an earlier try of the same create, or by somebody else."""
        try:
            facts = await self.inspect(spec.lease_id)
        except SandboxNotFoundError:
            return False  # it has just gone: try again
        info = container.from_inspect(facts)
        labels = info.labels if info else {}
        if any(labels.get(key) != value for key, value in spec.labels.as_dict().items()):
            raise SandboxFailedError(
                f"a container named {spec.lease_id} exists and is not this sandbox",
                reason="name-taken",
                provider="docker",
                sandbox_id=spec.lease_id,
            )
        if info is not None and info.state is SandboxState.PENDING:
            await self._start(client, spec)
        return True

    async def _get_image(self, spec: SandboxSpec, image: str, options: DockerOptions) -> None:
        if spec.snapshot:
            raise SandboxFailedError(
                f"no snapshot {image} on this engine",
                reason="snapshot-missing",
                provider="docker",
                sandbox_id=spec.lease_id,
            )
        if options.pull is PullPolicy.NEVER:
            raise SandboxFailedError(
                f"the image {image} is not on this engine and pull is 'never': docker pull {image}",
                reason="image-missing",
                provider="docker",
                sandbox_id=spec.lease_id,
            )
        await self.pull(image)

    async def pull(self, image: str, on_progress: Callable[[PullProgress], None] | None = None) -> None:
        """Fetch an image. Many at once for the same image are one pull."""
        client = await self.client()
        task = self._pulls.get(image)
        if task is None:
            directory = Path(self._environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
            work = images.pull(client, image, directory, on_progress or self.on_pull)
            task = self._pulls[image] = client.loop.create_task(work)
            task.add_done_callback(lambda _: self._pulls.pop(image, None))
        await asyncio.shield(task)

    async def _engine_architecture(self, client: EngineClient) -> str:
        if self._architecture is None:
            self._architecture = str((await client.docker.version()).get("Arch", "unknown"))
        return self._architecture

    async def _fill_volume(self, client: EngineClient, spec: SandboxSpec, image: str, volume: str) -> None:
        """Once per engine and version of our program. The carrier has the lease's labels, so that a
        crash in between leaves nothing that a sweep would not find."""
        name = container.carrier_name(spec.lease_id)
        await client.docker.containers.create(container.carrier_body(spec, image, volume=volume), name=name)
        try:
            data = inside.volume_archive(await self._engine_architecture(client))
            request = client.stream(
                "PUT", f"containers/{name}/archive", params={"path": inside.DIRECTORY}, data=data
            )
            async with request as answer:
                await answer.read()
        finally:
            await self._discard(client, name)

    async def _discard(self, client: EngineClient, name: str) -> None:
        import aiodocker

        with suppress(aiodocker.DockerError):
            await client.container(name).delete(force=True, v=True)

    # -- looking

    async def inspect(self, sandbox_id: str) -> dict[str, Any]:
        """The engine's own description. Raises SandboxNotFoundError."""
        client = await self.client()
        with client.translated(sandbox_id):
            facts: dict[str, Any] = await client.container(_checked_id(sandbox_id)).show()
            return facts

    async def get(self, sandbox_id: str) -> SandboxInfo:
        try:
            info = container.from_inspect(await self.inspect(sandbox_id))
        except SandboxNotFoundError:
            ended = self._ended.get(sandbox_id)
            if ended is None:
                raise
            return ended
        if info is None:
            raise SandboxNotFoundError(
                f"{sandbox_id} is not a lowtide sandbox", provider="docker", sandbox_id=sandbox_id
            )
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
            raise self._gone(sandbox_id, info.reason or "exited")
        return info

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        client = await self.client()
        wanted = [f"{key}={value}" for key, value in labels.items()] or ["lowtide-lease"]
        query = {"all": "1", "filters": json.dumps({"label": wanted})}
        for attempt in range(10):
            try:
                with client.translated():
                    async with client.stream("GET", "containers/json", params=query) as answer:
                        found = await answer.json()
                break
            except SandboxNotFoundError:  # Podman's whole answer fails when one goes away meanwhile
                if attempt == 9:
                    raise
                await asyncio.sleep(0.05)
        for one in found:
            info = container.from_list(one)
            if info is not None:
                yield info

    # -- ending

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        import aiodocker

        client = await self.client()
        self._let_go(sandbox_id)
        there = False
        if grace_seconds > 0 or sandbox_id not in self._ours:
            try:
                if container.from_inspect(await self.inspect(sandbox_id)) is None:
                    return False  # not a sandbox: nothing of ours, nothing to touch
                there = True  # from here on, not found means ended by this call
            except SandboxNotFoundError:
                self._ours.pop(sandbox_id, None)
                return False
        box = client.container(sandbox_id)
        with client.translated(sandbox_id):
            if grace_seconds > 0:
                try:
                    await box.stop(t=math.ceil(grace_seconds))
                except aiodocker.DockerError as error:
                    if error.status not in (304, 404, 409, 500):  # paused, or already on its way out
                        raise
            try:
                await box.delete(force=True, v=True)
                there = True
            except aiodocker.DockerError as error:
                if error.status == 409 or "in progress" in error.message:
                    await self._until_removed(sandbox_id)
                    there = True
                elif error.status != 404:
                    raise
        self._ours.pop(sandbox_id, None)
        return there

    async def _until_removed(self, sandbox_id: str) -> None:
        """The engine is removing it already. Only its absence is proof."""
        deadline = time.monotonic() + 60
        pause = 0.005
        while time.monotonic() < deadline:
            try:
                await self.inspect(sandbox_id)
            except SandboxNotFoundError:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.25)
        raise RequestTimeoutError(
            "the engine is still removing the container", provider="docker", sandbox_id=sandbox_id
        )

    def _let_go(self, sandbox_id: str) -> None:
        for key in [key for key in self._forwards if key[0] == sandbox_id]:
            self._forwards.pop(key).close()
        self._ended.pop(sandbox_id, None)
        self._asleep.discard(sandbox_id)
        self._channels.pop(sandbox_id, None)  # it breaks with the container, and tells its commands then
        task = self._watched.pop(sandbox_id, None)
        if task is not None:
            task.cancel()

    # -- running

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ChannelProcess | ExecProcess:
        if spec.tty is None and spec.user is None:
            with suppress(ChannelFull):
                return await self._start_over_channel(sandbox_id, spec)
        client = await self.client()
        process = ExecProcess(self, client, _checked_id(sandbox_id), spec)
        try:
            with client.translated(sandbox_id):
                await process.start()
        except LowtideError as error:
            raise await self.explained(sandbox_id, error) from error.__cause__
        return process

    async def _start_over_channel(self, sandbox_id: str, spec: ProcessSpec) -> ChannelProcess:
        for last in (False, True):
            channel = await self._channel(sandbox_id)
            try:
                async with asyncio.timeout(10):
                    return await channel.start(spec)
            except BrokenPipeError:
                self._channels.pop(sandbox_id, None)  # it broke since it was last used
            except TimeoutError as error:
                info = await self.get(sandbox_id)
                if info.state is SandboxState.PAUSED:
                    raise self._paused(sandbox_id) from error
                if last:
                    raise
        raise SandboxUnavailableError(
            "the connection into the sandbox broke", provider="docker", sandbox_id=sandbox_id
        )

    async def _channel(self, sandbox_id: str) -> Channel:
        """The standing connection into a sandbox; opened once, by whoever comes first."""
        client = await self.client()
        if sandbox_id in self._asleep:
            raise self._paused(sandbox_id)
        opening = self._channels.get(sandbox_id)
        if opening is not None and opening.done() and (opening.exception() or not opening.result().alive):
            opening = None
        if opening is None:
            opening = self._channels[sandbox_id] = client.loop.create_task(
                self._open_channel(client, sandbox_id)
            )
            opening.add_done_callback(_seen)
        return await asyncio.shield(opening)

    async def _open_channel(self, client: EngineClient, sandbox_id: str) -> Channel:
        channel = Channel(client, _checked_id(sandbox_id), lambda error: self._lost(sandbox_id, error))
        try:
            with client.translated(sandbox_id):
                await channel.open()
        except LowtideError as error:
            channel.close()
            raise await self.explained(sandbox_id, error) from error.__cause__
        return channel

    async def inside(self, sandbox_id: str, *command: str, user: str) -> int:
        """Run our program for a word of answer: 0, or the error number."""
        client = await self.client()
        stream = RawStream()
        try:
            with client.translated(sandbox_id):
                made = await client.container(_checked_id(sandbox_id)).exec(
                    [inside.PROGRAM, *command], user=user
                )
                await client.attach(f"exec/{made.id}/start", {"Detach": False, "Tty": False}, stream)
                words = await files.Answer(stream, command[0], sandbox_id).line()
        finally:
            stream.close()
        return 0 if words[0] == "ok" else int(words[1])

    @asynccontextmanager
    async def inside_stream(
        self, sandbox_id: str, command: Sequence[str], *, stdin: bool = False
    ) -> AsyncIterator[ChannelProcess]:
        """Run our program in the container and talk to it."""
        spec = ProcessSpec(argv=(inside.PROGRAM, *command), stdin=stdin)
        process = await self._start_over_channel(sandbox_id, spec)
        try:
            yield process
        finally:
            if stdin:
                await _finished(process)
            process.close()

    async def explained(self, sandbox_id: str, error: LowtideError) -> LowtideError:
        """A refusal to run something, as what it means: the sandbox has ended, or is paused."""
        words = str(error)
        if isinstance(error, SandboxNotFoundError) or "is not running" in words or "state improper" in words:
            try:
                info = await self.get(sandbox_id)
            except SandboxNotFoundError:
                return self._gone(sandbox_id, await self._why_gone(sandbox_id))
            except LowtideError as worse:
                return worse
            if info.state is SandboxState.PAUSED:
                return self._paused(sandbox_id)
            if info.state.terminal or info.state is SandboxState.ENDING:
                return self._gone(sandbox_id, info.reason or await self._why_gone(sandbox_id))
        elif "is paused" in words:
            return self._paused(sandbox_id)
        return error

    async def _lost(self, sandbox_id: str, error: LowtideError) -> LowtideError:
        """The connection broke. It does so a moment before the engine knows that a container has ended."""
        for pause in (0.02, 0.05, 0.1, 0.2, 0.4, 0.0):
            try:
                info = await self.get(sandbox_id)
            except SandboxNotFoundError:
                return self._gone(sandbox_id, await self._why_gone(sandbox_id))
            except LowtideError as worse:
                return worse
            if info.state.terminal:
                return self._gone(sandbox_id, info.reason or await self._why_gone(sandbox_id))
            await asyncio.sleep(pause)
        return error

    async def ended_with(self, sandbox_id: str, code: int) -> int | LowtideError:
        """A command's exit code as the engine has it, unless it was the whole container that ended."""
        try:
            info = await self.get(sandbox_id)
        except SandboxNotFoundError:
            return self._gone(sandbox_id, await self._why_gone(sandbox_id))
        except LowtideError as error:
            return error
        return self._gone(sandbox_id, info.reason or "exited") if info.state.terminal else code

    def _paused(self, sandbox_id: str) -> SandboxUnavailableError:
        return SandboxUnavailableError(
            "the sandbox is paused: resume() it first", provider="docker", sandbox_id=sandbox_id
        )

    def _gone(self, sandbox_id: str, reason: str) -> SandboxGone:
        return SandboxGone(
            f"the sandbox has ended ({reason})", reason=reason, provider="docker", sandbox_id=sandbox_id
        )

    async def _why_gone(self, sandbox_id: str) -> str:
        """Auto-removed containers leave only the engine's recent events to tell how they ended."""
        client = await self.client()
        filters = {
            "container": [sandbox_id],
            "type": ["container"],
            "event": ["oom", "die", "kill", "destroy"],
        }
        options = {
            "since": str(int(time.time()) - 86400),
            "until": str(int(time.time()) + 1),
            "filters": json.dumps(filters),
        }
        reason = "deleted"
        with suppress(LowtideError, ValueError, TimeoutError):
            async with asyncio.timeout(10):
                with client.translated(sandbox_id):
                    async with client.stream("GET", "events", params=options) as answer:
                        async for line in answer.content:
                            event = json.loads(line)
                            word = event.get("Action") or event.get("status")
                            code = (event.get("Actor") or {}).get("Attributes", {}).get("exitCode")
                            if word == "oom":
                                return "oom"
                            if word == "kill":
                                return "deleted"
                            if word == "die":
                                reason = _HOW.get(str(code), "exited")
                            if word in ("destroy", "remove"):
                                return reason
        return reason

    # -- files

    def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        return files.read_file(self, sandbox_id, path)

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        return await files.write_file(self, sandbox_id, path, chunks, size=size, mode=mode)

    async def stat(self, sandbox_id: str, path: str) -> FileEntry:
        return await files.stat(self, sandbox_id, path)

    async def list_dir(self, sandbox_id: str, path: str) -> Sequence[FileEntry]:
        return await files.list_dir(self, sandbox_id, path)

    async def make_dir(self, sandbox_id: str, path: str) -> None:
        await files.simple(self, sandbox_id, path, "mkdir", files.checked(path))

    async def remove(self, sandbox_id: str, path: str, *, recursive: bool) -> None:
        await files.simple(self, sandbox_id, path, "remove", files.checked(path), "r" if recursive else "-")

    def read_tree(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        return files.read_tree(self, sandbox_id, path)

    async def write_tree(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes]) -> None:
        await files.write_tree(self, sandbox_id, path, chunks)

    # -- what Docker does beyond the primitives

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        """Through PID 1's standard input, which nothing in the sandbox can write to."""
        client = await self.client()
        seconds = max(1, math.ceil(lifetime_seconds))
        info = await self.get(sandbox_id)
        if info.state is not SandboxState.RUNNING:
            raise SandboxNotFoundError(
                f"the sandbox is {info.state}", provider="docker", sandbox_id=sandbox_id
            )
        stream = RawStream()
        try:
            with client.translated(sandbox_id):
                await client.attach(f"containers/{sandbox_id}/attach?stream=1&stdin=1&stdout=1", None, stream)
                await stream.write(f"{seconds}\n".encode())
                if sandbox_id not in self._watched:
                    async with asyncio.timeout(10):
                        said = b""
                        while f"renewed {seconds}\n".encode() not in said:
                            chunk = await stream.next()
                            if chunk is None:
                                raise SandboxUnavailableError(
                                    "the new lifetime was not confirmed",
                                    provider="docker",
                                    sandbox_id=sandbox_id,
                                )
                            said += chunk[1]
        finally:
            stream.close()
        return datetime.now(UTC) + timedelta(seconds=seconds)

    async def snapshot(self, sandbox_id: str, name: str) -> str:
        await self.get(sandbox_id)  # ours, and there
        return await images.commit(await self.client(), sandbox_id, name)

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        return await images.delete_snapshot(await self.client(), snapshot_id)

    async def list_snapshots(self) -> Sequence[str]:
        return await images.list_snapshots(await self.client())

    async def pause(self, sandbox_id: str) -> None:
        client = await self.client()
        if (await self.get(sandbox_id)).state is not SandboxState.PAUSED:
            with client.translated(sandbox_id):
                await client.container(sandbox_id).pause()
        self._asleep.add(sandbox_id)

    async def resume(self, sandbox_id: str) -> None:
        client = await self.client()
        if (await self.get(sandbox_id)).state is SandboxState.PAUSED:
            with client.translated(sandbox_id):
                await client.container(sandbox_id).unpause()
        self._asleep.discard(sandbox_id)

    async def url(self, sandbox_id: str, port: int) -> Url:
        facts = await self.inspect(sandbox_id)
        if self.endpoint.local:
            for published in (facts.get("NetworkSettings", {}).get("Ports") or {}).get(f"{port}/tcp") or ():
                return Url(url=f"http://127.0.0.1:{published['HostPort']}")
        key = (sandbox_id, port)
        forward = self._forwards.get(key)
        if forward is None:
            forward = self._forwards[key] = Forward(self, sandbox_id, port)
            await forward.open()
        return Url(url=f"http://{forward.address[0]}:{forward.address[1]}")


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _finished(process: ChannelProcess) -> None:
    """Let it notice that no more comes, so that it removes what it had half written."""
    process.write_eof()
    with suppress(LowtideError, TimeoutError):
        async with asyncio.timeout(5):
            while await process.next() is not None:
                pass


def _checked_id(sandbox_id: str) -> str:
    """It goes into a path of the engine's API."""
    if not sandbox_id or not all(c.isalnum() or c in "_.-" for c in sandbox_id) or not sandbox_id.isascii():
        raise SandboxNotFoundError(
            f"not a sandbox id: {sandbox_id!r}", provider="docker", sandbox_id=sandbox_id
        )
    return sandbox_id


def _no_such_image(error: Any) -> bool:
    words = error.message.lower()
    return error.status == 404 and (
        "no such image" in words or "image not known" in words or "failed to find image" in words
    )


def _name_taken(error: Any) -> bool:
    return error.status == 409 or "already in use" in error.message  # Podman answers 500


def _not_started(error: Any, spec: SandboxSpec) -> LowtideError:
    words = error.message.strip()
    if error.status in (400, 500) or error.status == 404:
        if "unable to find user" in words or "no matching entries in passwd" in words:
            return ValidationError(
                f"the image knows no such user: {words}", argument="user", provider="docker"
            )
        return SandboxFailedError(
            f"the engine could not start the container: {words}",
            reason="start",
            provider="docker",
            sandbox_id=spec.lease_id,
        )
    return SandboxError(
        f"the engine failed ({error.status}): {words}",
        provider="docker",
        sandbox_id=spec.lease_id,
        retryable=error.status >= 500,
    )
