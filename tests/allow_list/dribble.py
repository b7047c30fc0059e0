"""How much processor time the proxy spends on clients that send one byte at a time, on the machine of a small world.

Prints one JSON object: the seconds that passed, and the processor seconds of the proxy and of the clients.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from lowtide import Sandbox
from lowtide.machine import home
from lowtide.providers.local.sandbox_directory import SandboxDirectory

# Every connection begins a ClientHello in records of one byte, and goes on byte by byte without ever ending it. Prints
# the processor time of this process, its start included.
CLIENTS = """
import socket, sys, time
def record(byte): return bytes([22, 3, 1, 0, 1, byte])
begun = record(1) + record(0) + record(234) + record(96) + record(0) * 9000
opened = [socket.create_connection(("good.example", 443), 30) for _ in range(20)]
for one in opened:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.sendall(begun)
rest, at, until = record(0), 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for one in opened:
        one.send(rest[at % 6 : at % 6 + 1])
    at += 1
    time.sleep(0.01)
print(time.process_time())
"""


def main(cpu: str, seconds: str) -> None:
    limits = {"resources": {"limits": {"cpu": cpu}}} if cpu != "-" else {}
    with Sandbox.run(provider="local", network=["good.example"], **limits) as box:  # type: ignore[arg-type]
        assert box.sandbox_id is not None
        mark = SandboxDirectory(home() / "local" / "sandboxes" / box.sandbox_id).proxy()
        assert mark is not None
        before, began = _processor_seconds(mark.pid), time.monotonic()
        done = box.exec(["python3", "-c", CLIENTS, seconds], check=True, timeout_seconds=60).result()
        # What has arrived is read and looked at before the proxy gives up on a head.
        time.sleep(0.5)
        passed, spent = time.monotonic() - began, _processor_seconds(mark.pid) - before
    print(json.dumps({"passed": passed, "proxy": spent, "clients": float(done.stdout)}))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(*sys.argv[1:])
