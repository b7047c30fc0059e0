"""Which machine the numbers came from: enough to compare, nothing that names it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from lowtide._version import __version__


def facts() -> dict[str, Any]:
    return {
        "lowtide": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "processors": len(os.sched_getaffinity(0)),
        "memory_mb": int(_first("/proc/meminfo", "MemTotal").split()[0]) // 1024,
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "date": datetime.now(UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 2),
    }


def _first(path: str, key: str) -> str:
    with open(path) as file:
        for line in file:
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return "unknown"
