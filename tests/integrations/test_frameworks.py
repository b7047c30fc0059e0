"""Every agent framework's own suite against lowtide, each in a virtual environment of its own (scripts/framework_suites).

The environments are made on the first run and stay in the cache. What is not there yet and cannot be made, and what
needs a Python that is not on this machine, is skipped by name. LOWTIDE_FRAMEWORKS chooses: "local" (the default, and two
of them on E2B's emulator), "all" (all of them there, too; and OpenHands), or "off".
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/framework_suites"


def _frameworks() -> dict[str, tuple[str, str, list[str]]]:
    spec = spec_from_loader("framework_suites", SourceFileLoader("framework_suites", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))  # where it finds what it imports, as when it is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return dict(module.FRAMEWORKS)


FRAMEWORKS = _frameworks()
ON_E2B_TOO = ("pydantic-ai", "google-adk")
"""Ten seconds of processor time each. The others take half a minute to a minute and more there."""
WANTED = os.environ.get("LOWTIDE_FRAMEWORKS", "local")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(WANTED == "off", reason="LOWTIDE_FRAMEWORKS=off")
@pytest.mark.parametrize("provider", ["local", "e2b"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_frameworks_own_suite_passes(name: str, provider: str) -> None:
    if provider != "local" and WANTED != "all" and name not in ON_E2B_TOO:
        pytest.skip("only on local here: LOWTIDE_FRAMEWORKS=all, or scripts/framework_suites")
    if name == "openhands" and WANTED != "all":
        pytest.skip(
            "its server needs half a minute of processor time to start: scripts/framework_suites openhands"
        )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name, "--provider", provider], capture_output=True, text=True
    )
    if " not run: " in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]


@pytest.mark.parametrize("name", sorted({suite for suite, _, _ in FRAMEWORKS.values()}))
def test_each_framework_has_a_module_a_page_an_extra_a_kill_and_a_cancellation(name: str) -> None:
    page = {"inspect_ai": "inspect", "deepagents_code": "deepagents"}.get(name, name.replace("_", "-"))
    assert (ROOT / f"src/lowtide/integrations/{name}.py").exists()
    assert len((ROOT / f"docs/integrations/{page}.md").read_text().splitlines()) <= 40
    assert f"\n{page} = [" in (ROOT / "pyproject.toml").read_text()
    suite = (ROOT / f"tests/integrations/suites/suite_{name}.py").read_text()
    assert "killed_in_the_middle(" in suite
    assert (
        "suites.cancels import " in suite or name == "openhands"
    )  # whose calls go to a server in the sandbox
    assert "page_runs(" in suite or name in (
        "deepagents_code",
        "openhands",
    )  # the page is deepagents'; it needs a model


def test_no_integration_is_loaded_unless_used() -> None:
    program = (
        "import lowtide, lowtide.testing.plugin, sys; print([m for m in sys.modules if 'integrations' in m])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
