"""`lowtide top`: the table, its keys and what they do, with live sandboxes and with a thousand rows."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest.importorskip("textual")

from textual.pilot import Pilot
from textual.widgets import DataTable, Input, RichLog, Static

from lowtide import Sandbox
from lowtide.lifecycle.lease import Lease
from lowtide.ui import prices
from lowtide.ui.fleet import Fleet
from lowtide.ui.top import Page, Question, Top

SIZE = (80, 24)


def top(*tags: str) -> Top:
    return Top(Fleet(tags=tags, ended=0), prices.load())


def lines(app: Top) -> list[list[str]]:
    table = app.query_one(DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


def summary(app: Top) -> str:
    return str(app.query_one("#summary", Static).render())


async def settled(pilot: Pilot[None], found: Callable[[], bool]) -> None:
    """Wait until the view shows it, for as long as a busy machine may take."""
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end, (summary(pilot.app), lines(pilot.app))  # type: ignore[arg-type]
        await pilot.pause(0.05)


async def test_a_thousand_rows_are_shown_filtered_grouped_and_read_again_without_a_change(
    fill: Callable[[int], list[Lease]],
) -> None:
    fill(1000)
    app = top()
    async with app.run_test(size=SIZE) as pilot:
        await settled(pilot, lambda: app.query_one(DataTable).row_count == 1000)
        assert "1000 sandboxes" in summary(app)
        await pilot.press("slash", *"job-7")
        await settled(pilot, lambda: app.query_one(DataTable).row_count == 100)
        await pilot.press("enter", "g", "g", "g")
        await settled(pilot, lambda: lines(app)[0][0] == "job-7 (100)")


async def test_hostile_tags_and_ids_cannot_write_escapes(fill: Callable[[int], list[Lease]]) -> None:
    from lowtide.ui.top import printable

    assert "\x1b" not in printable("\x1b]0;owned\x07 [b]bold[/b]")
    fill(1)
    app = top()
    async with app.run_test(size=SIZE) as pilot:
        app.query_one(Input).value = "[red]\x1b[31m"
        await pilot.pause()
        assert "\x1b" not in summary(app)


async def test_a_live_sandbox_is_shown_with_its_history_and_stopped_after_a_question() -> None:
    async with Sandbox.run(tags=["seen-in-top"]) as sandbox:
        await sandbox.exec(["true"])
        app = top("seen-in-top")
        async with app.run_test(size=SIZE) as pilot:
            await settled(pilot, lambda: len(lines(app)) == 1)
            assert lines(app)[0][1:3] == ["local", "running"]
            await pilot.press("enter")
            await settled(pilot, lambda: isinstance(app.screen, Page))
            await settled(pilot, lambda: "live" in str(app.screen.query_one(RichLog).lines))
            await pilot.press("escape", "s")
            await settled(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press("n")
            await pilot.pause()
            assert len(lines(app)) == 1
            await pilot.press("s")
            await settled(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press("y")
            await settled(pilot, lambda: lines(app) == [])


async def test_what_cannot_be_done_is_a_notice_and_not_the_end(fill: Callable[[int], list[Lease]]) -> None:
    fill(1)
    app = top("job-0")
    async with app.run_test(size=SIZE) as pilot:
        await settled(pilot, lambda: len(lines(app)) == 1)
        await pilot.press("k")  # nothing stands behind the lease
        await settled(pilot, lambda: any("faulty-0000" in notice.message for notice in app._notifications))
        assert app.is_running


async def test_a_kept_sandbox_survives_its_block_and_is_stopped_from_the_view() -> None:
    async with Sandbox.run(tags=["kept-in-top"]) as sandbox:
        await sandbox.exec(["true"])
        app = top("kept-in-top")
        async with app.run_test(size=SIZE) as pilot:
            await settled(pilot, lambda: len(lines(app)) == 1)
            await pilot.press("k")
            await settled(pilot, lambda: lines(app)[0][2] == "kept")
            await pilot.press("s")
            await settled(pilot, lambda: isinstance(app.screen, Question))
            await pilot.press("y")
            await settled(pilot, lambda: lines(app) == [])
