"""Runs the benchmarks, prints the tables, writes JSON. Says whether each limit is met and asserts nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from benchmarks import machine, page, rows, state
from benchmarks.measure import Comparison, Skipped


def main() -> None:
    arguments = _arguments()
    # lowtide reads its home when it is first used, so it is set before lowtide is imported.
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-", dir=arguments.directory))
    os.environ["LOWTIDE_HOME"] = str(home)
    facts = machine.facts()
    results: list[dict[str, Any]] = []
    try:
        for section, measures in rows.SECTIONS.items():
            for name, measure in measures.items():
                if arguments.only and name not in arguments.only:
                    continue
                print(f"measuring {name} ...", file=sys.stderr, flush=True)
                for row in _measured(name, measure, home, arguments):
                    results.append({**row, "section": section, "measure": name})
                    print(page.line(row), file=sys.stderr, flush=True)
    finally:
        state.end(home)
    if arguments.keep:
        results = _with_earlier(results, arguments.json)
    report = {"machine": facts, "results": results}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(page.tables(report))
    print(f"\nwritten to {arguments.json}")
    if arguments.page:
        page.write(report)
        print(f"written into {page.PAGE}")
    if any(row.get("outcome") == "failed" for row in results):
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=rows.NAMES, help="these rows only")
    parser.add_argument("--samples", type=int, default=100, help="samples of each side (default 100)")
    parser.add_argument(
        "--large-samples", type=int, default=50, help="samples of what takes long (default 50)"
    )
    parser.add_argument("--sandboxes", type=int, default=200, help="how many are alive at once (default 200)")
    parser.add_argument("--many", type=int, default=1000, help="how many against ten (default 1000)")
    parser.add_argument("--owned", type=int, default=500, help="how many the killed owner has (default 500)")
    results = Path(__file__).parent / "results" / "speed.json"
    parser.add_argument("--json", type=Path, default=results, help=f"default {results}")
    parser.add_argument("--directory", default=None, help="where the state and the large files go")
    parser.add_argument(
        "--keep", action="store_true", help="keep the rows of an earlier run that this one does not measure"
    )
    parser.add_argument("--page", action="store_true", help="put the tables into docs/performance.md")
    return parser.parse_args()


def _with_earlier(results: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    measured = {row["measure"] for row in results}
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    kept = [row for row in earlier if row.get("measure") not in measured]
    return sorted(results + kept, key=lambda row: rows.NAMES.index(row["measure"]))


def _measured(
    name: str, measure: rows.Measure, home: Path, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row that fails must not cost the others, which may have taken long."""
    try:
        measured = measure(home, arguments)
    except Skipped as reason:
        return [{"name": name, "outcome": "skipped", "why": str(reason)}]
    except Exception as error:
        traceback.print_exc()
        return [{"name": name, "outcome": "failed", "why": f"{type(error).__name__}: {error}"}]
    found = measured if isinstance(measured, list) else [measured]
    return [row.as_json() if isinstance(row, Comparison) else row for row in found]


if __name__ == "__main__":
    main()
