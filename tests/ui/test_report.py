"""`lowtide report` and the price table: sums, groups, formats, hostile names, and what clean-up saved."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import ValidationError
from lowtide.ui import prices, report
from lowtide.ui.report import Life

HOUR = 3600.0
NOW = 1_800_000_000.0


def life(
    provider: str = "e2b", *, hours: float = 1.0, tags: tuple[str, ...] = (), saved: float | None = None
) -> Life:
    return Life(
        provider=provider,
        tags=tags,
        began_at=NOW - hours * HOUR,
        ended_at=NOW,
        rescued_seconds=saved,
    )


def test_hours_costs_and_savings_are_added_up_by_group() -> None:
    found = [
        life(hours=2, tags=("a", "b")),
        life(hours=1, tags=("a",), saved=HOUR / 2),
        life("nowhere", hours=3),
    ]
    table = prices.load({})
    hour = table.providers["e2b"].hour
    assert hour == pytest.approx(2 * 0.0504 + 0.5 * 0.0162)
    by_tag = {line.name: line for line in report.summarise(found, by="tag", prices=table, since=0, now=NOW)}
    assert (by_tag["a"].sandboxes, by_tag["a"].hours, by_tag["b"].hours) == (2, 3.0, 2.0)
    assert by_tag["a"].cost == pytest.approx(3 * hour)
    assert by_tag["a"].saved_cost == pytest.approx(hour / 2)
    assert by_tag["(no tag)"].cost is None  # no price is not a price of nothing
    assert by_tag["total"].sandboxes == 3
    assert by_tag["total"].hours == pytest.approx(6.0)


def test_only_hours_within_the_period_count() -> None:
    (line, _) = report.summarise(
        [life(hours=10)], by="provider", prices=prices.load({}), since=NOW - HOUR, now=NOW
    )
    assert line.hours == pytest.approx(1.0)


def test_a_name_from_a_sandbox_is_neither_markup_nor_a_formula() -> None:
    hostile = '=HYPERLINK("x")<script>alert(1)</script>'
    lines = report.summarise([life(tags=(hostile,))], by="tag", prices=prices.load({}), since=0, now=NOW)
    page = report.as_html(lines, by="tag", currency="USD", period="ever")
    assert "<script>" not in page
    rows = list(csv.reader(io.StringIO(report.as_csv(lines, "tag"))))
    assert rows[1][0] == "'" + hostile


def test_own_prices_replace_and_add(tmp_path: Path) -> None:
    own = tmp_path / "prices.json"
    size = {"vcpu": 1, "memory_gib": 1}
    own.write_text(
        json.dumps({"currency": "USD", "providers": {"docker": {"vcpu_hour": 0.5, "default_size": size}}})
    )
    table = prices.load({prices.PRICES: str(own)})
    assert table.cost("docker", HOUR) == 0.5
    assert table.cost("e2b", HOUR) == prices.load({}).cost("e2b", HOUR)
    assert table.cost("unheard-of", HOUR) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"providers": {"x": {"vcpu_hour": -1, "default_size": {}}}}', '{"providers": {"x": 1}}'],
)
def test_a_mistake_in_the_own_prices_is_named(tmp_path: Path, text: str) -> None:
    own = tmp_path / "prices.json"
    own.write_text(text)
    with pytest.raises(ValidationError, match=r"prices\.json"):
        prices.load({prices.PRICES: str(own)})


KILLED = """
import os, signal
from lowtide import Sandbox
Sandbox.run(tags=["killed"], max_lifetime_seconds=7200).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_sandbox_of_a_killed_owner_is_reported_as_saved(tmp_path: Path) -> None:
    environ = {**os.environ, "LOWTIDE_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environ, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    lowtide = [sys.executable, "-m", "lowtide"]
    subprocess.run([*lowtide, "sweep"], env=environ, timeout=120, check=True, stdout=subprocess.DEVNULL)
    shown = subprocess.run(
        [*lowtide, "report", "--json", "--by", "tag"],
        env=environ,
        timeout=120,
        check=True,
        stdout=subprocess.PIPE,
    )
    (line, total) = json.loads(shown.stdout)["lines"]
    assert (line["name"], line["orphans_cleaned_up"], line["open"]) == ("killed", 1, 0)
    assert 1.5 < line["hours_saved"] <= 2.0
    assert total["sandboxes"] == 1
