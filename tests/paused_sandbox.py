"""Pause a local sandbox whose processes resist, and report as JSON what happened: python -m tests.paused_sandbox.

`tests/unit/test_local_pause.py` runs this where the machine has one kind of freezer, the other, or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from pathlib import Path

from lowtide import Sandbox

ANSWER_SECONDS = 60.0
LIFETIME_SECONDS = 4.0
STILL_SECONDS = 0.6

# Counts, and has itself woken by a timer that sends SIGCONT twenty times a second.
COUNTING = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)

class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("pad", ctypes.c_int * 12)]

timer = ctypes.c_void_p()
assert libc.timer_create(1, ctypes.byref(Event(signo=signal.SIGCONT, notify=0)), ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000), None) == 0
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
count = os.open("/tmp/count", os.O_RDWR | os.O_CREAT)
number = 0
while True:
    number += 1
    os.pwrite(count, b"%12d" % number, 0)
    time.sleep(0.005)
"""


def main() -> None:
    token = f"token-{secrets.token_hex(8)}"
    found: dict[str, object] = {"token": token}
    with Sandbox.run(provider="local") as box:
        process = box.exec(["python3", "-c", COUNTING, token])
        wait_past(box, 0)
        box.pause().result(ANSWER_SECONDS)
        seen = count(box)
        time.sleep(STILL_SECONDS)
        found["ran"] = count(box) != seen
        box.resume().result(ANSWER_SECONDS)
        wait_past(box, count(box))
        box.pause().result(ANSWER_SECONDS)
        box.stop(graceful_shutdown_seconds=30).result(ANSWER_SECONDS)
        process.exception(ANSWER_SECONDS)
        found["left after stop"] = running(token)
    with Sandbox.run(provider="local", max_lifetime_seconds=LIFETIME_SECONDS) as box:
        process = box.exec(["python3", "-c", COUNTING, token])
        wait_past(box, 0)
        box.pause().result(ANSWER_SECONDS)
        time.sleep(LIFETIME_SECONDS)
        box.stop(graceful_shutdown_seconds=0).exception(ANSWER_SECONDS)
        process.exception(ANSWER_SECONDS)
        found["left after lifetime"] = running(token)
    box = Sandbox.run(provider="local")
    box.exec(["python3", "-c", COUNTING, token])
    wait_past(box, 0)
    box.pause().result(ANSWER_SECONDS)
    print(json.dumps(found), flush=True)
    sys.stdin.read()  # killed here: the guardian ends the paused sandbox


def count(box: Sandbox) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int(box.read_file("/tmp/count").result(ANSWER_SECONDS) or 0)
    return 0


def wait_past(box: Sandbox, number: int) -> None:
    until = time.monotonic() + ANSWER_SECONDS
    while count(box) <= number:
        assert time.monotonic() < until, "the program inside does not run"
        time.sleep(0.02)


def running(token: str) -> int:
    """Processes of this machine whose command line holds the token."""
    found = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid():
                found += token.encode() in Path(f"/proc/{name}/cmdline").read_bytes()
    return found


if __name__ == "__main__":
    main()
