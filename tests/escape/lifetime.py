"""Attempts to live longer than allowed: past a lifetime, past a time-out, past the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from lowtide import Sandbox
from lowtide.errors import LowtideError
from tests import paused_sandbox
from tests.escape.attempt import ANSWER_SECONDS, PREAMBLE, LeftOut, Target, attempt

LIFETIME_SECONDS = 8
SLACK_SECONDS = 20.0  # a busy machine's

_OWNER = """
import os, sys, time
from lowtide import Sandbox
box = Sandbox.run("python3", "-c", sys.argv[1], sys.argv[2], provider="local", max_lifetime_seconds=float(sys.argv[3]))
print("made", flush=True)
time.sleep(1000)
"""


def _running(token: str) -> list[int]:
    """Processes of this machine whose command line holds the token."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and token.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def _outlives_its_lifetime(hostile: str) -> str | None:
    """Kill owner and guardian, and see whether the code inside is still there after its lifetime."""
    token = f"token-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="escape-", dir="/tmp", ignore_cleanup_errors=True) as state:
        began = time.monotonic()
        owner = subprocess.Popen(
            [sys.executable, "-c", _OWNER, PREAMBLE + hostile, token, str(LIFETIME_SECONDS)],
            env={**os.environ, "LOWTIDE_HOME": f"{state}/home"},
            stdout=subprocess.PIPE,
        )
        assert owner.stdout is not None
        with owner.stdout:
            said = owner.stdout.readline()
        # The owner, and whatever it started that would end its sandboxes. All are stopped first: a guardian
        # that sees its owner dead for a moment ends the sandbox itself.
        killed: set[int] = set()
        while found := set(_with_home(f"{state}/home")) - killed:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            killed |= found
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        owner.wait()
        if said != b"made\n" or killed == {owner.pid}:
            raise RuntimeError("there was no sandbox, or no guardian to be killed")
        while (left := _running(token)) and time.monotonic() < began + LIFETIME_SECONDS + SLACK_SECONDS:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() < began + LIFETIME_SECONDS:
            raise RuntimeError("it was ended before its lifetime was over, by somebody else")
        return f"{len(left)} processes ran on" if left else None


def _with_home(home: str) -> list[int]:
    """Processes of this machine that have this state directory in their environment."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{name}/environ").read_bytes() if name.isdigit() else b""
            if f"LOWTIDE_HOME={home}".encode() in environment:
                found.append(int(name))
    return found


@attempt("outlive the lifetime: owner and guardian killed, all signals ignored")
def outlive_ignoring(target: Target) -> str | None:
    return _outlives_its_lifetime("""
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
libc.prctl(1, 0, 0, 0, 0)
time.sleep(1000)
""")


@attempt("outlive the lifetime: stop everything in the process group, the watchdog among it")
def outlive_by_stopping_the_group(target: Target) -> str | None:
    return _outlives_its_lifetime("""
import signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
time.sleep(0.3)
while True:
    tried(os.kill, 0, signal.SIGSTOP)
    tried(os.kill, -1, signal.SIGSTOP)
    time.sleep(0.1)
""")


@attempt("outlive the lifetime: make process 1 clear its death signal")
def outlive_by_process_one(target: Target) -> str | None:
    return _outlives_its_lifetime("""
import time
fd = tried(os.open, "/proc/1/mem", os.O_RDWR)
if fd is None:
    time.sleep(1000)
# prctl(PR_SET_PDEATHSIG, 0); then wait for ever
code = bytes.fromhex("b89d000000bf0100000031f60f05b822000000" "0f05ebf7")
for line in open("/proc/1/maps"):
    parts = line.split()
    if "x" in parts[1]:
        low, high = (int(word, 16) for word in parts[0].split("-"))
        for at in range(low, high, 4096):
            try: os.pwrite(fd, (b"\\x90" * (4096 - len(code)) + code)[:high - at], at)
            except OSError: pass
tried(os.kill, 1, 17)
time.sleep(1000)
""")


@attempt("outlive a time-out: stop the helper that ends the process tree")
def outlive_a_timeout(target: Target) -> str | None:
    stopper = """
import signal, time
print("up", flush=True)
own = {os.getpid(), os.getppid()}
while True:
    for pid in [int(p) for p in os.listdir("/proc") if p.isdigit()]:
        if pid not in own and pid > 2:
            tried(os.kill, pid, signal.SIGSTOP)
"""
    with target.make() as box:
        loop = box.exec(["python3", "-c", PREAMBLE + stopper])
        next(iter(loop.stdout))
        began = time.monotonic()
        process = box.exec(["sleep", "1000"], timeout_seconds=2)
        try:
            process.result(2 + SLACK_SECONDS + 15)
        except LowtideError as error:
            ended = time.monotonic() - began
            return None if ended < 2 + SLACK_SECONDS else f"ended after {ended:.0f} s: {error}"
        except TimeoutError:
            return "the time-out never came"
        return "the command was not ended"


@attempt("outlive a time-out: children in sessions of their own, with an empty environment")
def outlive_a_timeout_in_another_session(target: Target) -> str | None:
    token = f"91{secrets.randbelow(10**9)}"
    code = """
import subprocess
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
        os._exit(0)
import time
time.sleep(1000)
"""
    with target.make() as box:
        process = box.exec(["python3", "-c", PREAMBLE + code, token], timeout_seconds=2)
        process.exception(ANSWER_SECONDS)
        deadline = time.monotonic() + 5
        while (left := _running(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return f"{len(left)} processes ran on" if left else None


_FIRST_THREAD_LEAVES = """
import threading, time
def work():
    last, count, longest = time.monotonic(), 0, 0.0
    while True:
        now = time.monotonic()
        last, count, longest = now, count + 1, max(longest, now - last)
        with open("/tmp/new", "w") as file: file.write(f"{count} {longest}")
        os.rename("/tmp/new", "/tmp/said")
        time.sleep(0.02)
threading.Thread(target=work).start()
while not os.path.exists("/tmp/said"): time.sleep(0.01)
print("up", flush=True)
call(60, 93, 0)
"""


def _said(box: Sandbox) -> tuple[int, float]:
    """How often the thread that goes on was at work, and the longest that it was not."""
    count, longest = box.read_file("/tmp/said").result(ANSWER_SECONDS).split()
    return int(count), float(longest)


@attempt("outlive a time-out: the first thread leaves, and another goes on")
def outlive_a_timeout_without_a_first_thread(target: Target) -> str | None:
    with target.make() as box:
        code = PREAMBLE + _FIRST_THREAD_LEAVES
        box.exec(["python3", "-c", code], timeout_seconds=3).exception(ANSWER_SECONDS)
        before = _said(box)
        time.sleep(0.5)
        return "it ran on after its time-out" if _said(box) != before else None


@attempt("run on in a paused sandbox: the first thread leaves, and another goes on")
def run_on_while_paused_without_a_first_thread(target: Target) -> str | None:
    with target.make() as box:
        process = box.exec(["python3", "-c", PREAMBLE + _FIRST_THREAD_LEAVES])
        next(iter(process.stdout))
        box.pause().result(ANSWER_SECONDS)
        time.sleep(1.5)
        box.resume().result(ANSWER_SECONDS)
        before = _said(box)[0]
        while (said := _said(box))[0] <= before + 1:
            time.sleep(0.02)
        return None if said[1] >= 1.0 else f"it never stood still for longer than {said[1]:.2f} s"


@attempt("run on in a paused sandbox: a timer sends SIGCONT")
def run_on_while_paused_by_a_timer(target: Target) -> str | None:
    with target.make() as box, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        box.exec(["python3", "-c", paused_sandbox.COUNTING])
        paused_sandbox.wait_past(box, 0)
        box.pause().result(ANSWER_SECONDS)
        if any("SIGSTOP" in str(one.message) for one in said):
            raise LeftOut("this user has no freezer, and pause() warns of it")
        before = paused_sandbox.count(box)
        time.sleep(1.0)
        after = paused_sandbox.count(box)
        box.resume().result(ANSWER_SECONDS)
        return f"it ran on, from {before} to {after}" if before != after else None


@attempt("outlive the end: processes that fork as fast as they are killed")
def outlive_the_end(target: Target) -> str | None:
    token = f"92{secrets.randbelow(10**9)}"
    with target.make(resources={"limits": {"pids": 100}}) as box:
        script = f"f() {{ sleep {token} & f & f; }}; f"
        box.exec(["sh", "-c", script])
        time.sleep(0.3)
        box.stop(graceful_shutdown_seconds=0).exception(ANSWER_SECONDS)
    left = _running(token)
    return f"{len(left)} processes ran on" if left else None
