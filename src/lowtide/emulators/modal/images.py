"""Images: recipes as layers. The lowest is this machine's own `/usr`; what later layers run is run and kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modal_proto import api_pb2 as pb

from lowtide.emulators import dockerfile
from lowtide.emulators.modal.model import Result, new_id
from lowtide.emulators.modal.refusal import not_found
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

BUILDER_VERSION = "2025.06"
_INSTALLS = re.compile(
    r"(^|[\s;&|/])(apt|apt-get|apk|dnf|yum|pip3?|uv|poetry|micromamba|conda|npm|curl|wget|git)(\s|$)"
)
"""Commands that fetch from outside. They are not run: a sandbox here has no way out."""


@dataclass(eq=False, slots=True, kw_only=True)
class Image:
    image_id: str
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    snapshot: str | None = None
    """Its files on top of this machine's own; None: none of its own."""
    result: Any = None
    log: list[str] = field(default_factory=list)
    built: asyncio.Event = field(default_factory=asyncio.Event)

    def metadata(self) -> Any:
        return pb.ImageMetadata(image_builder_version=BUILDER_VERSION, workdir=self.workdir or None)


class Images:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.table: dict[str, Image] = {}
        self._by_recipe: dict[bytes, Image] = {}
        self._building: set[asyncio.Task[None]] = set()

    def get(self, image_id: str) -> Image:
        try:
            return self.table[image_id]
        except KeyError:
            raise not_found("Image", image_id) from None

    def add(self, image: Image) -> Image:
        self.table[image.image_id] = image
        return image

    def keep(self, snapshot: str, like: Image, ttl_seconds: int) -> Image:
        """A file system that was taken from a sandbox, as an image."""
        image = Image(
            image_id=new_id("im"),
            environment=dict(like.environment),
            workdir=like.workdir,
            snapshot=snapshot,
            result=Result(status=Result.GENERIC_STATUS_SUCCESS),
        )
        image.built.set()
        if ttl_seconds > 0:
            self._ground.clock.at(
                self._ground.clock.now() + ttl_seconds, lambda: self.delete(image.image_id, missing_ok=True)
            )
        return self.add(image)

    async def delete(self, image_id: str, *, missing_ok: bool = False) -> None:
        if missing_ok and image_id not in self.table:
            return
        image = self.get(image_id)
        del self.table[image_id]
        for recipe in [key for key, one in self._by_recipe.items() if one is image]:
            del self._by_recipe[recipe]
        if image.snapshot is not None:
            # Where a sandbox or an image stands on it, the ground removes it at its end.
            with contextlib.suppress(LowtideError):
                await self._ground.backing.delete_snapshot(image.snapshot)

    def get_or_create(self, wanted: Any, *, again: bool) -> Image:
        """The image of a recipe, built once. Building goes on after the answer."""
        recipe = hashlib.sha256(wanted.SerializeToString(deterministic=True)).digest()
        found = self._by_recipe.get(recipe)
        failed = found is not None and found.result is not None and found.result.status != 1
        if found is not None and not again and not failed:
            return found
        below = [self.get(one.image_id) for one in wanted.base_images]
        image = self._by_recipe[recipe] = self.add(Image(image_id=new_id("im")))
        task = asyncio.get_running_loop().create_task(self._build(image, below, wanted))
        self._building.add(task)
        task.add_done_callback(self._building.discard)
        return image

    async def _build(self, image: Image, below: list[Image], wanted: Any) -> None:
        try:
            for one in below:
                await one.built.wait()
                image.environment.update(one.environment)
                image.workdir = one.workdir or image.workdir
                image.snapshot = one.snapshot or image.snapshot
            lines = _lines(wanted.dockerfile_commands)
            await self._run(image, lines, mapped=not below)
            status = Result(status=Result.GENERIC_STATUS_SUCCESS)
        except (_BuildFailed, LowtideError) as error:
            status = Result(status=Result.GENERIC_STATUS_FAILURE, exception=str(error))
        except asyncio.CancelledError:
            status = Result(status=Result.GENERIC_STATUS_TERMINATED)
            raise
        finally:
            image.result = status
            image.built.set()

    async def _run(self, image: Image, lines: list[str], *, mapped: bool) -> None:
        """Follow a recipe. `mapped`: it starts from a registry, so what it installs stands for this machine's own."""
        runs: list[str] = []
        for line in lines:
            word, _, rest = line.partition(" ")
            match word.upper():
                case "ENV":
                    found = dockerfile.variables(line)
                    found.pop("PATH", None)  # programs are where this machine has them
                    image.environment.update(found)
                case "WORKDIR":
                    image.workdir = rest.strip()
                case "RUN" if mapped or _INSTALLS.search(rest):
                    image.log.append(f"not run here: {rest}\n")
                case "RUN":
                    runs.append(rest.strip())
        if runs:
            await self._run_all(image, runs)

    async def _run_all(self, image: Image, runs: list[str]) -> None:
        backing = self._ground.backing
        sandbox_id = await backing.create(
            command=("/bin/sh", "-c", "exec sleep infinity"), snapshot=image.snapshot, counted=False
        )
        try:
            for run in runs:
                image.log.append(f"RUN {run}\n")
                words = tuple(shlex.split(run)) if run.startswith("[") else ("/bin/sh", "-c", run)
                handle = await backing.start(
                    sandbox_id,
                    words,
                    cwd=image.workdir or "/",
                    environment={"HOME": "/root", **image.environment},
                )
                try:
                    async for _, data in handle.output():
                        image.log.append(data.decode(errors="replace"))
                    code = await handle.wait()
                finally:
                    await handle.aclose()
                if code != 0:
                    raise _BuildFailed(f"RUN {run[:200]} ended with {code}")
            image.snapshot = await backing.snapshot(sandbox_id)
        finally:
            await backing.destroy(sandbox_id)

    async def aclose(self) -> None:
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)


class _BuildFailed(Exception):
    pass


def _lines(commands: Any) -> list[str]:
    """The instructions, with lines that go on put together."""
    text = "\n".join(commands).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
