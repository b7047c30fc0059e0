"""The program that `lowtide demo` kills: makes sandboxes, starts a process in each, says so, and waits."""

from __future__ import annotations

import json
import signal

from lowtide.operation import results
from lowtide.sandbox import Sandbox


def main(provider: str, tag: str, marker: str, count: str) -> None:
    boxes = [Sandbox.run(provider=provider, tags=[tag]) for _ in range(int(count))]
    processes = [box.exec(["sleep", marker]) for box in boxes]
    results([box.exec(["true"]) for box in boxes])
    print(json.dumps([box.sandbox_id for box in boxes]), flush=True)
    signal.pause()
    del processes
