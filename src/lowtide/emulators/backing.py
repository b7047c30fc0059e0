"""The real sandboxes behind the emulated ones: local sandboxes through the provider seam, counted and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    LowtideError,
    ResourceExhaustedError,
    SandboxGone,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import (
    Labels,
    Limits,
    Network,
    NetworkMode,
    ProcessHandle,
    ProcessSpec,
    SandboxSpec,
    TerminalSize,
    Url,
)
from lowtide.providers.network import policy

if TYPE_CHECKING:
    from lowtide.providers.local import LocalProvider

_MOST_PRINTED = 1 << 20


def local_provider(directory: Path) -> LocalProvider:
    """A local provider whose sandboxes live under `directory`, apart from the user's own."""
    from lowtide.providers.local import LocalProvider

    return LocalProvider.connect({**os.environ, "LOWTIDE_HOME": str(directory)})


class Backing:
    """Makes, counts and ends local sandboxes. Ids are the provider's own."""

    def __init__(self, directory: Path, *, limit: int, network: Network | None = None) -> None:
        """`network`: what a sandbox may reach that asks for nothing else; None: nothing."""
        self.provider = local_provider(directory)
        self.limit = limit
        self.network = network or Network()
        self.ended_itself: list[Callable[[str], None]] = []
        """Told the id of one that has ended although nobody asked: root inside may kill everything."""
        self._held: set[str] = set()
        self._to_end: set[str] = set()
        self._making = 0
        self._closing = False
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()

    @property
    def count(self) -> int:
        return len(self._held) + self._making

    async def create(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        snapshot: str | None = None,
        image: str | None = None,
        command: tuple[str, ...] | None = None,
        limits: Limits | None = None,
        ports: tuple[int, ...] = (),
        options: Any = None,
        allow: Sequence[str] | None = None,
        counted: bool = True,
    ) -> str:
        """A new sandbox, ready for commands. ResourceExhaustedError at the limit.

        `allow` is the list it was asked for with; an empty one shuts it off, None leaves it to the user.
        """
        for left in list(self._to_end):  # what could not even be ended where there was no room
            with contextlib.suppress(LowtideError):
                await self.destroy(left)
        if counted and self.count >= self.limit:
            raise ResourceExhaustedError(f"this emulator holds its limit of {self.limit} sandboxes")
        if self._closing:
            raise SandboxUnavailableError("the emulator is ending")
        name = secrets.token_hex(13)
        spec = SandboxSpec(
            labels=Labels(lease_id=name, ledger_id="emulator", owner=f"emulator-{os.getpid()}"),
            image=image,
            snapshot=snapshot,
            command=command,
            environment=environment or {},
            limits=limits or Limits(),
            network=self.network if allow is None else _listed(allow),
            ports=ports,
            options=options,
        )
        self._making += 1
        self._none_in_flight.clear()
        try:
            with _this_machine():
                info = await self.provider.create(spec)
            self._held.add(info.sandbox_id)
        finally:
            self._making -= 1
            if not self._making:
                self._none_in_flight.set()
        try:
            with _this_machine():
                await self.provider.wait_ready(info.sandbox_id)
        except BaseException:
            try:
                await self.destroy(info.sandbox_id)
            except LowtideError:
                self._to_end.add(info.sandbox_id)
            raise
        return info.sandbox_id

    async def destroy(self, sandbox_id: str) -> bool:
        with _this_machine():
            ended = await self.provider.destroy(sandbox_id)
        self._held.discard(sandbox_id)
        self._to_end.discard(sandbox_id)
        return ended

    async def start(
        self,
        sandbox_id: str,
        argv: tuple[str, ...],
        *,
        user: str | None = None,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bool = False,
        tty: TerminalSize | None = None,
    ) -> ProcessHandle:
        spec = ProcessSpec(argv=argv, cwd=cwd, environment=environment or {}, user=user, stdin=stdin, tty=tty)
        try:
            with _this_machine():
                return await self.provider.start_process(sandbox_id, spec)
        except SandboxGone:
            if sandbox_id in self._held:
                for tell in self.ended_itself:
                    tell(sandbox_id)
            raise

    async def run(
        self, sandbox_id: str, argv: tuple[str, ...], *, user: str | None = None
    ) -> tuple[int, bytes]:
        """Run a command of the emulator's own; exit code and what it printed, up to a bound: the sandbox may have changed it."""
        handle = await self.start(sandbox_id, argv, user=user)
        try:
            printed = bytearray()
            async for _, data in handle.output():
                printed += data[: _MOST_PRINTED - len(printed)]
            return await handle.wait(), bytes(printed)
        finally:
            await handle.aclose()

    async def url(self, sandbox_id: str, port: int) -> Url:
        with _this_machine():
            return await self.provider.url(sandbox_id, port)

    async def snapshot(self, sandbox_id: str) -> str:
        with _this_machine():
            return await self.provider.snapshot(sandbox_id, secrets.token_hex(13))

    async def stop(self, sandbox_id: str) -> str:
        """End it and keep its files: the snapshot to go on from."""
        with _this_machine():
            taken = await self.provider.snapshot_and_destroy(sandbox_id, secrets.token_hex(13))
        self._held.discard(sandbox_id)
        return taken

    async def delete_snapshot(self, snapshot_id: str) -> bool:
        with _this_machine():
            return await self.provider.delete_snapshot(snapshot_id)

    async def aclose(self) -> bool:
        """End every sandbox, then let the provider go. True when nothing is left."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):  # a create under way would outlive the list of what to end
                await self._none_in_flight.wait()
        try:
            return await end_all(self.provider)
        finally:
            self._held.clear()
            await self.provider.aclose()


@contextlib.contextmanager
def _this_machine() -> Iterator[None]:
    """A full disk or too few descriptors of this machine, said as every emulator can pass it on."""
    try:
        yield
    except OSError as error:
        if isinstance(error, LowtideError | TimeoutError):
            raise
        said = f"this machine has no room for it: {error.strerror or error}"
        raise ResourceExhaustedError(said) from error


def network_of(said: str) -> Network:
    """`none`, `internet` (or `full`), `host`, or `allow=` and hosts and ranges, separated by commas.

    Raises ValidationError for anything else.
    """
    word, equals, entries = said.partition("=")
    if said == "full":
        return Network(mode=NetworkMode.INTERNET)
    if said in ("none", "internet", "host"):
        return Network(mode=NetworkMode(said))
    if word != "allow" or not equals:
        raise ValidationError(
            f"network is none, internet, host or allow=HOST,…, not {said!r}", argument="network"
        )
    try:
        return _listed([policy.entry(text).text for text in entries.split(",") if text.strip()])
    except ValueError as error:
        raise ValidationError(f"network has a bad entry: {error}", argument="network") from None


def _listed(allow: Sequence[str]) -> Network:
    return Network(mode=NetworkMode.ALLOW if allow else NetworkMode.NONE, allow=tuple(allow))


def allowed(entries: Sequence[str]) -> tuple[str, ...]:
    """The entries of a service's allow-list as ours. What only the service understands leads nowhere here."""
    found = []
    for text in entries:
        with contextlib.suppress(ValueError):
            found.append(policy.entry(text).text)
    return tuple(found)


async def destroy_all(directory: Path) -> bool:
    """End everything a dead emulator left under `directory`. True when nothing is left."""
    provider = local_provider(directory)
    try:
        return await end_all(provider)
    finally:
        await provider.aclose()


async def end_all(provider: LocalProvider) -> bool:
    """End every sandbox, trying again what refuses, then remove the snapshots. True when no sandbox is left."""
    for _ in range(3):
        ids = [info.sandbox_id async for info in provider.list({})]
        if not ids:
            break
        await asyncio.gather(*(provider.destroy(sandbox_id) for sandbox_id in ids), return_exceptions=True)
    else:
        return not [info async for info in provider.list({})]
    # A snapshot below another one can only go after it.
    remaining = list(await provider.list_snapshots())
    while remaining:
        before = len(remaining)
        for snapshot_id in list(remaining):
            with contextlib.suppress(LowtideError):
                await provider.delete_snapshot(snapshot_id)
                remaining.remove(snapshot_id)
        if len(remaining) == before:
            break
    return True
