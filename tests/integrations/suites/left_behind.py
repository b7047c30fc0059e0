"""What stays at a service after kill -9 in the middle of an agent's command, and when the service itself ends it.

    python -m tests.integrations.suites.left_behind FRAMEWORK SERVICE own|lowtide PYTHON SECONDS

Starts the service's emulator, has PYTHON run the agent, kills it while the command runs, waits until nothing is left or
SECONDS have passed, counts, then moves the emulator's clock. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lowtide.emulators
from lowtide.emulators.handle import Handle
from tests.integrations.suites.own_backends import program

START_SECONDS = 200.0
MINUTE, HOUR, DAY = 60, 3600, 86_400
LATER = [*(n * MINUTE for n in (5, 10, 15, 20, 30)), HOUR, 2 * HOUR, 12 * HOUR, DAY, 7 * DAY, 30 * DAY]
MARGIN_SECONDS = 30  # the clock moves on while the sandbox is made and the command starts


def main() -> None:
    framework, service, kind, python, seconds = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="lowtide-left-", dir="/tmp") as place:
        home = Path(place, "home")
        home.mkdir(mode=0o700)
        with lowtide.emulators.start(service) as emulators:
            environ = {**os.environ, **emulators.environment}
            environ |= {"LOWTIDE_HOME": str(home), "LOWTIDE_PROVIDER": service, "HOME": place}
            environ.pop("PYTHONPATH", None)
            argument = f"1000.{os.getpid()}"  # by which the command is known among this machine's processes
            text = program(framework, service, kind == "own", f"sleep {argument}")
            kill_in_the_middle([python, "-c", text], environ, Path(place), argument)
            print(json.dumps(measured(emulators, service, float(seconds))))


def kill_in_the_middle(command: list[str], environ: dict[str, str], place: Path, argument: str) -> None:
    output = place / "output"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            command, env=environ, cwd=place, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        ) as agent,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_running(argument):
                if agent.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(output.read_text(errors="replace")[-6000:])
                time.sleep(0.1)
        finally:
            agent.kill()


def is_running(argument: str) -> bool:
    wanted = b"sleep\0" + argument.encode() + b"\0"
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if line.read_bytes() == wanted:
                return True
        except OSError:  # it has just ended
            continue
    return False


def measured(emulators: Handle, service: str, seconds: float) -> dict[str, Any]:
    """How many are left within `seconds` and how long it took, then what the service's own clock does to them."""

    def states() -> list[str]:
        return sorted(str(one["state"]) for one in emulators.state()["sandboxes"][service])

    began = time.monotonic()
    while (left := states()) and time.monotonic() - began < seconds:
        time.sleep(0.05)
    result: dict[str, Any] = {"left": len(left), "seconds": round(time.monotonic() - began, 1)}
    history, passed = [["now", *left]] if left else [], 0
    for later in LATER if left else []:
        emulators.clock.advance(later - passed + (0 if passed else MARGIN_SECONDS))
        passed = later
        now = states()
        if now != history[-1][1:]:
            history.append([told(later), *now])
        if not now:
            break
    return {**result, "history": history, "clock_moved_days": passed / DAY}


def told(seconds: int) -> str:
    if seconds < 2 * HOUR:
        return f"{seconds // MINUTE} min"
    return f"{seconds // HOUR} h" if seconds < 2 * DAY else f"{seconds // DAY} days"


if __name__ == "__main__":
    main()
