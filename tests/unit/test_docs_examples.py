"""The pages keep their word: every Python example on them runs, and the API page leaves nothing out."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import lowtide

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "api.md",
    "integrations/mcp.md",
    "local.md",
    "migrate-from-cwsandbox.md",
    "network.md",
    "quickstart.md",
    "runtimes.md",
    "testing.md",
    "what-if-my-process-dies.md",
)


def _examples() -> list[object]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
        found += [pytest.param(block, id=f"{page}-{number}") for number, block in enumerate(blocks, 1)]
    return found


@pytest.mark.parametrize("program", _examples())
def test_the_example_runs(program: str, tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    (tmp_path / "example.py").write_text(program)  # in a file, where a function's source can be read
    done = subprocess.run(
        [sys.executable, "-W", "error", "example.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def _public() -> list[str]:
    held = (
        lowtide.Sandbox,
        lowtide.Session,
        lowtide.Process,
        lowtide.TerminalSession,
        lowtide.Operation,
        lowtide.StreamWriter,
        lowtide.SandboxDefaults,
    )
    names = {name for cls in held for name in dir(cls) if not name.startswith("_")}
    names -= {"send", "throw"}  # what asyncio calls, so that an operation is a coroutine to it
    for record in (
        lowtide.EndReport,
        lowtide.Transfer,
        lowtide.FileEntry,
        lowtide.Url,
        lowtide.CodeResult,
        lowtide.SandboxDefaults,
    ):
        names |= {field.name for field in dataclasses.fields(record)}
    return sorted(names | set(lowtide.__all__))


@pytest.mark.parametrize("name", _public())
def test_the_api_page_names_it(name: str) -> None:
    assert re.search(rf"(?<!\w){name}(?!\w)", (DOCS / "api.md").read_text())


@pytest.mark.parametrize("name", [name for name in lowtide.__all__ if name[0].isupper()])
def test_it_and_what_it_can_do_have_docstrings(name: str) -> None:
    cls = getattr(lowtide, name)
    assert inspect.getdoc(cls)
    kinds = (property, classmethod, types.FunctionType)
    own = [key for key, member in vars(cls).items() if key[0] != "_" and isinstance(member, kinds)]
    assert [key for key in own if not inspect.getdoc(getattr(cls, key))] == []
