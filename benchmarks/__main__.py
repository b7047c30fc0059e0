"""Runs the benchmarks, prints the table, writes JSON. Says whether each limit is met and asserts nothing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
NAMES = ("life", "exec", "memory", "import", "transfer", "image")


def main() -> None:
    arguments = _arguments()
    # lowtide reads its home when it is first used, so it is set before lowtide is imported.
    home = Path(tempfile.mkdtemp(prefix="lowtide-bench-", dir=arguments.directory))
    os.environ["LOWTIDE_HOME"] = str(home)
    facts = machine.facts()
    rows = []
    try:
        for name in arguments.only or NAMES:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            rows.append(_measure(name, home, arguments).as_json())
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    finally:
        _end(home)
    report = {"machine": facts, "results": rows}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nwritten to {arguments.json}")
    if arguments.page:
        _write_page(report)
        print(f"written into {PAGE}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=NAMES, help="these rows only")
    parser.add_argument("--samples", type=int, default=100, help="samples of each side (default 100)")
    parser.add_argument(
        "--large-samples", type=int, default=50, help="samples of the large file (default 50)"
    )
    parser.add_argument("--sandboxes", type=int, default=200, help="how many are alive at once (default 200)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "speed.json")
    parser.add_argument("--directory", default=None, help="where the state and the large files go")
    parser.add_argument("--page", action="store_true", help="put the table into docs/performance.md")
    return parser.parse_args()


def _measure(name: str, home: Path, arguments: argparse.Namespace) -> Any:
    from benchmarks import images, imports, life, memory, transfer

    measures: dict[str, Callable[[], Any]] = {
        "life": lambda: life.whole_life(home, arguments.samples),
        "exec": lambda: life.one_command(home, arguments.samples),
        "memory": lambda: memory.alive_at_once(home, arguments.sandboxes),
        "import": lambda: imports.import_sandbox(arguments.samples),
        "transfer": lambda: transfer.in_and_out(home, arguments.large_samples),
        "image": lambda: images.from_image(home, arguments.samples),
    }
    return measures[name]()


def _end(home: Path) -> None:
    """Let the helper processes go and remove the state directory."""
    if "lowtide.providers.registry" in sys.modules:
        from lowtide.engine import engine
        from lowtide.providers import registry

        engine().run(registry.aclose(), timeout=30.0)
    shutil.rmtree(home, ignore_errors=True)


def table(report: dict[str, Any]) -> str:
    lines = ["| what | against | lowtide | raw | ratio | at most | met |", "|---|---|---|---|---|---|---|"]
    for row in report["results"]:
        ours, raw = (_amount(row[side]["median"], row["unit"]) for side in ("ours", "raw"))
        met = "yes" if row["met"] else "**no**"
        lines.append(
            f"| {row['what']} | {row['against']} | {ours} | {raw} | {row['ratio']:.2f}x | {row['limit']}x | {met} |"
        )
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    return f"  {row['name']}: {row['ratio']:.2f}x (at most {row['limit']}x)"


def _amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def _write_page(report: dict[str, Any]) -> None:
    facts = report["machine"]
    samples = {row["name"]: row["ours"]["samples"] for row in report["results"]}
    about = (
        f"{facts['processor']}, {facts['processors']} processors, {facts['memory_mb']} MB; Linux {facts['kernel']}; "
        f"Python {facts['python']}; as {facts['user']}; {facts['date']}; "
        f"load at the start {facts['load']}. Medians of {min(samples.values())} to {max(samples.values())} samples."
    )
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(report)}\n\n{about}\n{END}{after}")


if __name__ == "__main__":
    main()
