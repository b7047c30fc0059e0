"""One client's connection: the sandboxes it made, the one that is meant where none is named, and their one end."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import LowtideError, SandboxGone, ValidationError
from lowtide.operation import Operation
from lowtide.providers import registry
from lowtide.providers.optional import HoldsImages
from lowtide.sandbox import Sandbox
from lowtide.session import Session

log = logging.getLogger("lowtide.mcp")

_GRACE_SECONDS = 0.5
"""For processes to end by themselves. The client has gone: nobody waits for what they might still do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What whoever starts the server allows its clients."""

    sandboxes: int = 8
    """At once, for each connection."""
    timeout_seconds: float = 120.0
    """For a command that asks for no other."""
    max_timeout_seconds: float = 3600.0
    output_bytes: int = 64 << 10
    """Of each stream, passed on to the client; what is left out is counted."""
    collected_bytes: int = 32 << 20
    """Of each stream, before the command is ended."""
    ports: int = 32
    """With an address, of each sandbox: each address is a descriptor of the server's, which all clients share."""
    images: tuple[str, ...] = ()
    """Patterns (as in file names) of images that a client may choose although they have to be fetched."""
    calls: int = 16
    """At work at once, for each connection: each may hold `collected_bytes` twice. More of them wait."""


@dataclass(slots=True)
class Connection:
    """Made when the client comes, closed when it has gone."""

    defaults: Mapping[str, Any]
    bounds: Bounds
    _session: Session = field(init=False)
    _made: dict[str, Sandbox] = field(default_factory=dict)
    _ports: dict[str, set[int]] = field(default_factory=dict)
    _implicit: Sandbox | None = None
    _starting: int = 0
    _implicit_starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    turn: asyncio.Semaphore = field(init=False)
    """Taken by every call that works in a sandbox."""

    def __post_init__(self) -> None:
        self.turn = asyncio.Semaphore(self.bounds.calls)
        self._session = Session(dict(self.defaults))

    async def sandbox(self, named: str | None) -> tuple[str, Sandbox]:
        """The one with that id, or the implicit one, which is made by the first call that needs it."""
        if named is not None:
            found = self._made.get(named)
            if found is None:
                raise ValidationError(
                    f"this connection has no sandbox {named!r}; sandbox_list shows those it has",
                    argument="sandbox",
                )
            return named, found
        async with self._implicit_starting:
            if self._implicit is None:
                self._implicit = (await self._create({}))[1]
            implicit = self._implicit
        assert implicit.sandbox_id is not None
        return implicit.sandbox_id, implicit

    async def create(self, options: Mapping[str, Any]) -> tuple[str, Sandbox]:
        """One more. Raises ValidationError for an image that a client may not choose."""
        await self._check_image(options.get("container_image"))
        return await self._create(options)

    async def _check_image(self, image: str | None) -> None:
        """A name such as ``127.0.0.1:8080/x`` makes whoever fetches it send requests there, from this machine's network.

        So a client may choose what the operator did (--image, --allow-image) and what need not be fetched.
        """
        allowed = self.bounds.images
        if image is None or image == self.defaults.get("container_image"):
            return
        if any(fnmatch.fnmatchcase(image, pattern) for pattern in allowed):
            return
        provider = self.defaults.get("provider")
        if provider is None or isinstance(provider, str):
            provider = registry.provider(provider)
        if isinstance(provider, HoldsImages) and await Operation.start(provider.has_image(image)):
            return
        raise ValidationError(
            f"the image {image!r} would have to be fetched, and this server does not let its clients do that. Whoever "
            f"starts the server can allow it: `lowtide mcp --allow-image PATTERN`",
            argument="image",
            provider=provider.name,
        )

    async def end(self, named: str | None) -> tuple[str, Any]:
        """End one of them; without a name the implicit one, which is made anew when it is needed again."""
        sandbox = self._implicit if named is None else self._made.get(named)
        if sandbox is None:
            what = "no implicit sandbox yet" if named is None else f"no sandbox {named!r}"
            raise ValidationError(f"this connection has {what}", argument="sandbox")
        report = await sandbox.stop()
        self.forget(sandbox)
        return str(sandbox.sandbox_id), report

    def open_port(self, name: str, port: int) -> None:
        """One more of its ports is to have an address, which it keeps until the sandbox ends."""
        known = self._ports.setdefault(name, set())
        if len(known | {port}) > self.bounds.ports:
            raise ValidationError(
                f"{len(known)} ports of this sandbox have an address, and more are not allowed: use one of them",
                argument="port",
            )
        known.add(port)

    def forget(self, sandbox: Sandbox) -> None:
        """It is gone: a call that names none gets a new one."""
        self._made.pop(str(sandbox.sandbox_id), None)
        self._ports.pop(str(sandbox.sandbox_id), None)
        if sandbox is self._implicit:
            self._implicit = None

    def all(self) -> list[tuple[str, Sandbox, bool]]:
        return [(name, sandbox, sandbox is self._implicit) for name, sandbox in self._made.items()]

    async def close(self) -> None:
        """End everything. What cannot be ended now stays in the ledger, and is tried again by whoever comes next."""
        try:
            await self._session.close(graceful_shutdown_seconds=_GRACE_SECONDS)
        except LowtideError as error:
            log.warning("at the end of a connection: %s", error)

    async def _create(self, options: Mapping[str, Any]) -> tuple[str, Sandbox]:
        if (have := len(self._made) + self._starting) >= self.bounds.sandboxes:
            raise ValidationError(
                f"this connection has {have} sandboxes, and more are not allowed: end one with sandbox_end",
                argument="sandbox",
            )
        self._starting += 1
        try:
            sandbox = self._session.sandbox(**options)
            await sandbox
        finally:
            self._starting -= 1
        name = sandbox.sandbox_id
        if name is None:
            raise SandboxGone("it was ended while it started", provider=sandbox.provider)
        self._made[name] = sandbox
        return name, sandbox
