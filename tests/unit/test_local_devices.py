"""The device nodes of a local sandbox are its own, as root."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lowtide.providers.base import ProcessSpec
from lowtide.providers.local import LocalProvider

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, spec

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user may make no device nodes")

NODES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/proc/self/fd/0")

# Locks and watches every node, and prints the names of those that something else has touched, until it is told to end.
LISTEN = """
import ctypes, fcntl, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
watcher = libc.inotify_init1(os.O_CLOEXEC)
names, held = {}, []
for name in sys.argv[1:]:
    path = os.path.realpath(name)
    try:
        held.append(os.open(path, os.O_RDONLY))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    except OSError:
        pass  # there is no controlling terminal
    names[libc.inotify_add_watch(watcher, path.encode(), 0x20)] = name  # IN_OPEN
print("ready", flush=True)
heard, poll = set(), select.poll()
poll.register(watcher, select.POLLIN)
poll.register(0, select.POLLIN)
while True:
    ready = [fd for fd, _ in poll.poll()]
    if watcher in ready:
        data = os.read(watcher, 65536)
        for at in range(0, len(data), 16):
            heard.add(names.get(int.from_bytes(data[at : at + 4], "little"), "?"))
    elif 0 in ready:
        break
print(*sorted(heard), flush=True)
"""

# Opens every node, and prints those whose lock another one holds.
TOUCH = """
import fcntl, os, sys
for name in sys.argv[1:]:
    try:
        node = os.open(name, os.O_RDONLY)
        fcntl.flock(node, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(node)  # and its lock: standard input is a node that comes twice
    except BlockingIOError:
        print(name)
    except OSError:
        pass
"""


async def test_locks_and_watches_on_device_nodes_reach_no_other_sandbox(provider: LocalProvider) -> None:
    one, other = [(await provider.create(spec())).sandbox_id for _ in range(2)]
    listening = await provider.start_process(
        one, ProcessSpec(argv=("python3", "-c", LISTEN, *NODES), stdin=True)
    )
    try:
        output = listening.output()
        assert await anext(output) == (1, b"ready\n")
        assert await run(provider, other, "python3", "-c", TOUCH, *NODES) == (0, "", "")
        with open("/dev/null", "rb"):
            pass  # nor this machine
        await listening.close_stdin()
        assert await anext(output) == (1, b"\n")
    finally:
        await listening.aclose()


async def test_the_nodes_work(provider: LocalProvider) -> None:
    sandbox = (await provider.create(spec())).sandbox_id
    script = "echo x > /dev/null && head -c 3 /dev/zero | od -An -tx1 && head -c 9 /dev/urandom | wc -c"
    assert await run(provider, sandbox, "sh", "-c", script) == (0, " 00 00 00\n9\n", "")
    code, _, err = await run(provider, sandbox, "dd", "if=/dev/zero", "of=/dev/full", "count=1")
    assert code != 0
    assert "No space" in err
    assert (await run(provider, sandbox, "sh", "-c", ": > /dev/new"))[0] != 0
    assert (await run(provider, sandbox, "mknod", "/tmp/node", "c", "1", "3"))[0] != 0
