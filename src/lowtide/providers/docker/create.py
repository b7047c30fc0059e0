"""One create call: the container made and started, with its image and our program in place."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lowtide.errors import SandboxFailedError, SandboxNotFoundError, UnsupportedError, ValidationError
from lowtide.providers.base import SandboxSpec, SandboxState
from lowtide.providers.docker import container, images
from lowtide.providers.docker.channel import key_in
from lowtide.providers.docker.client import EngineClient
from lowtide.providers.docker.errors import SERVICE, mapped
from lowtide.providers.docker.options import DockerOptions, PullPolicy
from lowtide.providers.inside import program

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider

_START_SECONDS = 120.0
"""How long the engine may take to start a container, with a hundred others at the same time."""


class Creation:
    """Tries again after what it can mend: a missing image or network, a volume without our program, its own earlier try.
    Each of them has tries of its own, because an engine that is used for the first time has none of the three."""

    def __init__(self, provider: DockerProvider, client: EngineClient, spec: SandboxSpec, image: str) -> None:
        self._provider, self._client, self._spec, self._image = provider, client, spec, image
        self._options: DockerOptions = spec.options or DockerOptions()
        self._volume = container.volume_name(client.architecture)
        self._tries: Counter[str] = Counter()
        self.key = program.new_key()
        self.container_id = ""
        """The engine's own, once it is made."""

    async def run(self) -> None:
        import aiodocker

        with mapped(self._spec.lease_id):
            if not self._spec.snapshot and self._options.pull is PullPolicy.ALWAYS:
                await self._provider.pull(self._image)
            while True:
                made = ""
                try:
                    body = await self._body()
                    made = self.container_id = await self._client.make(body, self._spec.lease_id)
                    await self._check_image()
                    await self._start()
                    return
                except aiodocker.DockerError as error:
                    if made:  # never remove what this call has not made: the name may be somebody else's
                        await self._discard(made)
                    if await self._mended(error):
                        return

    async def _body(self) -> dict[str, Any]:
        import aiodocker

        client, spec = self._client, self._spec
        network = await self._provider.network_id() if container.has_network(spec) else None
        body = container.create_body(
            spec,
            self._image,
            volume=self._volume,
            publish=client.endpoint.local,
            key=self.key,
            network=network,
        )
        if spec.snapshot:
            try:
                for key in await images.inherited_labels(client, spec.snapshot):
                    body["Labels"].setdefault(key, "")
            except aiodocker.DockerError as error:
                if error.status != 404:
                    raise
        return body

    async def _mended(self, error: Any) -> bool:
        """Mend what it says is missing. True: the sandbox is there already, by an earlier try. Raises what cannot be mended."""
        if _no_such_image(error) and self._may_try("image", 1):
            await self._get_image()
        elif _name_taken(error) and self._may_try("name", 2):
            return await self._is_this()
        elif self._no_network(error) and self._may_try("network", 8):
            self._provider.forget_network()
            await asyncio.sleep(0.05 * self._tries["network"])
        elif container.PROGRAM in error.message and self._may_try("program", 2):
            await self._fill_volume()
        else:
            raise self._not_started(error) from error
        return False

    def _may_try(self, what: str, times: int) -> bool:
        self._tries[what] += 1
        return self._tries[what] <= times

    def _no_network(self, error: Any) -> bool:
        """Another process has removed the network since it was looked for, or made one of the same name: the engine looks it
        up by name when it starts a container, though the container names it by its id."""
        words = error.message.lower()
        changed = any(one in words for one in ("not found", "no such", "unable to find", "is ambiguous"))
        return container.has_network(self._spec) and "network" in words and changed

    async def _start(self) -> None:
        if self._spec.command is not None:
            self._provider.watch(self._client, self._spec, self.container_id)
        await self._client.order(f"containers/{self.container_id}/start", seconds=_START_SECONDS)

    async def _check_image(self) -> None:
        """Once for each image: before the engine would be blocked by it."""
        if self._image in self._provider.sound_images:
            return
        if (path := await images.blocks_engine(self._client, self.container_id)) is not None:
            await self._discard(self.container_id)
            words = f"{path} in the image {self._image} is not a file: the engine would wait for it for ever. Use another image"
            raise self._failed(words, "image-unsafe")
        self._provider.sound_images.add(self._image)

    async def _is_this(self) -> bool:
        """The name is taken: by an earlier try of the same create, or by somebody else."""
        import aiodocker

        spec = self._spec
        try:
            facts = await self._client.inspect(spec.lease_id)
        except aiodocker.DockerError as error:
            if not isinstance(SERVICE.translated(error, spec.lease_id), SandboxNotFoundError):
                raise
            return False  # it has just gone: try again
        info = container.from_inspect(facts)
        labels = info.labels if info else {}
        if any(labels.get(key) != value for key, value in spec.labels.as_dict().items()):
            words = f"a container named {spec.lease_id} exists and is not this sandbox"
            raise self._failed(words, "name-taken")
        self.container_id = str(facts["Id"])
        if info is not None and info.state is SandboxState.PENDING:
            await self._start()
        self.key = key_in(facts, spec.lease_id)  # of that try
        return True

    async def _get_image(self) -> None:
        spec, image, options = self._spec, self._image, self._options
        if spec.snapshot:
            raise self._failed(f"no snapshot {image} on this engine", "snapshot-missing")
        if options.pull is PullPolicy.NEVER:
            words = f"the image {image} is not on this engine and pull is 'never': docker pull {image}"
            raise self._failed(words, "image-missing")
        await self._provider.pull(image)

    async def _fill_volume(self) -> None:
        """Once per engine and version of our program. The carrier has the lease's labels, so that a
        crash in between leaves nothing that a sweep would not find."""
        client, spec = self._client, self._spec
        body = container.carrier_body(spec, self._image, volume=self._volume)
        carrier = await client.make(body, container.carrier_name(spec.lease_id))
        try:
            data = _archive(program.program(client.architecture))
            request = client.stream(
                "PUT", f"containers/{carrier}/archive", params={"path": container.DIRECTORY}, data=data
            )
            async with request as answer:
                await answer.read()
        finally:
            await self._discard(carrier)

    async def _discard(self, container_id: str) -> None:
        import aiodocker

        with suppress(aiodocker.DockerError):
            await self._client.order(
                f"containers/{container_id}", method="DELETE", params={"force": "1", "v": "1"}
            )

    def _not_started(self, error: Any) -> Exception:
        known = SERVICE.translated(error, self._spec.lease_id) or error
        if error.status not in (400, 404, 500) or getattr(known, "argument", None) == "user":
            return known
        return self._failed(f"the engine could not start the container: {error.message.strip()}", "start")

    def _failed(self, words: str, reason: str) -> SandboxFailedError:
        return SERVICE.error(SandboxFailedError, words, self._spec.lease_id, reason=reason)


async def check_gvisor(client: EngineClient, spec: SandboxSpec) -> None:
    """Whether the engine has the runtime that a stronger wall takes. Asked before anything is made."""
    options: DockerOptions = spec.options or DockerOptions()
    if options.runtime not in (None, container.GVISOR_RUNTIME):
        words = f"isolation='gvisor' is the runtime {container.GVISOR_RUNTIME}, and provider_options name {options.runtime}"
        raise SERVICE.error(ValidationError, words, argument="isolation")
    with mapped(spec.lease_id):
        known = sorted((await client.docker.system.info()).get("Runtimes") or {})
    if container.GVISOR_RUNTIME not in known:
        raise SERVICE.error(
            UnsupportedError,
            f"the engine has no runtime {container.GVISOR_RUNTIME}; it has {', '.join(known) or 'none'}",
            argument="isolation",
            feature="gvisor",
            alternative="install gVisor on the engine's machine (runsc install, then restart the engine)",
        )


def _archive(data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo("inside")
        entry.size, entry.mode = len(data), 0o111  # not to be read: who runs it cannot be looked into
        tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def _no_such_image(error: Any) -> bool:
    words = error.message.lower()
    return error.status == 404 and (
        "no such image" in words or "image not known" in words or "failed to find image" in words
    )


def _name_taken(error: Any) -> bool:
    return error.status == 409 or "already in use" in error.message  # Podman answers 500
