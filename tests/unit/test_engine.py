"""The engine's threads stay out of the program's signals, and their children do not inherit that."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.engine import children_take_signals, engine

BLOCKED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1")

# The kernel hands a signal to any thread that takes it when the main thread does not at that moment, and Python
# runs its handler on the main thread only: taken by the engine, it waits until that one wakes for another reason.
REFUSED = """
import asyncio, os, signal, sys, time
from lowtide.engine import engine

engine().run(asyncio.to_thread(time.sleep, 0))  # the loop's thread and a worker are there
number = signal.Signals[sys.argv[1]]
signal.signal(number, lambda *_: sys.exit(7))
signal.pthread_sigmask(signal.SIG_BLOCK, {number})
os.kill(os.getpid(), number)
print("left for the main thread" if number in signal.sigpending() else "taken", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
time.sleep(60)
"""


@pytest.mark.parametrize("name", BLOCKED)
def test_a_signal_is_left_for_the_main_thread(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (7, "left for the main thread\n"), done.stderr


def _blocked(status: str) -> set[str]:
    mask = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
    return {name for name in BLOCKED if mask & (1 << (signal.Signals[name] - 1))}


def test_children_of_the_engine_take_signals() -> None:
    async def started() -> tuple[str, str]:
        async def status() -> str:
            cat = await asyncio.create_subprocess_exec("cat", "/proc/self/status", stdout=subprocess.PIPE)
            return (await cat.communicate())[0].decode()

        with children_take_signals():
            inside = await status()
        return inside, Path("/proc/thread-self/status").read_text()

    child, thread = engine().run(started())
    assert _blocked(child) == set()
    assert _blocked(thread) == set(BLOCKED)


def test_a_command_in_a_sandbox_takes_signals() -> None:
    with Sandbox.run(provider="local") as box:
        for command in (["cat", "/proc/self/status"], ["cat", "/proc/1/status"]):
            assert _blocked(box.exec(command).result().stdout) == set(), command


def test_the_calling_thread_keeps_its_mask() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with children_take_signals():
        pass
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_what_a_forked_child_does_with_its_parents_connections_stays_in_the_child() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, writer = engine().run(asyncio.open_connection(*server.getsockname()[:2]), timeout=10)
        peer, _ = server.accept()
        with peer:
            child = os.fork()
            if child == 0:
                try:
                    writer.write(b"from the child")
                    writer.close()
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            engine().loop.call_soon_threadsafe(writer.write, b"from the parent")
            engine().loop.call_soon_threadsafe(writer.close)
            peer.settimeout(10)
            received = b""
            while chunk := peer.recv(100):
                received += chunk
    assert received == b"from the parent"


MISSED_SIGNAL = """
import asyncio, signal, threading, time
from lowtide.operation import Operation
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(operation.done()))
operation = Operation.start(asyncio.sleep(8))
def elsewhere():
    time.sleep(1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
threading.Thread(target=elsewhere).start()
operation.result()
print(heard)
"""


def test_a_signal_that_does_not_interrupt_the_main_threads_wait_is_handled_all_the_same() -> None:
    """As one does that arrives in the instant before the wait: Ctrl+C, a resized window."""
    done = subprocess.run(
        [sys.executable, "-c", MISSED_SIGNAL], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[False]\n"
