"""A type checker refuses what a closed set does not have, and takes all that it has: what an editor shows is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TAKEN = """
from pathlib import Path
from lowtide import Keep, Limits, Network, Sandbox, SandboxDefaults, SandboxState, Session

Sandbox(network="none", keep="never", isolation="gvisor")
Sandbox.run(network="internet", keep="on-failure", tags=["a"], ports=[80], working_dir=Path("/"))
SandboxDefaults(network=["pypi.org"], keep="always", resources=Limits())
Session(network=Network(), keep=Keep.ALWAYS).sandbox(network=("pypi.org:443",))
for name in (SandboxState.PENDING, SandboxState.GONE):
    Sandbox.list(status=name)
Sandbox.list(status="pending"), Sandbox.list(status="running"), Sandbox.list(status="paused")
Sandbox.list(status="stopped"), Sandbox.list(status="terminating"), Sandbox.list(status="completed")
Sandbox.list(status="failed"), Sandbox.list(status="terminated")
with Sandbox.run() as box:
    box.exec(["cat"], stdin=Path("f").open("rb"), cwd=Path("/")), box.exec(("true",), stdin=None)
    for line in box.exec(["ls"]).stdout.lines():
        print(line.strip())
    box.upload(Path("f"), Path("/f")).result().changed
"""
REFUSED = (
    'Sandbox(network="sometimes")',
    'Sandbox.run(network="sometimes")',
    'Sandbox.run(keep="sometimes")',
    'Sandbox.run(isolation="sometimes")',
    'Sandbox.run(networks="none")',
    'SandboxDefaults(network="sometimes")',
    'Session(keep="sometimes")',
    'Session().sandbox(network="sometimes")',
    'Sandbox.session(network="sometimes")',
    'Sandbox.list(status="sometimes")',
)


@pytest.mark.slow
def test_closed_sets_are_literals(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="pip install .[dev]")
    (tmp_path / "taken.py").write_text(TAKEN)
    for number, call in enumerate(REFUSED):
        (tmp_path / f"refused{number}.py").write_text(
            f"from lowtide import Sandbox, SandboxDefaults, Session\n{call}\n"
        )
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    settings = ["--cache-dir", ROOT / ".mypy_cache", "--config-file", ROOT / "pyproject.toml"]
    done = subprocess.run(
        [*mypy, *settings, *sorted(tmp_path.glob("*.py"))], cwd=ROOT, capture_output=True, text=True
    )
    found = {Path(line.partition(":")[0]).stem for line in done.stdout.splitlines() if ": error:" in line}
    assert found == {f"refused{number}" for number in range(len(REFUSED))}, done.stdout + done.stderr
