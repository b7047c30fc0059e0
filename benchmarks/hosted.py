"""The hosted providers' own benchmarks, each in a process of its own: it has its own emulator, state and SDK."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Skipped

ROOT = Path(__file__).parent.parent
_SDKS = {"runloop": "runloop_api_client"}


_SDKS = {"coreweave": "cwsandbox"}
"""Where the SDK has another name than the provider."""


def measured(provider: str, *options: str) -> list[dict[str, Any]]:
    """The rows of ``python -m benchmarks.<provider>``, with the provider in their names."""
    module = f"benchmarks.{provider}"
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"there is no {module}")
    if importlib.util.find_spec(_SDKS.get(provider, provider)) is None:
        raise Skipped(f"lowtide[{provider}] is not installed")
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        argv = [sys.executable, "-m", module, "--json", report.name, *options]
        subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
        rows: list[dict[str, Any]] = json.load(report)["results"]
    return [{**row, "name": f"{provider}-{row['name']}"} for row in rows]
