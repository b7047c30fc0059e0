"""docs/architecture.md names functions; each exists where the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = re.findall(
    r"^\| `([\w/]+\.py)` `([\w.]+)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
)


def _names(body: list[ast.stmt], prefix: str = "") -> set[str]:
    found = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found |= _names(node.body, f"{prefix}{node.name}.")
    return found


def test_the_page_has_its_three_walks() -> None:
    assert len(STEPS) >= 20


@pytest.mark.parametrize(("file", "name"), sorted(set(STEPS)))
def test_a_step_of_a_walk_exists(file: str, name: str) -> None:
    source = ROOT / "src/lowtide" / file
    assert name in _names(ast.parse(source.read_text()).body), f"{file} has no {name}"
