"""What commands of the Modal emulator printed: kept whole, with no descriptor for those that have ended."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

pytest.importorskip("modal")

from lowtide.emulators.modal.executions import Output


async def test_long_output_of_an_ended_command_holds_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    outputs = [Output(tmp_path) for _ in range(20)]
    for number, output in enumerate(outputs):
        output.add(bytes([number]) * 900_000)
        output.add(bytes([number]) * 900_000)
        output.end()
    assert len(os.listdir("/proc/self/fd")) == before
    for number, output in enumerate(outputs):
        assert b"".join([data async for data in output.follow(1)]) == bytes([number]) * 1_799_999
        output.close()
    assert list(tmp_path.iterdir()) == []


async def test_no_room_for_output_loses_only_what_did_not_fit(tmp_path: Path) -> None:
    output = Output(tmp_path)
    output.add(b"a" * 50_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            output.add(b"b" * 50_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    output.end()
    assert b"".join([data async for data in output.follow(0)]) == b"a" * 50_000
    output.close()
    assert list(tmp_path.iterdir()) == []
