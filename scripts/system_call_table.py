"""Writes the system-call table into docs/security.md from the filter's own. `--check` only says whether it is current."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from lowtide.providers.local.system_calls import CONDITIONS, GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- system calls: begin -->", "<!-- system calls: end -->"


def table() -> str:
    lines = ["| refused | answer | why |", "|---|---|---|"]
    for group in GROUPS:
        names = ", ".join(f"`{name}`" for name in group.calls)
        lines.append(f"| {names} | {errno.errorcode[group.answer]} | {group.reason} |")
    lines += ["", "| of this call | is refused | why |", "|---|---|---|"]
    lines += [f"| `{one.call}` | {one.refused} | {one.reason} |" for one in CONDITIONS]
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
    elif new != text:
        raise SystemExit("docs/security.md is not current: run scripts/system_call_table.py")


if __name__ == "__main__":
    main()
