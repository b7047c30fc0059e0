"""One create call: the container made and started, with its image and our program in place."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lowtide.errors import SandboxFailedError, SandboxNotFoundError, UnsupportedError, ValidationError
from lowtide.providers.base import SandboxSpec, SandboxState
from lowtide.providers.docker import container, images
from lowtide.providers.docker.channel import key_of
from lowtide.providers.docker.client import EngineClient
from lowtide.providers.docker.errors import SERVICE, mapped
from lowtide.providers.docker.options import DockerOptions, PullPolicy
from lowtide.providers.inside import program

if TYPE_CHECKING:
    from lowtide.providers.docker.provider import DockerProvider


class Creation:
    """Tries again after what it can mend: a missing image, a volume without our program, its own earlier try."""

    def __init__(self, provider: DockerProvider, client: EngineClient, spec: SandboxSpec, image: str) -> None:
        self._provider, self._client, self._spec, self._image = provider, client, spec, image
        self._options: DockerOptions = spec.options or DockerOptions()
        self.key = program.new_key()

    async def run(self) -> None:
        import aiodocker

        client, spec, options, image = self._client, self._spec, self._options, self._image
        with mapped(spec.lease_id):
            volume = f"lowtide-inside-{program.fingerprint(client.architecture)}"
            body = container.create_body(
                spec, image, volume=volume, publish=client.endpoint.local, key=self.key
            )
            if spec.snapshot:
                try:
                    for key in await images.inherited_labels(client, spec.snapshot):
                        body["Labels"].setdefault(key, "")
                except aiodocker.DockerError as error:
                    if error.status != 404:
                        raise
            elif options.pull is PullPolicy.ALWAYS:
                await self._provider.pull(image)
            for attempt in range(4):
                made = False
                try:
                    await client.docker.containers.create(body, name=spec.lease_id)
                    made = True
                    await self._start()
                    break
                except aiodocker.DockerError as error:
                    if made:  # never remove what this call has not made: the name may be somebody else's
                        await self._discard(spec.lease_id)
                    if _no_such_image(error) and attempt == 0:
                        await self._get_image()
                    elif _name_taken(error) and attempt < 2:
                        if await self._is_this():
                            break
                    elif container.NETWORK in error.message and attempt < 2:
                        await self._make_network()
                    elif container.PROGRAM in error.message and attempt < 2:
                        await self._fill_volume(volume)
                    else:
                        raise self._not_started(error) from error

    async def _start(self) -> None:
        if self._spec.command is not None:
            self._provider.watch(self._client, self._spec)
        await self._client.container(self._spec.lease_id).start()

    async def _is_this(self) -> bool:
        """The name is taken: by an earlier try of the same create, or by somebody else."""
        spec = self._spec
        try:
            facts = await self._provider.inspect(spec.lease_id)
        except SandboxNotFoundError:
            return False  # it has just gone: try again
        info = container.from_inspect(facts)
        labels = info.labels if info else {}
        if any(labels.get(key) != value for key, value in spec.labels.as_dict().items()):
            words = f"a container named {spec.lease_id} exists and is not this sandbox"
            raise self._failed(words, "name-taken")
        if info is not None and info.state is SandboxState.PENDING:
            await self._start()
        self.key = await key_of(self._provider, spec.lease_id)  # of that try
        return True

    async def _get_image(self) -> None:
        spec, image, options = self._spec, self._image, self._options
        if spec.snapshot:
            raise self._failed(f"no snapshot {image} on this engine", "snapshot-missing")
        if options.pull is PullPolicy.NEVER:
            words = f"the image {image} is not on this engine and pull is 'never': docker pull {image}"
            raise self._failed(words, "image-missing")
        await self._provider.pull(image)

    async def _make_network(self) -> None:
        """Once per engine. Somebody else may make it at the same time."""
        import aiodocker

        try:
            await self._client.docker.networks.create(container.network_body())
        except aiodocker.DockerError as error:
            if error.status != 409 and "already" not in error.message:
                raise

    async def _fill_volume(self, volume: str) -> None:
        """Once per engine and version of our program. The carrier has the lease's labels, so that a
        crash in between leaves nothing that a sweep would not find."""
        client, spec = self._client, self._spec
        name = container.carrier_name(spec.lease_id)
        await client.docker.containers.create(
            container.carrier_body(spec, self._image, volume=volume), name=name
        )
        try:
            data = _archive(program.program(client.architecture))
            request = client.stream(
                "PUT", f"containers/{name}/archive", params={"path": container.DIRECTORY}, data=data
            )
            async with request as answer:
                await answer.read()
        finally:
            await self._discard(name)

    async def _discard(self, name: str) -> None:
        import aiodocker

        with suppress(aiodocker.DockerError):
            await self._client.container(name).delete(force=True, v=True)

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
