"""What lowtide made and this ledger does not know: listed, and ended one by one, only on a person's yes."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import click

from lowtide.cli import exit_codes
from lowtide.cli.text import duration, print_json, print_table
from lowtide.defaults import default_provider
from lowtide.engine import engine
from lowtide.errors import LowtideError
from lowtide.lifecycle.leases import lifecycle
from lowtide.providers import registry
from lowtide.providers.base import LABEL_PREFIX, Labels, Provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A sandbox with our full label set and without a row in this ledger."""

    sandbox_id: str
    ledger_id: str
    owner: str
    age_seconds: float | None
    tags: tuple[str, ...]


def ask_and_end(
    provider: str | None,
    *,
    tags: tuple[str, ...],
    older_than_seconds: float,
    dry_run: bool,
    as_json: bool,
) -> int:
    """List them; at a terminal (or with answers on standard input) ask about each."""
    place = registry.provider(provider or default_provider())
    found = [
        one
        for one in engine().run(_unknown(place, tags))
        if one.age_seconds is None or one.age_seconds >= older_than_seconds
    ]
    if as_json:
        print_json(
            [
                {
                    "provider": place.name,
                    "id": one.sandbox_id,
                    "ledger": one.ledger_id,
                    "owner": one.owner,
                    "age_seconds": one.age_seconds,
                    "tags": list(one.tags),
                }
                for one in found
            ]
        )
        return exit_codes.OK
    rows = [
        [
            one.sandbox_id,
            one.ledger_id,
            one.owner,
            "-" if one.age_seconds is None else duration(one.age_seconds),
            ",".join(one.tags),
        ]
        for one in found
    ]
    empty = f"this ledger knows everything that lowtide made on {place.name}"
    print_table(["id", "ledger", "owner", "age", "tags"], rows, empty=empty)
    if not found or dry_run:
        return exit_codes.OK
    print("Their owners may be alive: this ledger cannot tell. What you confirm is ended, the rest is left.")
    failed = False
    for one in found:
        if not _confirmed(one):
            continue
        try:
            ended = engine().run(lifecycle().destroy(place, one.sandbox_id))
            print(f"{one.sandbox_id} {'ended' if ended else 'already gone'}")
        except LowtideError as error:
            failed = True
            print(f"{one.sandbox_id} {error}")
    return exit_codes.ERROR if failed else exit_codes.OK


def _confirmed(one: Unknown) -> bool:
    try:
        return click.confirm(f"end {one.sandbox_id}?", default=False)
    except click.Abort:  # nobody there to answer, or Ctrl+C
        if not sys.stdin.isatty():
            return False
        raise


async def _unknown(place: Provider, tags: tuple[str, ...]) -> list[Unknown]:
    ledger = lifecycle().ledger
    found = []
    async for info in place.list({LABEL_PREFIX + f"tag-{tag}": "1" for tag in tags}):
        marks = Labels.from_dict(info.labels)
        if marks is None or await ledger.get(marks.lease_id) is not None:
            continue
        age = time.time() - info.created_at.timestamp() if info.created_at else None
        found.append(
            Unknown(
                sandbox_id=info.sandbox_id,
                ledger_id=marks.ledger_id,
                owner=marks.owner,
                age_seconds=age,
                tags=marks.tags,
            )
        )
    return found
