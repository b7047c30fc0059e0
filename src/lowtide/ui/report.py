"""The report: how many sandboxes ran, for how long, what they cost, and what clean-up saved.

Everything comes from the ledger: each lease with the time it began and the time its sandbox was confirmed gone.
Costs are estimates from the price table (`prices`). "Saved" counts sandboxes whose owner died: the time from the end
that another lowtide process made to the end that the provider's own lifetime would have made.
"""

from __future__ import annotations

import csv
import html
import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lowtide.lifecycle.lease import Lease, LeaseState
from lowtide.lifecycle.ledger import HistoryLine, Ledger
from lowtide.ui.prices import Prices

GROUPS = ("provider", "tag", "day")
HEADS = ("sandboxes", "still open", "hours", "cost", "orphans cleaned up", "hours saved", "cost saved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One sandbox from its lease to its confirmed end. Times are Unix seconds."""

    provider: str
    tags: tuple[str, ...]
    began_at: float
    ended_at: float | None
    """None while the sandbox may still exist."""
    rescued_seconds: float | None
    """How much longer the provider would have billed, where another process ended it for a dead owner."""

    def seconds(self, now: float) -> float:
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.began_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The sums of one group, or of everything."""

    name: str
    sandboxes: int
    open: int
    hours: float
    cost: float | None
    """None where no provider of the group has a price."""
    orphans: int
    saved_hours: float
    saved_cost: float | None


async def lives(ledger: Ledger, *, since: float, tags: Sequence[str] = ()) -> list[Life]:
    """Every sandbox that existed at or after `since`."""
    found = []
    for lease in await ledger.leases(states=tuple(LeaseState), tags=tags):
        life = _life(lease, await ledger.history(lease.lease_id))
        if life is not None and (life.ended_at is None or life.ended_at >= since):
            found.append(life)
    return found


def _life(lease: Lease, history: Sequence[HistoryLine]) -> Life | None:
    if lease.sandbox_id is None and lease.state is LeaseState.GONE:
        return None  # nothing was ever created
    ended = next((line for line in reversed(history) if line.after is LeaseState.GONE), None)
    released = next((line for line in reversed(history) if line.after is LeaseState.HANDED_OVER), None)
    end = ended or (released if lease.state is LeaseState.HANDED_OVER else None)
    return Life(
        provider=lease.provider,
        tags=lease.tags,
        began_at=lease.created_at,
        ended_at=end.at if end is not None else None,
        rescued_seconds=_rescued_seconds(lease, ended),
    )


def _rescued_seconds(lease: Lease, ended: HistoryLine | None) -> float | None:
    # Another process confirmed the end, and the owner is proven dead: it did not end its sandbox itself.
    if ended is None or ended.pid == lease.owner.pid or lease.owner.alive() is not False:
        return None
    planned = lease.expires_at if lease.expires_at is not None else lease.max_lifetime_at
    return max(0.0, planned - ended.at) if planned is not None else 0.0


def summarise(
    found: Iterable[Life], *, by: str, prices: Prices, since: float, now: float | None = None
) -> list[Line]:
    """One line per group, the most expensive first, days in order; and the sum of all as the last line.

    A sandbox with several tags counts in each of their lines, so these can add up to more than the sum.
    """
    moment = time.time() if now is None else now
    everything = list(found)
    groups: dict[str, list[Life]] = {}
    for life in everything:
        for name in _groups(life, by):
            groups.setdefault(name, []).append(life)
    lines = [_line(name, members, prices, since, moment) for name, members in groups.items()]
    if by == "day":
        lines.sort(key=lambda line: line.name)
    else:
        lines.sort(key=lambda line: (-(line.cost or 0.0), -line.hours, line.name))
    return [*lines, _line("total", everything, prices, since, moment)]


def _groups(life: Life, by: str) -> Iterable[str]:
    if by == "provider":
        return (life.provider,)
    if by == "tag":
        return life.tags or ("(no tag)",)
    return (datetime.fromtimestamp(life.began_at, UTC).date().isoformat(),)


def _line(name: str, members: Sequence[Life], prices: Prices, since: float, now: float) -> Line:
    def paid(life: Life) -> float:
        """Its seconds within the period."""
        began = max(life.began_at, since)
        return max(0.0, (now if life.ended_at is None else life.ended_at) - began)

    rescued = [life for life in members if life.rescued_seconds is not None]
    return Line(
        name=name,
        sandboxes=len(members),
        open=sum(life.ended_at is None for life in members),
        hours=sum(map(paid, members)) / 3600,
        cost=_sum(prices.cost(life.provider, paid(life)) for life in members),
        orphans=len(rescued),
        saved_hours=sum(life.rescued_seconds or 0.0 for life in rescued) / 3600,
        saved_cost=_sum(prices.cost(life.provider, life.rescued_seconds or 0.0) for life in rescued),
    )


def _sum(costs: Iterable[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def cells(line: Line, currency: str) -> list[str]:
    """The line for a table, under `HEADS`."""

    def money(amount: float | None) -> str:
        return (
            "-"
            if amount is None
            else f"{amount:,.4f} {currency}"
            if amount < 1
            else f"{amount:,.2f} {currency}"
        )

    return [
        str(line.sandboxes),
        str(line.open),
        f"{line.hours:,.2f}",
        money(line.cost),
        str(line.orphans),
        f"{line.saved_hours:,.2f}",
        money(line.saved_cost),
    ]


def as_dict(line: Line) -> dict[str, Any]:
    """The line for JSON and CSV."""
    return {
        "name": line.name,
        "sandboxes": line.sandboxes,
        "open": line.open,
        "hours": round(line.hours, 4),
        "cost": None if line.cost is None else round(line.cost, 6),
        "orphans_cleaned_up": line.orphans,
        "hours_saved": round(line.saved_hours, 4),
        "cost_saved": None if line.saved_cost is None else round(line.saved_cost, 6),
    }


def as_csv(lines: Sequence[Line], by: str) -> str:
    """The lines with a header; the first column is named after the grouping."""
    text = io.StringIO()
    rows = [as_dict(line) for line in lines]
    writer = csv.writer(text)
    writer.writerow([by, *list(rows[0])[1:]])
    for row in rows:
        # A spreadsheet would run a name that begins like a formula.
        name = f"'{row['name']}" if row["name"][:1] in "=+-@\t\r" else row["name"]
        writer.writerow([name, *list(row.values())[1:]])
    return text.getvalue()


def as_html(lines: Sequence[Line], *, by: str, currency: str, period: str) -> str:
    """A page of its own, without scripts or outside resources: the table, and hours by group as a plot."""
    heads = "".join(f"<th scope=col>{head}</th>" for head in (by, *HEADS))
    body = "".join(
        f"<tr{' class=total' if number == len(lines) - 1 else ''}><th scope=row>{html.escape(line.name)}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(line, currency))
        + "</tr>"
        for number, line in enumerate(lines)
    )
    return _PAGE.format(
        title=f"lowtide report by {html.escape(by)}",
        period=html.escape(period),
        plot=plot(lines[:-1], measure=lambda line: line.hours, label="hours"),
        heads=heads,
        body=body,
    )


def plot(lines: Sequence[Line], *, measure: Callable[[Line], float], label: str) -> str:
    """Horizontal bars as an inline SVG; at most 40 groups."""
    shown = lines[:40]
    most = max((measure(line) for line in shown), default=0.0) or 1.0
    bars = []
    for number, line in enumerate(shown):
        y, width = number * 26, 420 * measure(line) / most
        name = line.name if len(line.name) <= 28 else line.name[:27] + "…"
        bars.append(
            f'<text x="190" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="200" y="{y + 4}" width="{max(1.0, width):.1f}" height="18" rx="3"/>'
            f'<text x="{206 + width:.1f}" y="{y + 17}">{measure(line):,.2f}</text>'
        )
    height = max(26, 26 * len(shown))
    return (
        f'<svg viewBox="0 0 720 {height}" role="img" aria-label="{html.escape(label)} by group" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(bars)}</svg>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; font: 15px system-ui, sans-serif }}
body {{ margin: 2rem auto; max-width: 62rem; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }}
th, td {{ padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #8884 }}
th[scope=row], th:first-child {{ text-align: left }}
.total > * {{ font-weight: 700; border-top: 2px solid #8888 }}
svg {{ width: 100%; height: auto; margin: 1rem 0 }} svg rect {{ fill: #2a8ca6 }} svg text {{ font-size: 13px; fill: currentColor }}
</style></head><body><h1>{title}</h1><p>{period}. Costs are estimates at list prices.</p>{plot}
<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></body></html>
"""
