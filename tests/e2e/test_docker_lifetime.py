"""The hard lifetime in a container: it holds with no lowtide process left, and against the sandbox itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from tests.container_engine import IMAGE, Boxes, needs_docker

from lowtide import Sandbox
from lowtide.providers.base import SandboxState

_CREATOR = """
import asyncio, os, sys
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.docker import DockerProvider

async def main():
    labels = Labels(lease_id=sys.argv[1], ledger_id=sys.argv[2], owner="gone")
    spec = SandboxSpec(labels=labels, image=sys.argv[3], lifetime_seconds=3)
    await DockerProvider.connect(os.environ).create(spec)
    os._exit(7)

asyncio.run(main())
"""


async def test_it_ends_when_no_lowtide_process_is_left(boxes: Boxes) -> None:
    spec = boxes.spec()
    command = [sys.executable, "-c", _CREATOR, spec.lease_id, boxes.ledger_id, IMAGE]
    done = await asyncio.to_thread(
        subprocess.run, command, env={**os.environ, "DOCKER_HOST": boxes.url}, timeout=120
    )
    assert done.returncode == 7
    assert await boxes.gone(spec.lease_id)


_ATTACKS = """
kill -STOP 1; kill -KILL 1; kill -TERM 2147483647
echo 86400 > /proc/1/fd/0 && echo renewed-itself
cat /proc/1/environ > /dev/null && echo read-environ
python3 - <<'PY'
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0x4206, 1, 0, 0) == 0:
    print("traced")
PY
exit 0
"""


async def test_the_sandbox_cannot_stop_the_clock(boxes: Boxes) -> None:
    box = await boxes.make(lifetime_seconds=6)
    code, out, _ = await boxes.run(box, "sh", "-c", _ATTACKS)
    assert (code, out) == (0, "")
    assert await boxes.gone(box)


async def test_it_holds_for_a_main_command_that_ignores_every_signal(boxes: Boxes) -> None:
    box = await boxes.make(
        lifetime_seconds=3, command=("sh", "-c", "trap '' TERM INT HUP ALRM; while :; do sleep 1; done")
    )
    assert await boxes.gone(box)


async def test_a_renewed_sandbox_outlives_its_first_lifetime(boxes: Boxes) -> None:
    box = await boxes.make(lifetime_seconds=3)
    expiry = await boxes.provider.renew(box, 600)
    assert expiry is not None
    await asyncio.sleep(5)
    assert (await boxes.provider.get(box)).state is SandboxState.RUNNING


async def test_a_renewal_can_also_shorten(boxes: Boxes) -> None:
    box = await boxes.make(lifetime_seconds=600)
    await boxes.provider.renew(box, 1)
    assert await boxes.gone(box)


async def test_orphans_of_a_command_are_reaped(boxes: Boxes) -> None:
    box = await boxes.make()
    await boxes.run(box, "sh", "-c", "for i in 1 2 3 4 5; do (sleep 3.25 >/dev/null 2>&1 &) ; done")
    _, out, _ = await boxes.run(box, "ps", "-eo", "args=")
    assert out.count("sleep 3.25") == 5  # they are there to be orphans
    for _ in range(300):
        _, out, _ = await boxes.run(box, "ps", "-eo", "stat=,args=")
        if "sleep" not in out:
            break
        await asyncio.sleep(0.1)
    assert "sleep" not in out  # neither asleep nor `Z [sleep] <defunct>`


@needs_docker[1]
def test_a_sandbox_with_its_own_main_command_can_be_kept() -> None:
    tag = f"kept-{os.getpid()}"
    with Sandbox.run(
        "sleep",
        "1000",
        provider="docker",
        container_image=IMAGE,
        tags=[tag],
        keep="always",
        keep_for_seconds=120,
    ) as sandbox:
        sandbox.wait()
    listed = subprocess.run(
        [sys.executable, "-m", "lowtide", "ls", "--tag", tag, "--json"], capture_output=True, check=True
    )
    Sandbox.delete(str(sandbox.sandbox_id)).result()
    assert b"kept" in listed.stdout.lower()
