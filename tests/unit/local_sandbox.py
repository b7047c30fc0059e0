"""What the tests of the local provider share: specs and one way to run a command."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from lowtide.providers.base import STDERR, STDOUT, Labels, ProcessSpec, SandboxSpec
from lowtide.providers.local import LocalProvider


def new_id() -> str:
    return "t" + secrets.token_hex(10)


def spec(lease_id: str | None = None, **details: Any) -> SandboxSpec:
    return SandboxSpec(
        labels=Labels(lease_id=lease_id or new_id(), ledger_id="ledger", owner="owner"), **details
    )


async def run(provider: LocalProvider, sandbox_id: str, *argv: str, **details: Any) -> tuple[int, str, str]:
    process = await provider.start_process(sandbox_id, ProcessSpec(argv=argv, **details))
    out = {STDOUT: b"", STDERR: b""}
    async for stream, data in process.output():
        out[stream] += data
    code = await process.wait()
    await process.aclose()
    return code, out[STDOUT].decode(errors="replace"), out[STDERR].decode(errors="replace")


async def shell(
    provider: LocalProvider, sandbox_id: str, script: str, **details: Any
) -> tuple[int, str, str]:
    return await run(provider, sandbox_id, "sh", "-c", script, **details)


async def chunks(*data: bytes) -> AsyncIterator[bytes]:
    for chunk in data:
        yield chunk


async def read(provider: LocalProvider, sandbox_id: str, path: str) -> bytes:
    return b"".join([chunk async for chunk in provider.read_file(sandbox_id, path)])
