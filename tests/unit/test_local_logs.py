"""The log of a local sandbox's main command: bounded, whole lines, and nobody inside can reach the file it is in."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from lowtide.errors import SandboxNotFoundError
from lowtide.providers.last_lines import last_lines
from lowtide.providers.local import LocalProvider
from lowtide.providers.local.logs import KEPT_BYTES

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, spec

LINE = b"0" * 99


async def _log(provider: LocalProvider, sandbox_id: str, tail_lines: int | None = None) -> bytes:
    reading = provider.logs(sandbox_id, follow=False, tail_lines=tail_lines)
    return b"".join([data async for data in reading])


async def test_a_flood_is_read_in_whole_lines_and_its_file_does_not_grow(provider: LocalProvider) -> None:
    script = f"yes {LINE.decode()} | head -c 30000000; echo last; sleep 1000"
    made = await provider.create(spec(command=("sh", "-c", script)))
    while not (printed := await _log(provider, made.sandbox_id)).endswith(b"last\n"):
        assert set(printed.split(b"\n")[:-1]) <= {LINE}  # also while it is being overwritten
        await asyncio.sleep(0)
    assert KEPT_BYTES - 100 <= len(printed) <= KEPT_BYTES
    size = os.stat(provider.home / "sandboxes" / made.sandbox_id / "log").st_size
    assert size <= KEPT_BYTES + 65536 + 8


async def test_nobody_inside_reaches_the_log_itself(provider: LocalProvider) -> None:
    made = await provider.create(spec(command=("sh", "-c", "echo mine; sleep 1000")))
    for script in ("echo forged > /proc/1/fd/1", "cat /proc/1/fd/1", "ls /proc/1/fd"):
        assert (await run(provider, made.sandbox_id, "sh", "-c", script))[0] != 0
    _, shown, _ = await run(provider, made.sandbox_id, "sh", "-c", "readlink /proc/2/fd/1 /proc/2/fd/2")
    assert {name.partition(":")[0] for name in shown.split()} == {"pipe"}
    assert await _log(provider, made.sandbox_id) == b"mine\n"


async def test_without_a_main_command_nothing_is_kept_and_without_a_sandbox_it_is_said(
    provider: LocalProvider,
) -> None:
    made = await provider.create(spec())
    assert await _log(provider, made.sandbox_id) == b""
    await provider.destroy(made.sandbox_id)
    with pytest.raises(SandboxNotFoundError):
        await _log(provider, made.sandbox_id)


@pytest.mark.parametrize(
    ("data", "lines", "cut", "left"),
    [
        (b"a\nb\nc\n", None, False, b"a\nb\nc\n"),
        (b"a\nb\nc\n", 2, False, b"b\nc\n"),
        (b"a\nb\nc", 1, False, b"c"),
        (b"a\nb\n", 9, False, b"a\nb\n"),
        (b"\n\n", 1, False, b"\n"),
        (b"", 3, False, b""),
        (b"rest\nb\n", None, True, b"b\n"),
        (b"no end of a line", None, True, b"no end of a line"),
    ],
)
def test_the_last_lines(data: bytes, lines: int | None, cut: bool, left: bytes) -> None:
    assert last_lines(data, lines, cut=cut) == left
