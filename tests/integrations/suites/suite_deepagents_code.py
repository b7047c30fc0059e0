"""deepagents-code finds lowtide by its entry point, makes, reuses and deletes sandboxes; a kill -9 or SIGTERM leaves none."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepagents_code.integrations.sandbox_factory import create_sandbox
from deepagents_code.integrations.sandbox_provider import SandboxNotFoundError

from lowtide.integrations.deepagents_code import WORKING_DIR, LowtideProvider
from tests.integrations.suites.cancels import interrupted
from tests.integrations.suites.kills import READY, killed_in_the_middle, shown
from tests.integrations.suites.own_home import PROVIDER


def test_it_is_found_and_the_sandbox_ends_with_its_block() -> None:
    with create_sandbox("lowtide", params={"provider": PROVIDER}) as backend:
        assert backend.execute("pwd").output == f"{WORKING_DIR}\n"
        assert [row["id"] for row in shown()] == [backend.id]
        with create_sandbox("lowtide", sandbox_id=backend.id) as again:
            assert again.id == backend.id
    assert shown() == []


def test_ctrl_c_in_the_middle_of_a_command_ends_it() -> None:
    with create_sandbox("lowtide", params={"provider": PROVIDER}) as backend:
        interrupted(backend.execute)
        assert backend.execute("echo next").output == "next\n"


def test_one_that_does_not_exist_is_an_error_and_never_made() -> None:
    with pytest.raises(SandboxNotFoundError):
        LowtideProvider().get_or_create(sandbox_id="no-such-sandbox")
    LowtideProvider().delete(sandbox_id="no-such-sandbox")


def test_kill_dash_nine_leaves_nothing(tmp_path: Path) -> None:
    killed_in_the_middle(
        f"""
        from deepagents_code.integrations.sandbox_factory import create_sandbox
        with create_sandbox("lowtide") as backend:
            backend.execute({READY!r})
        """,
        tmp_path,
    )
