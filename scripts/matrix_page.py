"""Puts crash matrix results into docs/reliability.md: matrix_page.py RUN.json [RUN.json …]

Each file is what one `make crash` wrote (LOWTIDE_CRASH_JSON); the page shows their sum.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
COUNTS = ("cases", "leaks", "wrongly ended", "rows lost", "other")


def main(paths: list[str]) -> None:
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(
        lambda: {**dict.fromkeys(COUNTS, 0), "slowest": 0.0}
    )
    for path in paths:
        for result in json.loads(Path(path).read_text()):
            row = rows[result["group"].replace("_", " "), result["provider"]]
            for count in COUNTS:
                row[count] += result[count]
            row["slowest"] = max(row["slowest"], result["slowest"])
    lines = [
        f"Sum of {len(paths)} runs." if len(paths) > 1 else "One run.",
        "",
        "| group | provider | cases | leaks | wrongly ended | rows lost | other failures | slowest clean-up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (group, provider), row in sorted(rows.items()):
        counts = " | ".join(str(row[count]) for count in COUNTS)
        lines.append(f"| {group} | {provider} | {counts} | {row['slowest']:.1f} s |")
    total = {count: sum(row[count] for row in rows.values()) for count in COUNTS}
    counts = " | ".join(f"**{total[count]}**" for count in COUNTS)
    lines.append(f"| **all** | | {counts} | **{max(row['slowest'] for row in rows.values()):.1f} s** |")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
