"""What a sandbox uses, measured inside it when somebody asks."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.emulators.e2b.model import Sandbox
    from lowtide.emulators.ground import Ground

_PROBE = (
    "cat /proc/[0-9]*/stat 2>/dev/null; echo; df -Pk / 2>/dev/null | tail -n 1; "
    "grep -E '^(MemTotal|Cached):' /proc/meminfo; nproc"
)
_OFTEN_SECONDS = 1.0


async def sample(ground: Ground, sandbox: Sandbox) -> None:
    """Add one measurement, unless the last one is fresh or nothing runs."""
    now = ground.clock.now()
    if sandbox.paused or (sandbox.metrics and now - sandbox.metrics[-1]["timestampUnix"] < _OFTEN_SECONDS):
        return
    _, printed = await ground.backing.run(sandbox.backing, ("/bin/sh", "-c", _PROBE))
    processes, _, rest = printed.decode("utf-8", "replace").partition("\n\n")
    ticks = pages = 0
    for line in processes.splitlines():
        fields = line.rpartition(")")[2].split()
        if len(fields) > 21:
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
    lines = [line.split() for line in rest.splitlines() if line.strip()]
    disk = next((f for f in lines if len(f) >= 6), ["", "0", "0"])
    memory = {f[0].rstrip(":"): int(f[1]) * 1024 for f in lines if f[0].endswith(":")}
    cpus = int(lines[-1][0]) if lines and len(lines[-1]) == 1 else 1
    alive = max(now - sandbox.started_at, 0.01)
    used = 100.0 * ticks / os.sysconf("SC_CLK_TCK") / alive
    sandbox.metrics.append(
        {
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"),
            "timestampUnix": int(now),
            "cpuCount": cpus,
            "cpuUsedPct": round(used, 2),
            "memUsed": pages * os.sysconf("SC_PAGE_SIZE"),
            "memTotal": memory.get("MemTotal", 0),
            "memCache": memory.get("Cached", 0),
            "diskUsed": int(disk[2]) * 1024,
            "diskTotal": int(disk[1]) * 1024,
        }
    )
    del sandbox.metrics[:-1000]
