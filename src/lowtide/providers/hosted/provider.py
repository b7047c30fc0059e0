"""What the providers of hosted services have in common: `Hosted`, a part of each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Protocol, Self

from lowtide.errors import LowtideError, RequestTimeoutError
from lowtide.providers.base import (
    LABEL_PREFIX,
    Capability,
    ProcessHandle,
    ProcessSpec,
    SandboxInfo,
    SandboxSpec,
    Url,
)
from lowtide.providers.hosted.access import is_id
from lowtide.providers.hosted.create import is_of_lease
from lowtide.providers.inside.calls import Calls

INSIDE = frozenset({Capability.STDIN, Capability.TTY, Capability.SIGNALS, Capability.PORTS})
"""What the program inside does, wherever it is."""
_RENEW_SECONDS = 30.0


class Account(Protocol):
    """Which account, and the way there."""

    @property
    def account(self) -> str: ...

    def credentials(self) -> dict[str, str]: ...


class Hosted(Calls):
    """Connects by its `access_type`; its commands, files, ports and clock are those of the program inside."""

    name: ClassVar[str]
    access_type: ClassVar[Any]
    """`Access`: has ``resolve(environ, options)``."""
    _access: Account

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        return cls(cls.access_type.resolve(environ, options))

    @property
    def account(self) -> str:
        return self._access.account

    def credentials(self) -> dict[str, str]:
        return self._access.credentials()

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        """By its labels, where a service has no name that we choose. A list that ignores the filter finds nothing."""
        marks = {LABEL_PREFIX + "lease": spec.lease_id, LABEL_PREFIX + "ledger": spec.labels.ledger_id}
        async for found in self.list(marks):
            if is_id(found.sandbox_id) and is_of_lease(found.labels, spec.labels):
                return found
        return None

    def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        raise NotImplementedError

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        return await (await self.clients.get(sandbox_id)).start(spec)

    async def renew_inside(self, sandbox_id: str, lifetime_seconds: float) -> datetime:
        """Where the main process is the program inside: it keeps the clock, as far as the fixed end allows."""
        try:
            async with asyncio.timeout(_RENEW_SECONDS):
                client = await self.clients.get(sandbox_id)
                granted = await client.renew(max(1, math.ceil(lifetime_seconds)))
        except TimeoutError as error:
            if isinstance(error, LowtideError):
                raise
            words = "the new lifetime was not confirmed"
            raise RequestTimeoutError(words, provider=self.name, sandbox_id=sandbox_id) from error
        return datetime.now(UTC) + timedelta(seconds=granted)

    async def forwarded_url(self, sandbox_id: str, port: int) -> Url:
        """Through the program inside, on this machine's loopback."""
        host, number = await self.forward(sandbox_id, port)
        return Url(url=f"http://{host}:{number}")
