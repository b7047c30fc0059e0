"""`lowtide top`: the fleet, live, in a terminal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any, ClassVar, TypeVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, RichLog, Static

from lowtide.engine import engine
from lowtide.errors import LowtideError
from lowtide.ui import actions
from lowtide.ui.fleet import Fleet, Row
from lowtide.ui.prices import Prices

T = TypeVar("T")

COLUMNS = ("id", "provider", "state", "owner", "age", "ends", "cost", "tags")
SORTS = ("age", "provider", "state", "owner", "ends", "cost", "tags", "id")
GROUPS = ("", "provider", "owner", "tag")
LEDGER_SECONDS = 1.0
PROVIDER_SECONDS = 5.0

_COLOURS = {
    "running": "green",
    "pending": "yellow",
    "paused": "cyan",
    "stopped": "cyan",
    "terminating": "yellow",
    "kept": "magenta",
    "failed": "red",
}


async def on_engine(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on lowtide's event loop and wait for it on this one."""
    return await asyncio.wrap_future(engine().submit(work))


def printable(text: str) -> str:
    """Without control characters: tags and messages can come from a sandbox, and terminals obey escapes."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


class Question(ModalScreen[bool]):
    """Asks before something is destroyed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Label(Text(self._text))
            yield Label("[b]y[/b] yes   [b]n[/b] no")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class Page(ModalScreen[None]):
    """Text over the table: the history of a lease, or a log that is followed."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self.following: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="page"):
            yield Label(Text(self._title, style="bold"))
            yield RichLog(wrap=True, max_lines=10_000)
            yield Label("[b]escape[/b] closes")

    def write(self, line: str) -> None:
        self.query_one(RichLog).write(Text(printable(line)))

    def on_unmount(self) -> None:
        if self.following is not None:
            self.following.cancel()


class Top(App[None]):
    """The table of sandboxes with what can be done to them."""

    TITLE = "lowtide top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    DataTable { height: 1fr; }
    #summary { height: 1; padding: 0 1; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    #problems { height: auto; color: $warning; padding: 0 1; }
    Question, Page { align: center middle; }
    .box { width: 60; max-width: 95%; height: auto; padding: 1 2; border: round $primary; background: $surface; }
    .page { width: 95%; height: 90%; padding: 0 1; border: round $primary; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter"),
        Binding("o", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("g", "group", "Group"),
        Binding("e", "ended", "Ended"),
        Binding("s", "stop", "Stop"),
        Binding("k", "keep(False)", "Keep"),
        Binding("a", "keep(True)", "Adopt"),
        Binding("h", "history", "History"),
        Binding("t", "shell", "Shell"),
        Binding("l", "logs", "Logs"),
    ]

    def __init__(self, fleet: Fleet, prices: Prices, *, ended: int = 200) -> None:
        super().__init__()
        self._fleet, self._prices, self._ended = fleet, prices, ended
        self._rows: list[Row] = []
        self._shown: list[Row | None] = []
        """What stands in each line of the table; None for the head of a group."""
        self._sort, self._reverse, self._group, self._words = "age", False, "", ""

    def compose(self) -> ComposeResult:
        yield Static("reading the ledger…", id="summary")
        yield DataTable(cursor_type="row", zebra_stripes=False)
        yield Input(placeholder="id, provider, state, owner or tag", id="filter")
        yield Static("", id="problems")
        yield Footer()

    async def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for name in COLUMNS:
            table.add_column(name, key=name)
        table.focus()
        await self._read()
        self.set_interval(LEDGER_SECONDS, self._read)
        self.run_worker(self._ask_providers(), exclusive=True, group="providers")

    async def on_unmount(self) -> None:
        await on_engine(self._fleet.aclose())

    # Reading.

    async def _read(self) -> None:
        try:
            self._rows = await on_engine(self._fleet.rows())
        except LowtideError as error:
            self.query_one("#summary", Static).update(Text(printable(str(error)), style="red"))
            return
        self._show()

    async def _ask_providers(self) -> None:
        while True:
            await on_engine(self._fleet.refresh())
            lines = [f"{name}: {printable(why)}" for name, why in sorted(self._fleet.problems.items())]
            self.query_one("#problems", Static).update(Text("\n".join(lines)))
            await asyncio.sleep(PROVIDER_SECONDS)

    # Showing.

    def _show(self) -> None:
        now = time.time()
        found = [row for row in self._rows if matches(row, self._words)]
        shown = arranged(
            found, sort=self._sort, reverse=self._reverse, group=self._group, prices=self._prices
        )
        table = self.query_one(DataTable)
        selected = self._selected()
        lines = [
            self._cells(one, now)
            if isinstance(one, Row)
            else (Text(one, style="bold reverse"),) + (Text(""),) * 7
            for one in shown
        ]
        while table.row_count > len(lines):
            table.remove_row(table.coordinate_to_cell_key(Coordinate(table.row_count - 1, 0)).row_key)
        for number, cells in enumerate(lines):
            if number >= table.row_count:
                table.add_row(*cells)
                continue
            for column, cell in enumerate(cells):
                place = Coordinate(number, column)
                if table.get_cell_at(place) != cell:
                    table.update_cell_at(place, cell, update_width=True)
        self._shown = [one if isinstance(one, Row) else None for one in shown]
        if selected is not None:
            again = next((n for n, one in enumerate(self._shown) if one and one.id == selected.id), None)
            if again is not None and again != table.cursor_row:
                table.move_cursor(row=again, animate=False)
        self._summarise(found)

    def _summarise(self, found: list[Row]) -> None:
        states: dict[str, int] = {}
        for row in found:
            states[row.state] = states.get(row.state, 0) + 1
        orphans = sum(row.open and row.owner_state == "dead" for row in found)
        spend = sum(cost_of(row, self._prices) or 0.0 for row in found)
        words = [f"{len(found)} sandboxes", *(f"{count} {state}" for state, count in sorted(states.items()))]
        words += [f"{orphans} orphans"] if orphans else []
        words += [f"{spend:.2f} {self._prices.currency}", f"by {self._sort}{' ↑' if self._reverse else ''}"]
        words += [f"grouped by {self._group}"] if self._group else []
        words += [f"filter: {self._words}"] if self._words else []
        self.query_one("#summary", Static).update(Text(printable(" · ".join(words))))

    def _cells(self, row: Row, now: float) -> tuple[Text, ...]:
        cost = cost_of(row, self._prices)
        owner_style = "red" if row.owner_state == "dead" and row.open else ""
        return (
            Text(printable(_short(row.id, 26 if self.size.width >= 110 else 10))),
            Text(printable(row.provider)),
            Text(row.state, style=_COLOURS.get(row.state, "dim")),
            Text(printable(row.owner_text), style=owner_style),
            Text(_duration(now - row.created_at) if row.created_at else "-", justify="right"),
            Text(_until(row.ends_at, now) if row.open else "-", justify="right"),
            Text("-" if cost is None else f"{cost:.4f}", justify="right"),
            Text(printable(" ".join(row.tags)) or "-"),
        )

    def _selected(self) -> Row | None:
        cursor = self.query_one(DataTable).cursor_row
        return self._shown[cursor] if 0 <= cursor < len(self._shown) else None

    # Keys.

    def action_filter(self) -> None:
        words = self.query_one("#filter", Input)
        words.add_class("shown")
        words.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._words = event.value
        self._show()

    def on_input_submitted(self) -> None:
        self.query_one("#filter").remove_class("shown")
        self.query_one(DataTable).focus()

    def action_sort(self) -> None:
        self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        self._show()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._show()

    def action_group(self) -> None:
        self._group = GROUPS[(GROUPS.index(self._group) + 1) % len(GROUPS)]
        self._show()

    async def action_ended(self) -> None:
        self._fleet.ended = 0 if self._fleet.ended else self._ended
        await self._read()

    def action_stop(self) -> None:
        row = self._selected()
        if row is None:
            return
        owner = (
            f" Its owner, process {row.owner.pid}, is alive."
            if row.owner and row.owner_state == "alive"
            else ""
        )
        self.push_screen(
            Question(f"Destroy {printable(row.id)} on {row.provider}?{owner}"),
            lambda yes: self._do(self._stop(row)) if yes else None,
        )

    async def _stop(self, row: Row) -> None:
        report = await on_engine(actions.stop(row))
        if report.error is not None:
            raise report.error
        self.notify(f"{printable(row.id)}: {str(report.outcome).replace('_', ' ')}", markup=False)

    def action_keep(self, take: bool) -> None:
        row = self._selected()
        if row is not None:
            self._do(self._keep(row, take))

    async def _keep(self, row: Row, take: bool) -> None:
        lease = await on_engine(actions.keep(row, take=take))
        self.notify(f"{printable(row.id)} is kept, {_until(lease.kept_until, time.time())}", markup=False)

    def on_data_table_row_selected(self) -> None:  # Enter belongs to the table
        self.action_history()

    def action_history(self) -> None:
        row = self._selected()
        if row is not None:
            self._do(self._history(row))

    async def _history(self, row: Row) -> None:
        lines = await on_engine(actions.history(row))
        page = Page(f"history of {printable(row.id)}")
        await self.push_screen(page)
        if not lines:
            page.write("This ledger has no lease for the sandbox: another machine or user created it.")
        for line in lines:
            moment = time.strftime("%H:%M:%S", time.localtime(line.at))
            page.write(
                f"{moment}  +{line.at - lines[0].at:9.3f} s  {line.after!s:12}  by {line.pid}  {line.why}"
            )

    def action_shell(self) -> None:
        row = self._selected()
        if row is None:
            return
        if not actions.can_be_entered(row):
            self.notify(
                f"{printable(row.id)} is {row.state}: no command can run in it",
                severity="warning",
                markup=False,
            )
            return
        with self.suspend():
            command = [sys.executable, "-m", "lowtide", "shell", "--provider", row.provider, row.id]
            subprocess.run(command, env=os.environ, check=False)

    def action_logs(self) -> None:
        row = self._selected()
        if row is not None:
            self._do(self._logs(row))

    async def _logs(self, row: Row) -> None:
        page = Page(f"log of {printable(row.id)}")
        await self.push_screen(page)
        page.following = asyncio.ensure_future(self._follow(row, page))

    async def _follow(self, row: Row, page: Page) -> None:
        from lowtide.sandbox import Sandbox

        try:
            sandbox = await Sandbox.from_id(row.id, provider=row.provider)
            async for chunk in sandbox.stream_logs(follow=True, tail_lines=1000):
                for line in chunk.splitlines():
                    page.write(line)
        except LowtideError as error:
            page.write(str(error))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run an action beside the display; its failure is a notice, not the end of the view."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.notify(printable(str(error)), severity="error", timeout=10, markup=False)
            await self._read()

        self.run_worker(guarded())


def matches(row: Row, words: str) -> bool:
    """Whether every word is part of the row's id, provider, state, owner or one of its tags."""
    text = " ".join((row.id, row.provider, row.state, row.owner_text, *row.tags)).lower()
    return all(word in text for word in words.lower().split())


def cost_of(row: Row, prices: Prices) -> float | None:
    """The estimated cost of an open sandbox so far."""
    if not row.open or row.created_at is None:
        return None
    return prices.cost(row.provider, time.time() - row.created_at)


def arranged(
    found: Iterable[Row], *, sort: str, reverse: bool, group: str, prices: Prices
) -> list[Row | str]:
    """The rows in order; with a group, below a head that says how many it has."""
    keys: dict[str, Any] = {
        "age": lambda row: row.created_at or 0.0,
        "provider": lambda row: row.provider,
        "state": lambda row: row.state,
        "owner": lambda row: (row.owner_state, row.owner.pid if row.owner else 0),
        "ends": lambda row: row.ends_at or float("inf"),
        "cost": lambda row: -(cost_of(row, prices) or 0.0),
        "tags": lambda row: row.tags,
        "id": lambda row: row.id,
    }
    ordered = sorted(found, key=keys[sort], reverse=reverse)
    if not group:
        return list(ordered)
    groups: dict[str, list[Row]] = {}
    for row in ordered:
        names = (
            row.tags or ("no tag",)
            if group == "tag"
            else (row.provider if group == "provider" else row.owner_text,)
        )
        for name in names:
            groups.setdefault(name, []).append(row)
    lines: list[Row | str] = []
    for name in sorted(groups):
        lines += [f"{printable(name)} ({len(groups[name])})", *groups[name]]
    return lines


def _short(identity: str, width: int) -> str:
    """The end of an id: ids begin with the time they were made, so the end tells one from its siblings."""
    return identity if len(identity) <= width else "…" + identity[1 - width :]


def _duration(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds / divisor)} {unit}"
    return f"{int(seconds / 86_400)} d"


def _until(moment: float | None, now: float) -> str:
    if moment is None:
        return "-"
    return f"in {_duration(moment - now)}" if moment > now else "overdue"
