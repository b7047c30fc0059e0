"""Images: recipes as layers. The lowest is this machine's own `/usr`; what later layers run is run and kept."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modal_proto import api_pb2 as pb

from lowtide.emulators import dockerfile
from lowtide.emulators.build import BuildFailed, Built
from lowtide.emulators.dockerfile import Step, Surroundings
from lowtide.emulators.modal.model import Result, new_id
from lowtide.emulators.modal.refusal import not_found
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

BUILDER_VERSION = "2025.06"


@dataclass(eq=False, slots=True, kw_only=True)
class Image:
    image_id: str
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    snapshot: str | None = None
    """Its files on top of this machine's own; None: none of its own."""
    layers: Built | None = None
    """What was built for it, held until it is deleted."""
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
        if image.layers is not None:
            self._ground.builder.release(image.layers)
        elif image.snapshot is not None:
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
        base = Built()
        try:
            for one in below:
                await one.built.wait()
                image.environment.update(one.environment)
                image.workdir = one.workdir or image.workdir
                image.snapshot = one.snapshot or image.snapshot
                base = one.layers or base
            base = Built(
                snapshot=image.snapshot,
                key=base.key if base.snapshot == image.snapshot else "",
                around=Surroundings(environment=dict(image.environment), workdir=image.workdir),
                own=base.own,
            )
            # A recipe that starts from a registry stands for this machine's own files: what it installs is there.
            steps = _steps("\n".join(wanted.dockerfile_commands), base.around, mapped=not below)
            built = await self._ground.builder.build(steps, log=image.log.append, below=base)
            image.layers, image.snapshot = built, built.snapshot
            image.environment, image.workdir = dict(built.around.environment), built.around.workdir
            status = Result(status=Result.GENERIC_STATUS_SUCCESS)
        except (BuildFailed, LowtideError) as error:
            image.log.append(f"{error}\n")
            status = Result(status=Result.GENERIC_STATUS_FAILURE, exception=str(error))
        except asyncio.CancelledError:
            status = Result(status=Result.GENERIC_STATUS_TERMINATED)
            raise
        finally:
            image.result = status
            image.built.set()

    async def aclose(self) -> None:
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)


def _steps(text: str, around: Surroundings, *, mapped: bool) -> Iterator[Step]:
    for step in dockerfile.steps(text, around=around):
        if not mapped:
            yield step
            continue
        environment = dict(step.around.environment)
        environment.pop("PATH", None)  # programs are where this machine has them
        shown = f"not run here: {step.shown}" if step.argv or step.sources else step.shown
        yield Step(shown=shown, around=replace(step.around, environment=environment))
