"""`lowtide cp ID:/path -`: what the sandbox sends is renamed on its way, and told the truth about."""

from __future__ import annotations

import gc
import io
import subprocess
import tarfile
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from lowtide.cli.copying import _rename
from lowtide.trees import tar_stream as tar


async def test_a_file_that_became_shorter_is_named_and_names_that_lead_out_are_left_out() -> None:
    def file(name: bytes, data: bytes) -> bytes:
        return tar.header(name, tar.FILE, 0o644, len(data), 0) + data + tar.padding(len(data))

    async def sent() -> AsyncIterator[bytes]:
        yield file(b"./log", b"x" * 9) + tar.mark(tar.READ, b"9")
        yield file(b"cut", b"x" + bytes(8)) + tar.mark(tar.READ, b"1") + tar.mark(tar.SKIPPED, b"pipe")
        yield file(b"../../out", b"x") + tar.header(b"hard", tar.HARD_LINK, 0o644, 0, 0, b"../../out")
        yield file(b"last", b"x") + tar.END

    out = io.BytesIO()
    told: list[tuple[str, str]] = []
    shorter = await _rename(sent(), b"top", out, lambda what, name: told.append((what.split()[0], name)))
    assert shorter == ["cut"]
    assert told == [("changed", "log"), ("left", "pipe"), ("left", "../../out"), ("left", "hard")]
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        assert archive.getnames() == ["top/log", "top/cut", "top/last"]


async def test_the_names_of_what_is_left_out_or_changed_are_told_and_not_kept() -> None:
    async def sent() -> AsyncIterator[bytes]:
        for number in range(4_000):
            name = b"%d" % number + b"n" * 8_000
            yield tar.mark(tar.SKIPPED, name) + tar.header(b"../" + name, tar.FILE, 0o644, 0, 0)
            yield tar.header(name, tar.FILE, 0o644, 0, 0) + tar.mark(tar.READ, b"0")
        for number in range(2_000):  # these became shorter: of them, an error names some
            name = b"s%d" % number + b"n" * 8_000
            yield tar.header(name, tar.FILE, 0o644, 1, 0) + bytes(512) + tar.mark(tar.READ, b"0")
        yield tar.END

    told = 0

    def tell(what: str, name: str) -> None:
        nonlocal told
        told += 1

    with open("/dev/null", "wb") as out:
        tracemalloc.start()
        try:
            shorter = await _rename(sent(), b"top", out, tell)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of 110 MiB of names
        finally:
            tracemalloc.stop()
    assert told == 12_000
    assert (len(shorter), shorter[-1]) == (21, "and others")


async def test_what_ends_too_soon_passes_for_no_whole_archive(caplog: pytest.LogCaptureFixture) -> None:
    async def sent() -> AsyncIterator[bytes]:
        yield tar.header(b"f", tar.FILE, 0o644, 1, 0) + b"x" + tar.padding(1)
        raise PermissionError("no further")

    out = io.BytesIO()
    with pytest.raises(PermissionError):
        await _rename(sent(), b"top", out, print)
    gc.collect()
    assert caplog.text == ""  # "Task exception was never retrieved"
    listed = subprocess.run(["tar", "tf", "-"], input=out.getvalue(), capture_output=True)
    assert listed.returncode != 0
