"""The bound around all sandboxes: held without a limit being asked for, settable, and gone with the last."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from lowtide.errors import ValidationError
from lowtide.providers.local import LocalProvider, cgroups, doctor
from lowtide.providers.local.bound import Bound

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, shell, spec

needs_groups = pytest.mark.skipif(
    isinstance(cgroups.hierarchy("memory"), str) or isinstance(cgroups.hierarchy("pids"), str),
    reason="no control groups can be made here",
)


@needs_groups
async def test_all_sandboxes_together_have_so_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_LOCAL_MEMORY_BYTES", str(256 << 20))
    provider = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    try:
        one, two = await provider.create(spec()), await provider.create(spec())
        groups = [group.path for group in provider._workshop.bound]
        assert all(group.is_dir() for group in groups)
        take = "x = bytearray(int(__import__('sys').argv[1]) << 20); print(len(x))"
        for made in (one, two):
            code, _, _ = await run(provider, made.sandbox_id, "python3", "-c", take, "400")
            assert code == 137
            assert (await run(provider, made.sandbox_id, "python3", "-c", take, "20"))[0] == 0
    finally:
        async for info in provider.list({}):
            await provider.destroy(info.sandbox_id)
        await provider.aclose()
    for _ in range(200):
        if not any(group.exists() for group in groups):
            break
        await asyncio.sleep(0.05)
    assert [group for group in groups if group.exists()] == []


@needs_groups
async def test_what_outlives_its_maker_takes_the_bound_with_it(tmp_path: Path) -> None:
    first = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    made = await first.create(spec())
    groups = [group.path for group in first._workshop.bound]
    await first.aclose()
    await asyncio.sleep(0.3)
    assert all(group.is_dir() for group in groups)
    second = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    assert await second.destroy(made.sandbox_id) is True
    await second.aclose()
    assert [group for group in groups if group.exists()] == []


async def test_counters_of_the_user_are_bounded(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    count = """
import ctypes
libc = ctypes.CDLL(None)
made = 0
while made < 1000 and libc.inotify_init() >= 0:
    made += 1
print(made)
"""
    _, out, _ = await run(provider, made.sandbox_id, "python3", "-c", count)
    assert 1 <= int(out) <= 32
    raised = "echo 1000 >/proc/sys/user/max_inotify_instances"
    assert (await shell(provider, made.sandbox_id, raised))[0] != 0


def test_the_bound_is_said_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usual = Bound.from_environment({})
    assert usual.memory_bytes == int(total * 0.75)
    assert usual.sources == {"memory_bytes": "default", "pids": "default"}
    none = Bound.from_environment({"LOWTIDE_LOCAL_MEMORY_BYTES": "none", "LOWTIDE_LOCAL_PIDS": "100"})
    assert (none.memory_bytes, none.pids) == (None, 100)
    assert none.sources["pids"] == "LOWTIDE_LOCAL_PIDS"
    with pytest.raises(ValidationError, match="LOWTIDE_LOCAL_PIDS"):
        Bound.from_environment({"LOWTIDE_LOCAL_PIDS": "lots"})
    names = {check.name for check in doctor.doctor({})}
    assert {"memory of all sandboxes together", "processes of all sandboxes together"} <= names
    monkeypatch.setattr(cgroups, "hierarchy", lambda controller: "not here")
    said = [check for check in doctor._defaults({}) if not check.ok]
    assert len(said) == 2
    assert all("cannot be held" in check.why for check in said)
