"""Hundreds of file calls at once through the public API, and what became of them as JSON.

python -m tests.many_file_calls DESCRIPTORS [hostile]: with that limit of descriptors in this process; `hostile`: while
another sandbox keeps as many descriptors on their way between processes as it can.
"""

from __future__ import annotations

import collections
import json
import resource
import sys
import time

from lowtide import LowtideError, Operation, Sandbox

CALLS = 900
SECONDS = 60.0

# Sends descriptors that nobody receives, until the kernel takes no more of them.
HOLDING = """
import array, os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
pairs, held = [], 0
try:
    while held < 20_000:
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for _ in range(5):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))
            pairs[-1][0].sendmsg([b"x"], [rights])
            held += 200
except OSError:
    pass
print(held, flush=True)
sys.stdin.read()
"""


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = int(sys.argv[1])
    hostile = sys.argv[2:] == ["hostile"]
    # A hostile sandbox may have more than this process uses: as where `ulimit -n` says 1024 and `ulimit -Hn` more.
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard if hostile else soft))
    found: dict[str, object] = {}
    boxes = [Sandbox.run(provider="local") for _ in range(3)]
    try:
        if hostile:
            process = boxes.pop().exec(["python3", "-c", HOLDING], stdin=True)
            found["held"] = int(next(iter(process.stdout)))
        for box in boxes:
            box.write_file("/tmp/read", b"x" * 1000).result(SECONDS)
        calls: list[tuple[str, Operation[object]]] = []
        for number in range(CALLS):
            box = boxes[number % len(boxes)]
            if number % 2:
                calls.append(("read", box.read_file("/tmp/read")))
            else:
                calls.append(("write", box.write_file(f"/tmp/{number}", b"y" * 100)))
        until = time.monotonic() + SECONDS
        ends: collections.Counter[str] = collections.Counter()
        for kind, call in calls:
            try:
                call.result(max(0.1, until - time.monotonic()))
                ends[kind] += 1
            except (LowtideError, OSError) as error:
                ends[f"{kind}: {type(error).__name__}: {str(error)[:80]}"] += 1
        found["ends"] = dict(ends)
        found["echo"] = boxes[0].exec(["echo", "on"]).result(SECONDS).stdout
    finally:
        for box in boxes:
            box.stop(graceful_shutdown_seconds=0).exception(SECONDS)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
