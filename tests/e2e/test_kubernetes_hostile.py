"""What runs in a pod may be hostile and have the channel's own user: it cannot forge, outlive or prolong anything."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.kubernetes_node import Node, needs_node

from lowtide.providers.base import Limits, ProcessSpec, SandboxState
from lowtide.providers.kubernetes import KubernetesOptions

pytestmark = [*needs_node, pytest.mark.timeout(300)]

ORDINARY = KubernetesOptions(run_as_user=1000, run_as_group=1000, fs_group=1000)


async def test_nothing_inside_can_signal_process_one(node: Node) -> None:
    box = await node.ready()
    script = "for s in TERM INT QUIT HUP USR1 CHLD KILL STOP; do kill -$s 1; done; sleep 0.5; echo alive"
    assert await node.run(box, "sh", "-c", script) == (0, b"alive\n", b"")
    assert (await node.provider.get(box)).state is SandboxState.RUNNING


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
        if pid == os.getpid():
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
        for name in ("mem", "environ"):
            try:
                if open(f"{entry}/{name}", "rb").read(1):
                    got(entry, "read", name)
            except OSError:
                pass
        if b"attach" in words:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
print("tried")
"""


@pytest.mark.parametrize("options", [KubernetesOptions(), ORDINARY], ids=["root", "ordinary"])
async def test_a_neighbour_of_the_same_user_gets_at_no_descriptor_and_forges_no_result(
    node: Node, options: KubernetesOptions
) -> None:
    """Its channel is killed again and again meanwhile: every command still runs once, and its result is its own."""
    box = await node.ready(options=options)
    forger = await node.provider.start_process(box, ProcessSpec(argv=("python3", "-c", _FORGER)))
    said = asyncio.ensure_future(_everything(forger))
    for number in range(10):
        script = f"echo {number} >>/tmp/ran; echo no; exit 3"
        assert await node.run(box, "sh", "-c", script) == (3, b"no\n", b"")
    assert await said == b"tried\n"
    ran = b"".join([piece async for piece in node.provider.read_file(box, "/tmp/ran")])
    assert ran.split() == [b"%d" % number for number in range(10)]


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


async def test_what_runs_inside_gets_no_channel_of_its_own_and_no_key(node: Node) -> None:
    box = await node.ready()
    await node.run(box, "true")
    key = node.provider._keys[box].hex().encode()
    assert (await node.run(box, "python3", "-c", _POSER))[1] == b"refused\n"
    script = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; cat /.lowtide/* /.lowtide/..data/*; cat /proc/mounts"
    _, out, _ = await node.run(box, "sh", "-c", f"({script}) 2>/dev/null")
    assert key not in out
    assert (await node.run(box, "sh", "-c", "echo x >/.lowtide/inside || rm -f /.lowtide/inside"))[0] != 0


_BOMB = """
import os, resource, signal, time
resource.setrlimit(resource.RLIMIT_NPROC, (60, 60))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
_HARD: dict[str, tuple[str, ...]] = {
    "fork-bomb": ("python3", "-c", _BOMB),
    "stop-storm": (
        "sh",
        "-c",
        "trap '' TERM; while :; do kill -STOP -1 2>/dev/null; sleep 0.01; done & while :; do sleep 1; done",
    ),
    "kills-everything": (
        "sh",
        "-c",
        "trap '' TERM; setsid sleep 600 & while :; do kill -KILL $PPID 2>/dev/null; sleep 0.05; done",
    ),
}


@pytest.mark.parametrize("how", _HARD)
async def test_the_end_of_a_hostile_command_is_confirmed(node: Node, how: str) -> None:
    # A user of its own: Kubernetes has no process limit per pod, so the bomb meets that of its user on the machine.
    user = 40_000 + os.getpid() % 20_000
    box = await node.ready(options=KubernetesOptions(run_as_user=user), limits=Limits(memory_bytes=1 << 30))
    handle = await node.provider.start_process(box, ProcessSpec(argv=_HARD[how]))
    await asyncio.sleep(2)
    await handle.terminate(0.5)
    assert await handle.wait() in (137, 143)
    code, out, _ = await node.run(box, "ps", "-eo", "pid=,args=")
    left = [line for line in out.decode().splitlines() if "inside" not in line and "ps -eo" not in line]
    assert (code, left) == (0, [])


async def test_no_word_of_the_callers_is_read_by_a_shell(node: Node) -> None:
    box = await node.ready(options=ORDINARY)
    odd = ("a\nb", "$(x) `y` $N", "", " 'q' \"d\" \\", "-n", "ü\udcff")
    names = (
        "N",
        "S",
        "M",
        "UID",
        "PPID",
        "SHELLOPTS",
        "OPTIND",
        "IFS",
        "BASH_ENV",
        "ENV",
        "a.b",
        "lower case",
    )
    environment = {name: f"<{name}\n>" for name in names}
    program = (
        "import os, sys; sys.stdout.buffer.write(repr((sys.argv[1:], [(n, os.environ.get(n)) for n in "
        f"{names!r}])).encode('utf-8', 'backslashreplace'))"
    )
    code, out, err = await node.run(box, "python3", "-c", program, *odd, environment=environment)
    assert (code, err) == (0, b"")
    assert out.decode() == repr((list(odd), list(environment.items())))


async def test_commands_of_other_users_where_the_sandbox_is_roots(node: Node) -> None:
    box = await node.ready()
    assert (await node.run(box, "id", "-u", user="65534"))[1] == b"65534\n"
    assert (await node.run(box, "sh", "-c", "id -g; id -un", user="nobody"))[1] == b"65534\nnobody\n"


_RENEWER = """
import asyncio, os, sys
from lowtide.providers.base import ProcessSpec
from lowtide.providers.kubernetes import KubernetesProvider

async def main():
    provider = KubernetesProvider.connect(os.environ)
    assert await provider.renew(sys.argv[1], 600) is not None
    handle = await provider.start_process(sys.argv[1], ProcessSpec(argv=("true",)))
    assert await handle.wait() == 0
    await provider.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("command", [None, ("sleep", "1000")])
async def test_another_process_renews_also_with_a_main_command(
    node: Node, command: tuple[str, ...] | None
) -> None:
    box = await node.ready(lifetime_seconds=12, command=command)
    argv = [sys.executable, "-c", _RENEWER, box]
    done = await asyncio.to_thread(subprocess.run, argv, env=dict(os.environ), timeout=60)
    assert done.returncode == 0
    await asyncio.sleep(13)
    assert (await node.provider.get(box)).state is SandboxState.RUNNING


async def _everything(handle: Any) -> bytes:
    return b"".join([data async for _, data in handle.output()])
