"""The pytest plugin as somebody else's test run sees it: fixtures, keep on failure, the leak check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LEAKS = """
from lowtide import Sandbox
held = []
def test_forgets_one():
    held.append(Sandbox.run(provider="local"))
    assert held[0].exec(["echo", "hi"]).result(60).stdout == "hi\\n"
def test_is_tidy():
    with Sandbox.run(provider="local") as box:
        box.exec(["true"]).result(60)
"""


@pytest.fixture
def run_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs pytest in a fresh interpreter and directory, with a state directory of its own."""
    monkeypatch.setenv("LOWTIDE_HOME", str(tmp_path / "home"))

    def run(code: str, *arguments: str, ini: str = "") -> subprocess.CompletedProcess[str]:
        place = tmp_path / "project"
        place.mkdir(exist_ok=True)
        (place / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
        (place / "test_it.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200, check=False)

    return run


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_sandbox_left_at_the_end_fails_the_run_and_names_the_test(run_pytest, arguments) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(LEAKS, *arguments)
    assert done.returncode == 1, done.stdout
    assert "2 passed, 1 error" in done.stdout
    assert "ERROR test_it.py::test_forgets_one - Failed: lowtide: left behind by" in done.stdout
    assert "sandboxes left by this run" in done.stdout
    assert "made during test_it.py::test_forgets_one" in done.stdout


def test_a_session_made_in_the_first_instant_of_a_test_is_that_tests(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(
        """
import pytest
from lowtide import Sandbox, Session
held = []
def test_warm():
    Sandbox.run(provider="local").stop().result(60)
@pytest.mark.parametrize("number", range(6))
def test_forgets(number):
    held.append(Session(provider="local"))
    held[-1].sandbox().start().result(60)
"""
    )
    assert "7 passed, 6 errors" in done.stdout, done.stdout


def test_only_the_run_fails_where_that_is_said(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(LEAKS, ini="lowtide_leaks = run")
    assert done.returncode == 1, done.stdout
    assert "2 passed in" in done.stdout
    assert "made during test_it.py::test_forgets_one" in done.stdout


def test_what_a_wider_fixture_holds_and_what_ends_by_itself_is_nobodys_leak(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(
        """
import pytest
from lowtide import Sandbox, Session
@pytest.fixture(scope="module")
def shared():
    with Sandbox.run(provider="local") as box:
        yield box
@pytest.fixture(scope="module")
def group():
    with Session(provider="local") as session:
        yield session
def test_first(shared):
    assert shared.exec(["echo", "hi"]).result(60).stdout == "hi\\n"
def test_made_late_in_a_session_of_the_module(group):
    group.sandbox().wait(60)
def test_its_end_is_under_way():
    Sandbox.run(provider="local").stop()
"""
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed in" in done.stdout


def test_what_was_given_up_while_it_started_is_nobodys_leak(run_pytest) -> None:  # type: ignore[no-untyped-def]
    """lowtide ends it in the background, and a test of a cancellation is over in the instant before that begins."""
    done = run_pytest(
        """
import asyncio
import pytest
from lowtide import Sandbox
async def use():
    async with Sandbox.run(provider="local"):
        await asyncio.sleep(60)
async def give_up(after):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(use(), after)
@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8, 12, 16, 20, 25, 30, 40, 50])
def test_cancelled(milliseconds):
    asyncio.run(give_up(milliseconds / 1000))
"""
    )
    assert "12 passed in" in done.stdout, done.stdout


def test_a_ledger_that_cannot_be_read_at_the_end_does_not_take_the_runs_report(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(
        """
import atexit, os, sqlite3
def rename(before, after):
    with sqlite3.connect(os.environ["LOWTIDE_HOME"] + "/ledger.db", timeout=30) as ledger:
        ledger.execute(f"ALTER TABLE {before} RENAME TO {after}")
def test_it(lowtide_session):
    lowtide_session.sandbox().start().result(60)
    lowtide_session.close().result(60)
    rename("lease", "elsewhere")
    atexit.register(rename, "elsewhere", "lease")
"""
    )
    assert done.returncode == 1, done.stdout
    assert "1 passed in" in done.stdout, done.stdout
    assert "whether anything is left cannot be told: cannot read the ledger" in done.stdout


def test_options_are_overridden_in_a_conftest_and_both_names_are_one_sandbox(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(
        """
import pytest
@pytest.fixture
def lowtide_options():
    return {"provider": "local", "environment_variables": {"WORD": "overridden"}}
def test_it(sandbox, lowtide_sandbox):
    assert sandbox is lowtide_sandbox
    assert sandbox.exec(["sh", "-c", "echo $WORD"]).result(60).stdout == "overridden\\n"
"""
    )
    assert done.returncode == 0, done.stdout


def test_emulators_serve_for_the_run_and_are_found_by_the_environment(run_pytest) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("e2b")
    done = run_pytest(
        """
import os
def test_it(emulators):
    assert os.environ["E2B_API_KEY"]
    from lowtide import Sandbox
    with Sandbox.run(provider="e2b") as box:
        assert box.exec(["echo", "hi"]).result(60).stdout == "hi\\n"
"""
    )
    assert done.returncode == 0, done.stdout


def test_leaks_can_be_a_warning_or_nothing(run_pytest) -> None:  # type: ignore[no-untyped-def]
    warned = run_pytest(LEAKS, ini="lowtide_leaks = warn")
    assert warned.returncode == 0
    assert "sandboxes left by this run" in warned.stdout
    silent = run_pytest(LEAKS, ini="lowtide_leaks = off")
    assert silent.returncode == 0
    assert "sandboxes left by this run" not in silent.stdout


def test_the_fixtures_give_sandboxes_that_end_with_the_test(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(
        """
import pytest
from lowtide import Sandbox
seen = []
@pytest.mark.sandbox(environment_variables={"WORD": "marked"}, tags=["fixture"])
def test_sandbox(sandbox):
    assert sandbox.exec(["sh", "-c", "echo $WORD"]).result(60).stdout == "marked\\n"
    seen.append(sandbox.sandbox_id)
def test_session(lowtide_session):
    one, two = lowtide_session.sandbox(), lowtide_session.sandbox()
    assert one.wait(60).sandbox_id != two.wait(60).sandbox_id
def test_gone():
    assert not [box for box in Sandbox.list(provider="local").result(60)]
""",
        "--lowtide-provider",
        "local",
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_a_failed_tests_sandbox_is_kept_when_asked(run_pytest) -> None:  # type: ignore[no-untyped-def]
    code = """
import pytest
from lowtide import Sandbox
@pytest.mark.sandbox(keep="on-failure", keep_for_seconds=60, tags=["failing"])
def test_fails(sandbox):
    sandbox.exec(["true"]).result(60)
    assert False
@pytest.mark.sandbox(keep="on-failure", keep_for_seconds=60, tags=["passing"])
def test_passes(sandbox):
    sandbox.exec(["true"]).result(60)
def test_what_is_left():
    left = Sandbox.list(provider="local").result(60)
    assert [box.tags for box in left] == [("failing",)]
    Sandbox.delete(left[0].sandbox_id).result(60)
"""
    done = run_pytest(code, "--lowtide-provider", "local")
    assert "1 failed, 2 passed" in done.stdout, done.stdout


def test_a_run_without_sandboxes_loads_nothing_of_lowtide_but_the_plugin(run_pytest) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(
        """
import sys
def test_modules():
    loaded = {name for name in sys.modules if name.split(".")[0] == "lowtide"}
    assert loaded <= {"lowtide", "lowtide._version", "lowtide.testing", "lowtide.testing.plugin"}, loaded
"""
    )
    assert done.returncode == 0, done.stdout


SUITE = """
from lowtide.testing import conformance as suite
globals().update(suite.tests(suite.ProviderUnderTest(name="{name}")))
"""


@pytest.mark.parametrize("name", ["local", "kubernetes"])
def test_the_suite_of_a_provider_has_what_it_declares_or_the_refusal(run_pytest, name: str) -> None:  # type: ignore[no-untyped-def]
    done = run_pytest(SUITE.format(name=name), "--collect-only", "--strict-markers", "-p", "no:timeout")
    assert done.returncode == 0, done.stdout
    assert "::test_exit_code_is_the_commands_own" in done.stdout
    assert ("::test_pause_and_resume_keep_files" in done.stdout) == (name == "local")
    assert ("refused_before_anything_is_created[pause]" in done.stdout) == (name == "kubernetes")
    assert "refused_before_anything_is_created[stdin]" not in done.stdout
