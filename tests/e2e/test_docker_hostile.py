"""What runs in a container may be hostile and have the same user: it cannot forge, outlive or prolong anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from tests.container_engine import Boxes

from lowtide.providers.base import Limits, ProcessSpec, SandboxState
from lowtide.providers.docker.options import DockerOptions
from lowtide.providers.inside import InsideProcess

pytestmark = pytest.mark.timeout(300)


async def test_nothing_inside_can_signal_process_one(boxes: Boxes) -> None:
    box = await boxes.make()
    script = "for s in TERM INT QUIT HUP USR1 CHLD KILL STOP; do kill -$s 1; done; sleep 0.5; echo alive"
    assert await boxes.run(box, "sh", "-c", script) == (0, "alive\n", "")
    assert (await boxes.provider.get(box)).state is SandboxState.RUNNING


_FORGER = """
import glob, os, signal, time
end = time.time() + 6
def words_of(entry):
    try:
        return open(entry + "/cmdline", "rb").read()
    except OSError:
        return b""
def got(entry, *what):
    # A command that was still the program's own child a moment ago is anybody's once it has begun.
    if words_of(entry).startswith(b"/.lowtide/inside"):
        print(*what, flush=True)
while time.time() < end:
    for entry in glob.glob("/proc/[0-9]*"):
        pid = int(entry[6:])
        if pid in (1, os.getpid()):
            continue
        words = words_of(entry)
        if not words.startswith(b"/.lowtide/inside"):
            continue
        for number in range(8):
            try:
                os.close(os.open(f"{entry}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK))
                got(entry, "opened", number)
            except OSError:
                pass
        try:
            open(entry + "/mem", "rb").close()
            got(entry, "read")
        except OSError:
            pass
        if b"attach" in words:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
print("tried")
"""


@pytest.mark.parametrize("user", [None, "65534:65534", "1000:1000"])
async def test_a_neighbour_of_the_same_user_gets_at_no_descriptor_and_forges_no_result(
    boxes: Boxes, user: str | None
) -> None:
    box = await boxes.make(options=DockerOptions(user=user))
    forger = await boxes.provider.start_process(box, ProcessSpec(argv=("python3", "-c", _FORGER)))
    said = asyncio.ensure_future(_everything(forger))
    for _ in range(10):
        assert await boxes.run(box, "sh", "-c", "echo no; exit 3") == (3, "no\n", "")
    assert await said == b"tried\n"


_POSER = """
import os, socket, struct
s = socket.socket(socket.AF_UNIX)
s.connect("\\0lowtide-inside-" + os.readlink("/proc/self/ns/pid"))
try:
    a, b = socket.socketpair()
    socket.send_fds(s, [b"b" + bytes(4)], [b.fileno(), b.fileno()])
    b.close()
    body = b"LOWTIDE1" + bytes(16) + bytes(8) + b"\\0" + bytes(8)
    a.sendall(struct.pack("<LQQ", len(body) + 16, 0, 0) + body)
    a.settimeout(5)
    print("answered" if a.recv(100) else "refused")
except OSError:
    print("refused")
"""


async def test_what_runs_inside_gets_no_channel_of_its_own(boxes: Boxes) -> None:
    box = await boxes.make()
    assert (await boxes.run(box, "python3", "-c", _POSER))[1] == "refused\n"
    _, out, _ = await boxes.run(box, "sh", "-c", "env; cat /proc/1/environ /proc/1/cmdline | tr '\\0' '\\n'")
    assert "LOWTIDE_KEY" not in out


_HARD = {
    "fork-bomb": """exec python3 -c '
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        os.fork()
    except OSError:
        pass
'""",
    "stop-storm": "trap '' TERM; while :; do kill -STOP -1 2>/dev/null; sleep 0.01; done & while :; do sleep 1; done",
    "kills-everything": "trap '' TERM; setsid sleep 600 & while :; do kill -KILL $PPID 2>/dev/null; sleep 0.05; done",
}


@pytest.mark.parametrize("how", _HARD)
async def test_the_end_of_a_hostile_command_is_confirmed(boxes: Boxes, how: str) -> None:
    box = await boxes.make(limits=Limits(pids=60))
    handle = await boxes.provider.start_process(box, ProcessSpec(argv=("sh", "-c", _HARD[how])))
    await asyncio.sleep(2)
    await handle.terminate(0.5)
    assert await handle.wait() in (137, 143)
    code, out, _ = await boxes.run(box, "ps", "-eo", "pid=,args=")
    left = [line for line in out.splitlines() if "inside" not in line and "ps -eo" not in line]
    assert (code, left) == (0, [])


_RENEWER = """
import asyncio, os, sys
from lowtide.providers.docker import DockerProvider

async def main():
    provider = DockerProvider.connect(os.environ)
    assert await provider.renew(sys.argv[1], 600) is not None
    await provider.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("command", [None, ("sleep", "1000")])
async def test_another_process_renews_also_with_a_main_command(
    boxes: Boxes, command: tuple[str, ...] | None
) -> None:
    box = await boxes.make(lifetime_seconds=10, command=command)
    argv = [sys.executable, "-c", _RENEWER, box]
    environ = {**os.environ, "DOCKER_HOST": boxes.url}
    done = await asyncio.to_thread(subprocess.run, argv, env=environ, timeout=60)
    assert done.returncode == 0
    await asyncio.sleep(11)
    assert (await boxes.provider.get(box)).state is SandboxState.RUNNING


async def test_a_terminal_of_another_user_is_its_own(boxes: Boxes) -> None:
    from lowtide.providers.base import TerminalSize

    box = await boxes.make()
    handle = await boxes.provider.start_process(
        box,
        ProcessSpec(
            argv=("sh", "-c", "id -u; tty; echo x >/dev/tty; echo $HOME"), user="65534", tty=TerminalSize()
        ),
    )
    out = (await _everything(handle)).decode().split()
    assert out[0] == "65534"
    assert out[1].startswith("/dev/pts/")
    assert out[2:] == ["x", "/nonexistent"]


async def _everything(handle: InsideProcess) -> bytes:
    return b"".join([data async for _, data in handle.output()])
