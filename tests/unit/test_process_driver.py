"""How a command's end is told: never as certain when nobody has confirmed it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from lowtide.errors import CommandTimeoutError, OutputLimitError, SandboxGone, SandboxUnavailableError
from lowtide.process_driver import Command
from lowtide.providers.base import STDOUT, ProcessSpec, Provider
from lowtide.stream import StreamReader


class Handle:
    """A command of a provider that cannot say whether it ended one."""

    def __init__(self, trouble: Exception | None) -> None:
        self.trouble = trouble
        self.told = asyncio.Event()

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        yield STDOUT, b"x" * 100
        await self.told.wait()

    async def wait(self) -> int:
        return 143

    async def terminate(self, grace_seconds: float) -> None:
        self.told.set()
        if self.trouble is not None:
            raise self.trouble

    async def aclose(self) -> None: ...


class Service:
    name = "service"

    def __init__(self, trouble: Exception | None) -> None:
        self.trouble = trouble

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> Handle:
        return Handle(self.trouble)


def command(trouble: Exception | None, **details: Any) -> Command:
    async def place() -> tuple[Provider, str]:
        return cast("Provider", Service(trouble)), "one"

    readers: tuple[StreamReader[Any], StreamReader[Any]] = (
        StreamReader(text=False),
        StreamReader(text=False),
    )
    return Command(place, ProcessSpec(argv=("work",)), readers=readers, **details)


@pytest.mark.parametrize(
    ("details", "kind"),
    [({"timeout_seconds": 0.05}, CommandTimeoutError), ({"max_output_bytes": 10}, OutputLimitError)],
)
async def test_an_end_is_claimed_only_when_it_is_confirmed(
    details: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=r"may still run, .*no answer"):
        await command(SandboxUnavailableError("no answer"), **details).drive()
    for trouble in (None, SandboxGone("it is gone")):
        with pytest.raises(kind, match="was ended"):
            await command(trouble, **details).drive()
