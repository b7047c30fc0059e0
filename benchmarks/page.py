"""The report as people read it: one table for each section, and the page that shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_HEAD = "| what | against | lowtide | raw | ratio | at most | met |\n|---|---|---|---|---|---|---|"


def tables(report: dict[str, Any]) -> str:
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in report["results"]:
        sections.setdefault(row["section"], []).append(row)
    return "\n\n".join(f"### {title}\n\n{table(rows)}" for title, rows in sections.items())


def table(rows: list[dict[str, Any]]) -> str:
    lines = [_HEAD] if any("why" not in row for row in rows) else []
    for row in rows:
        if "why" in row:
            continue
        ours, raw = (_amount(row[side], row["unit"]) for side in ("ours", "raw"))
        met = "yes" if row["met"] else "**no**"
        cells = (row["what"], row["against"], ours, raw, _ratio(row), _limit(row), met)
        lines.append(f"| {' | '.join(cells)} |")
    left_out = [f"- `{row['name']}` {row['outcome']}: {row['why']}" for row in rows if "why" in row]
    return "\n".join([*lines, *([""] if lines and left_out else []), *left_out])


def write(report: dict[str, Any]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(report)}\n\n{_about(report)}\n{END}{after}")


def line(row: dict[str, Any]) -> str:
    if "why" in row:
        return f"  {row['name']}: {row['outcome']}: {row['why']}"
    words = "" if row["met"] else ", not met"
    measured = _ratio(row) if row["ratio"] is not None else _amount(row["ours"], row["unit"])
    return f"  {row['name']}: {measured} (at most {_limit(row)}{words})"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f}x" if row["ratio"] is not None else "—"


def _limit(row: dict[str, Any]) -> str:
    limits = [f"{row['limit']:g}x"] if row["limit"] is not None else []
    if row["at_most"] is not None:
        limits.append(f"{row['at_most']:,.0f} {row['unit']}")
    return " or ".join(limits)


def _amount(summary: dict[str, Any] | None, unit: str) -> str:
    if summary is None:
        return "—"
    value = summary["median"]
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.{2 if value >= 0.1 else 4}f} {unit}"


def _about(report: dict[str, Any]) -> str:
    facts = report["machine"]
    samples = [row["ours"]["samples"] for row in report["results"] if "why" not in row]
    counts = f"Medians of {min(samples)} to {max(samples)} samples." if samples else ""
    return (
        f"{facts['processor']}, {facts['processors']} processors, {facts['memory_mb']} MB; Linux {facts['kernel']}; "
        f"Python {facts['python']}; as {facts['user']}; {facts['date']}; "
        f"load at the start {facts['load']}. {counts}"
    ).rstrip()
