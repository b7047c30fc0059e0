"""The one builder behind all emulators: steps run in build sandboxes, and each layer is kept by what it was made of.

A layer is the snapshot of a build sandbox; its name is the hash of the layer below, the step, what surrounds it and what
is copied. So the same beginning of two recipes is built once, whichever service they came to, and whichever emulator. Build sandboxes have the network
that the user allows; a step that needs more fails with its own output.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import posixpath
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.emulators import package_managers
from lowtide.emulators.build_copy import COPY, TAKE, Content, digest_of, feed, start_of
from lowtide.emulators.dockerfile import PATH, CannotBuild, Step, Surroundings
from lowtide.emulators.guest import users_are_real
from lowtide.emulators.image_files import ImageFiles
from lowtide.emulators.layer_cache import LayerCache, foundation
from lowtide.errors import LowtideError, ValidationError
from lowtide.providers.base import STDOUT

if TYPE_CHECKING:
    from lowtide.emulators.backing import Backing

MOST_LAYERS = 256
LONGEST_STEP_SECONDS = 3600.0
LARGEST_LOG = 4 << 20
LARGEST_COPY = 512 << 20  # from stage to stage, and so in memory
_IDLE = ("/bin/sh", "-c", "exec sleep infinity")
_AT_ONCE = 4
_LONGEST_LINE = 1 << 16
_LINE_COSTS = 100  # of the log's bytes: a log of empty lines is long, too

Log = Callable[[str], None]


class BuildFailed(Exception):
    """A step that could not be done; its output is in the log."""

    def __init__(self, message: str, *, unknown_user: str = "", step: Step | None = None) -> None:
        super().__init__(message)
        self.unknown_user, self.step = unknown_user, step


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a build came to."""

    snapshot: str | None = None
    """None: nothing but this machine's own files."""
    key: str = ""
    around: Surroundings = field(default_factory=Surroundings)
    own: bool = False
    """It is this emulator's alone: it stands on something that no key says, or saw secrets."""


@dataclass(eq=False, slots=True)
class _Layer:
    snapshot: str
    pins: int = 0


class Builder:
    def __init__(
        self,
        backing: Backing,
        *,
        packages: str = package_managers.CHECK,
        cache: LayerCache | None = None,
        home: Path | None = None,
    ) -> None:
        """`cache`: where layers are kept for other emulators, too. `home`: where the user's images are."""
        self._backing, self._cache = backing, cache
        self._images = ImageFiles(backing, home)
        self._foundation = ""
        self._packages = packages
        self._first: Step | None = None
        self._layers: dict[str, _Layer] = {}
        """Least recently used first."""
        self._under_way: dict[str, asyncio.Lock] = {}
        self._waiting: dict[str, int] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def build(
        self, steps: Iterable[Step], *, log: Log, below: Built | None = None, context: Content = b""
    ) -> Built:
        """Follow the steps on top of `below`. BuildFailed, LowtideError.

        The result stays until `release`.
        """
        built = below or Built()
        held: list[Built] = []
        """What is below all stages, and each stage that has ended."""
        said = 0

        def tell(text: str) -> None:
            nonlocal said
            if said < LARGEST_LOG:
                log(text)
            said += len(text) + _LINE_COSTS * len(text.splitlines())  # as those split it who keep it

        before, self._foundation = self._foundation, await asyncio.to_thread(foundation)
        if self._first is None or self._foundation != before:  # things are installed meanwhile
            self._first = await asyncio.to_thread(package_managers.first_step, self._packages)
        if built.key:
            self._pin(built.key)
        try:
            for step in steps:
                if step.begins:
                    if not held:  # what comes before the first stage is below each
                        held.append(built)
                        self._pin(built.key)
                    else:
                        held.append(built)
                        built = held[0 if step.stage is None else 1 + step.stage]
                        self._pin(built.key)
                if step.shown:
                    tell(step.shown + "\n")
                if (step.argv or step.sources) and not built.key:
                    # What every build sandbox has, before the first step that runs something.
                    built = await self._on(built, replace(self._first, around=built.around), tell, b"", None)
                source = None if step.begins or step.stage is None else held[1 + step.stage]
                built = await self._on(built, step, tell, context, source)
        except CannotBuild as error:
            self.release(built)
            raise BuildFailed(str(error)) from None
        except BaseException:
            self.release(built)
            raise
        finally:
            for one in held:
                self.release(one)
        return built

    async def _on(self, below: Built, step: Step, log: Log, context: Content, source: Built | None) -> Built:
        """One step further: what it comes to is held in place of what is below."""
        if not (step.argv or step.sources):
            return replace(below, around=step.around)
        own = below.own or step.secret or bool(step.fresh) or (source is not None and source.own)
        own = own or (below.snapshot is not None and not below.key)
        key, snapshot = await self._layer(below, step, log, context, source, own)
        self._pin(key)
        self.release(below)
        return Built(snapshot=snapshot, key=key, around=step.around, own=own)

    def release(self, built: Built) -> None:
        """Nothing is made from it any more: its layers may go when room is needed."""
        layer = self._layers.get(built.key)
        if layer is not None:
            layer.pins -= 1

    def _pin(self, key: str) -> None:
        layer = self._layers.get(key)
        if layer is not None:
            layer.pins += 1

    async def _layer(
        self, below: Built, step: Step, log: Log, context: Content, source: Built | None, own: bool
    ) -> tuple[str, str]:
        if step.context is not None:
            context = (step.context,)
        content = context if step.sources else b""
        if source is not None:
            content = f"stage {source.key or source.snapshot or self._foundation}".encode()
        elif step.image:
            content = f"image {await self._images.identity(step.image)}".encode()
        under = below.key or below.snapshot or self._foundation
        digest = await asyncio.to_thread(digest_of, content)
        key = _key(under, step, digest, str(self._backing.network))
        # One at a time: two that ask for the same layer at once get the same.
        lock = self._under_way.setdefault(key, asyncio.Lock())
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            async with lock:
                found = self._layers.pop(key, None)
                cache = None if own else self._cache
                if found is None and cache is not None:
                    kept = await asyncio.to_thread(cache.take, key, self._snapshots, below.snapshot)
                    found = _Layer(kept) if kept is not None else None
                if found is not None:
                    if step.shown:
                        log("CACHED\n")
                else:
                    async with self._places:
                        if source is not None:
                            context = await self._taken(source, step)
                        elif step.image:
                            context = await self._images.take(step.image, step.sources, LARGEST_COPY)
                        if source is not None or step.image:
                            digest = await asyncio.to_thread(digest_of, context)
                        found = _Layer(await self._make(below, step, log, context, digest))
                    if cache is not None:
                        await asyncio.to_thread(cache.keep, key, self._snapshots / found.snapshot)
                self._layers[key] = found
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key], self._under_way[key]
        found.pins += 1  # while others make room
        try:
            await self._make_room()
        finally:
            found.pins -= 1
        return key, found.snapshot

    async def aclose(self) -> None:
        if self._cache is not None:
            await asyncio.to_thread(self._cache.settle)

    @property
    def _snapshots(self) -> Path:
        return self._backing.provider.snapshots.directory

    async def _taken(self, stage: Built, step: Step) -> bytes:
        """What a COPY takes from an earlier stage, as a tar."""
        backing = self._backing
        sandbox_id = await backing.create(command=_IDLE, snapshot=stage.snapshot, counted=False)
        try:
            argv = ("/bin/sh", "-c", TAKE, "sh", *step.sources)
            handle = await backing.start(sandbox_id, argv, cwd="/", user="0:0" if users_are_real() else None)
            try:
                taken, said = bytearray(), bytearray()
                async for stream, data in handle.output():
                    (taken if stream == STDOUT else said).extend(data)
                    if len(taken) + len(said) > LARGEST_COPY:
                        raise BuildFailed(f"{step.shown[:200]}: more than {LARGEST_COPY >> 20} MiB")
                if await handle.wait() != 0:
                    raise BuildFailed(f"{step.shown[:200]}: {said[:1000].decode(errors='replace').strip()}")
            finally:
                await handle.aclose()
        finally:
            await backing.destroy(sandbox_id)
        return bytes(taken)

    async def _make(self, below: Built, step: Step, log: Log, context: Content, digest: bytes) -> str:
        backing = self._backing
        sandbox_id = await backing.create(command=_IDLE, snapshot=below.snapshot, counted=False)
        try:
            argv, given = step.argv, None
            if step.sources:
                if not context:
                    raise BuildFailed(f"{step.shown}: there is no build context")
                unpack = "-xzf" if start_of(context) == b"\x1f\x8b" else "-xf"
                # What climbs out of the context starts at its top, as it does elsewhere.
                sources = (posixpath.normpath(f"/{one}").lstrip("/") or "." for one in step.sources)
                archives = "archives" if step.archives else ""
                argv = ("/bin/sh", "-c", COPY, "sh", unpack, step.target, step.mode, archives, *sources)
                given = (context, digest)
            around = _around(step)
            root = not around.user or around.user in ("root", "0")
            account = ("0:0" if root else around.user) if users_are_real() else None
            if (given is not None or step.by_user) and account not in (None, "0:0"):
                # COPY is root's, whoever runs what follows; but root has no way around permissions here, and the user's
                # own directories take files and directories from the user alone.
                heard: list[str] = []
                code = await self._run(sandbox_id, argv, step, around, account, heard.append, given)
                if code != 0:
                    code = await self._run(sandbox_id, argv, step, around, "0:0", log, given)
                else:
                    log("".join(heard))
            else:
                code = await self._run(sandbox_id, argv, step, around, account, log, given)
            if code != 0:
                raise BuildFailed(f"{step.shown[:200]}: exit code {code}")
            return await backing.stop(sandbox_id)
        except BaseException:
            await backing.destroy(sandbox_id)
            raise

    async def _run(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        step: Step,
        around: Surroundings,
        account: str | None,
        log: Log,
        given: tuple[Content, bytes] | None,
    ) -> int:
        """One program of a step, with what it says in the log; its exit code. `given`: its input, and the hash of that."""
        handle = await self._backing.start(
            sandbox_id,
            argv,
            # What copies is not the recipe's: nothing of the recipe is to change what it does.
            cwd="/" if step.sources else around.workdir or "/",
            user=account,
            environment={"PATH": PATH} if step.sources else _environment(step, around),
            stdin=given is not None,
        )
        # Beside the output: what says more than a pipe holds would wait for a reader, and this for it.
        feeding = None if given is None else asyncio.create_task(feed(handle, given[0]))
        try:
            async with asyncio.timeout(LONGEST_STEP_SECONDS):
                line = b""
                async for _, data in handle.output():
                    whole, newline, line = (line + data).rpartition(b"\n")
                    if len(line) > _LONGEST_LINE:
                        whole, newline, line = whole + newline + line, b"\n", b""
                    if newline:
                        log((whole + newline).decode(errors="replace"))
                if line:
                    log(line.decode(errors="replace") + "\n")
                code = await handle.wait()
                if given is not None and feeding is not None and code == 0 and await feeding != given[1]:
                    # Sent again meanwhile: the layer would be kept under the name of what it was not made of.
                    raise BuildFailed(f"{step.shown[:200]}: the build context was replaced in the midst")
                return code
        except ValidationError as error:
            if error.argument != "user":
                raise
            raise BuildFailed(f"{step.shown[:200]}: {error}", unknown_user=around.user, step=step) from None
        except TimeoutError:
            raise BuildFailed(f"{step.shown[:200]}: not done in {LONGEST_STEP_SECONDS:.0f} s") from None
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
            await handle.aclose()

    async def _make_room(self) -> None:
        for key, layer in list(self._layers.items()):
            if len(self._layers) <= MOST_LAYERS:
                return
            if layer.pins or key in self._under_way:
                continue
            with contextlib.suppress(LowtideError):  # a sandbox or another layer stands on it
                await self._backing.delete_snapshot(layer.snapshot)
                self._layers.pop(key, None)


def _around(step: Step) -> Surroundings:
    """What it runs in."""
    if not step.apart:
        return step.around
    return Surroundings(user=step.around.user if step.by_user else "")


def _environment(step: Step, around: Surroundings) -> dict[str, str]:
    found = {"PATH": PATH, **step.arguments, **around.environment}
    return {**found, "PATH": f"{package_managers.TOOLS}:{found['PATH']}"}


def _key(below: str, step: Step, content: bytes, network: str) -> str:
    around = _around(step)
    what: list[object] = [
        below,
        step.argv,
        step.sources,
        step.target,
        step.fresh,
        COPY,
        step.mode,
        step.archives,
    ]
    what.append(network if step.argv and not step.apart else "")
    what += [sorted(step.arguments.items()), sorted(around.environment.items()), around.workdir, around.user]
    digest = hashlib.sha256(json.dumps(what).encode())
    digest.update(content)
    return digest.hexdigest()
