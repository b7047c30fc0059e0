"""The state directory of one run, removed when nobody writes into it any more."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path


def end(home: Path, *, within_seconds: float = 20.0) -> None:
    """Let the helper processes go and remove the directory. An idle guardian may write for a moment longer."""
    if "lowtide.providers.registry" in sys.modules:
        from lowtide.engine import engine
        from lowtide.providers import registry

        engine().run(registry.aclose(), timeout=60.0)
    deadline = time.monotonic() + within_seconds
    while home.exists() and time.monotonic() < deadline:
        shutil.rmtree(home, ignore_errors=True)
        time.sleep(0.1)
