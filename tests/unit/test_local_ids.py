"""As root every sandbox has a range of ids of its own: what the kernel counts for a user is one sandbox's alone."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from lowtide.providers.base import ProcessSpec
from lowtide.providers.local import LocalProvider
from lowtide.providers.local.doctor import doctor
from lowtide.providers.local.prerequisites import ID_BASE
from lowtide.providers.local.spawner import ids

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, spec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one id")

# Each takes all that the kernel gives it, says so, and holds it until its input ends.
IN_FLIGHT = """
import array, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
try:
    while len(held) < 50:
        held.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for _ in range(5):
            held[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))])
except OSError:
    pass
"""
PIPE_PAGES = """
import fcntl, os, sys
held = []
for _ in range(400):
    held.append(os.pipe())
    try:
        fcntl.fcntl(held[-1][1], 1031, 1 << 20)  # F_SETPIPE_SZ
    except OSError:
        pass  # only so large as the kernel makes it
"""
HOLD = "\nprint('held', flush=True)\nsys.stdin.read()\n"

# What another sandbox's program does with the same counter, with the usual limits.
PASS_ONE = """
import array, resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
ours, theirs = socket.socketpair()
ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
print("passed")
"""
NEW_PIPE = "import fcntl, os; print(fcntl.fcntl(os.pipe()[0], 1032))"  # F_GETPIPE_SZ


def range_of(provider: LocalProvider, sandbox: str) -> int:
    inner = provider._entrance.known(sandbox).inner
    first, outside, count = map(int, Path(f"/proc/{inner.pid}/uid_map").read_text().split())
    assert (first, count) == (0, 65536)
    return outside


@pytest.fixture
async def two(provider: LocalProvider) -> tuple[str, str]:
    one, other = [(await provider.create(spec())).sandbox_id for _ in range(2)]
    client = provider._prerequisites.client
    assert client is not None
    if not client.own_ranges:
        pytest.skip("this kernel or the file system of the state directory cannot map ids")
    return one, other


async def test_no_two_sandboxes_have_the_same_ids_and_the_disk_has_neither(
    provider: LocalProvider, two: tuple[str, str]
) -> None:
    ranges = {range_of(provider, sandbox) for sandbox in two}
    assert len(ranges) == 2
    assert not ranges & {0, ID_BASE}
    for sandbox in two:
        written = "touch /root/it /usr/it && id -u && stat -c %u:%g / /root /root/it /usr/it /usr/bin/env"
        said = (await run(provider, sandbox, "sh", "-c", written))[1].split()
        assert said == ["0", *["0:0"] * 5]
        place = provider._directory(sandbox).path
        for path in (place / "root/root/it", place / "usr/it"):
            assert (path.stat().st_uid, path.stat().st_gid) == (ID_BASE, ID_BASE)


async def test_a_range_is_held_until_its_sandbox_has_ended(
    provider: LocalProvider, two: tuple[str, str]
) -> None:
    number = (range_of(provider, two[0]) - ids.FIRST) // 65536
    file = ids.open_locks()
    try:
        assert not ids.lock(file, number)
        await provider.destroy(two[0])
        async with asyncio.timeout(30):
            while not ids.lock(file, number):  # another sandbox of this machine may have taken it meanwhile
                await asyncio.sleep(0.05)
    finally:
        os.close(file)


@pytest.mark.parametrize(
    ("hostile", "usual", "wanted"),
    [(IN_FLIGHT, PASS_ONE, "passed\n"), (PIPE_PAGES, NEW_PIPE, "65536\n")],
    ids=["descriptors in flight", "pages in pipes"],
)
async def test_what_one_sandbox_uses_up_is_there_for_another(
    provider: LocalProvider, two: tuple[str, str], hostile: str, usual: str, wanted: str
) -> None:
    holding = await provider.start_process(
        two[0], ProcessSpec(argv=("python3", "-c", "import sys\n" + hostile + HOLD), stdin=True)
    )
    try:
        assert await anext(holding.output()) == (1, b"held\n")
        assert (await run(provider, two[0], "python3", "-c", usual))[1] != wanted, "nothing is used up"
        assert (await run(provider, two[1], "python3", "-c", usual))[:2] == (0, wanted)
    finally:
        await holding.terminate(0)
        await holding.aclose()


def test_the_doctor_tries_what_the_ranges_need(tmp_path: Path) -> None:
    checks = {check.name: check for check in doctor({**os.environ, "LOWTIDE_HOME": str(tmp_path / "home")})}
    for name in ("id-mapped mounts", "ids for each sandbox"):
        assert checks[name].ok or "refused for /" in checks[name].why
        assert "import" not in checks[name].why, "what is tried is not there"
