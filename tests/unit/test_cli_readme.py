"""The README keeps its word: the quickstart is short and runs, the commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cli_process import Cli, cli  # noqa: F401 (fixture)

from lowtide.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_the_quickstart_has_at_most_twenty_lines_and_runs(cli: Cli) -> None:  # noqa: F811
    (program,) = _blocks("README.md", "python")
    assert len(program.strip().splitlines()) <= 20
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=cli.environ, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:4] == ["hello", "", "45", "0"]
    assert len(set(done.stdout.split()[3:])) == 3


def test_every_command_the_pages_show_exists() -> None:
    for page in ("README.md", "docs/quickstart.md", "docs/cli.md"):
        for block in _blocks(page, "sh"):
            for name in re.findall(r"(?:^|\| )lowtide (\w+)", block, re.M):
                assert name in COMMANDS, (page, name)


def test_every_make_target_the_pages_show_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for page in ("README.md", "CONTRIBUTING.md", "docs/quickstart.md"):
        shown = set(re.findall(r"^make (\w+)", (ROOT / page).read_text(), re.M))
        assert shown <= targets, page


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
