"""What the server and its disk use, as the kernel tells it."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def resources(directory: str) -> dict[str, Any]:
    ticks = os.times()
    fields = _read("/proc/self/statm").split() or ["0", "0"]
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    rss = int(fields[1]) * page
    disk = os.statvfs(directory if os.path.isdir(directory) else "/")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    io = dict(line.split(": ") for line in _read("/proc/self/io").splitlines() if ": " in line)
    return {
        "cpu_percent": round(100.0 * (ticks.user + ticks.system) / max(0.001, _age()), 2),
        "memory": {"rss": rss, "vms": int(fields[0]) * page, "percent": round(100.0 * rss / total, 3)},
        "disk": {
            "total": size,
            "used": size - free,
            "free": free,
            "percent": round(100.0 * (size - free) / max(1, size), 1),
        },
        "io": {"read_bytes": int(io.get("read_bytes", 0)), "write_bytes": int(io.get("write_bytes", 0))},
    }


def _age() -> float:
    fields = _read("/proc/self/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return time.process_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
