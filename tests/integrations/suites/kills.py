"""kill -9 in the middle of an agent's run, and how long until `lowtide ls` is empty."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from tests.crash.stalls import Stalls

PROMISED_SECONDS = 1.0
FACTOR = 3.0
OWN_SECONDS = {"e2b": 5.0}
"""What a delete takes at the service itself."""

READY = "touch /tmp/ready && sleep 1000"
"""What the agent runs when it is killed."""

DOCS = Path(__file__).parents[3] / "docs/integrations"


def lowtide(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowtide", *arguments], capture_output=True, text=True, timeout=120
    )


def shown() -> list[dict[str, Any]]:
    """What `lowtide ls` says."""
    done = lowtide("ls", "--json")
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def open_leases() -> list[tuple[str, str]]:
    """(sandbox id, tags) of every lease that is not over, from the ledger itself: much cheaper than a process."""
    ledger = Path(os.environ["LOWTIDE_HOME"], "ledger.db")
    if not ledger.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, timeout=30)) as database:
        query = "SELECT sandbox_id, tags FROM lease WHERE state NOT IN ('gone', 'handed-over')"
        try:
            return [(str(sandbox), str(tags)) for sandbox, tags in database.execute(query)]
        except sqlite3.OperationalError as error:  # it has just been made
            if "no such table" not in str(error):
                raise
            return []


def killed_in_the_middle(program: str, tmp_path: Path) -> None:
    """Start `program`, which has an agent run READY; kill it there; nothing may be left within the promise."""
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=file, stderr=file, cwd=tmp_path
        ) as agent,
    ):
        try:
            deadline = time.monotonic() + 200
            while not _is_ready():
                assert agent.poll() is None, errors.read_text(errors="replace")[-4000:]
                assert time.monotonic() < deadline, errors.read_text(errors="replace")[-4000:]
                time.sleep(0.1)
        finally:
            agent.kill()
    began, stalls = time.monotonic(), Stalls(Path(os.environ["LOWTIDE_HOME"]))
    bound = PROMISED_SECONDS * FACTOR + OWN_SECONDS.get(os.environ["LOWTIDE_PROVIDER"], 0.0)
    while left := open_leases():
        took = time.monotonic() - began
        assert took < bound + stalls.seconds(), f"after {took:.1f} s: {left}"
        stalls.sleep(0.05)
    assert shown() == []


def _is_ready() -> bool:
    from lowtide import Sandbox, SandboxError

    for sandbox_id, _ in open_leases():
        with contextlib.suppress(SandboxError):
            box = Sandbox.from_id(sandbox_id, provider=os.environ["LOWTIDE_PROVIDER"]).result(60)
            if box.exists("/tmp/ready").result(60):
                return True
    return False


def page_runs(name: str, tmp_path: Path) -> None:
    """The example on the framework's page does what it says, as it stands there."""
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.S)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
