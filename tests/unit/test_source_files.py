"""One job per file: what no longer fits on a few screens has more than one."""

from __future__ import annotations

from pathlib import Path

import lowtide

MOST_LINES = 400


def test_no_source_file_is_too_long() -> None:
    root = Path(lowtide.__file__).parent
    lengths = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in root.rglob("*.py")}
    assert len(lengths) > 100
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}
