"""`lowtide forget`: settle by hand what lowtide can no longer destroy, because its account cannot be asked."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from lowtide.cli.parameters import complete_ids, json_option, provider_option

if TYPE_CHECKING:
    from lowtide.lifecycle.lease import Lease

_ASK_SECONDS = 30.0
"""For a provider's answer. One that does not answer in this time cannot be asked."""


@click.command("forget", short_help="Settle a lease whose account can no longer be asked.")
@provider_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.argument("sandboxes", nargs=-1, required=True, metavar="ID…", shell_complete=complete_ids)
def command(*, provider: str | None, yes: bool, as_json: bool, sandboxes: tuple[str, ...]) -> int:
    """Settle the leases ID… by hand, when their provider can no longer be asked: the key was deleted, or the account.

    Nothing is destroyed. The sandbox may still run, and cost money, until its provider-side lifetime ends it or you
    delete it in the provider's own console. lowtide stops trying to destroy it and lists it as released (`lowtide ls
    --all`). Should you get a key to the account again, `lowtide rm ID` destroys it.

    A sandbox that can be asked for is refused: `lowtide rm` destroys that one. So is one whose owner is alive. Exit
    code 1 when a lease was not forgotten.
    """
    from lowtide.cli import exit_codes
    from lowtide.cli.text import one_line, print_json
    from lowtide.engine import engine

    answers = [engine().run(_look(text, provider)) for text in sandboxes]
    unaskable = [one for one in answers if one.refusal is None and not one.gone]
    if unaskable and not as_json:
        for one in unaskable:
            print(one_line(one.warning()))
    confirmed = yes or not unaskable or (not as_json and _confirmed(len(unaskable)))
    results = []
    for one in answers:
        done, why = engine().run(_settle(one)) if confirmed or one.gone else (False, "it was not confirmed")
        results.append({"id": one.id, "provider": one.lease.provider, "forgotten": done, "why": why})
        if not as_json and done:
            print(one_line(f"{one.id} settled: {why}"))
        elif not as_json:
            print(one_line(f"lowtide: {one.id} was not forgotten: {why}"), file=sys.stderr)
    if as_json:
        print_json(results)
    return exit_codes.OK if all(one["forgotten"] for one in results) else exit_codes.ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What is known of one lease before anything is changed."""

    lease: Lease
    why: str
    """Why its provider cannot be asked, or what it said."""
    gone: bool = False
    refusal: str | None = None

    @property
    def id(self) -> str:
        return self.lease.sandbox_id or self.lease.lease_id

    def warning(self) -> str:
        from lowtide.cli.text import age, until

        lease = self.lease
        ends = (
            f"its provider ends it {until(lease.expires_at)}" if lease.expires_at else "nothing else ends it"
        )
        return (
            f"{self.id} ({lease.provider}, account {lease.account}, created {age(lease.created_at)} ago) cannot be "
            f"asked for: {self.why.rstrip('.')}. It may still be running; if it is, {ends}, unless you delete it in the provider's console."
        )


def _confirmed(count: int) -> bool:
    try:
        return click.confirm(
            f"Stop looking after {'this sandbox' if count == 1 else f'these {count} sandboxes'}?",
            default=False,
        )
    except click.Abort:  # end of input, or Ctrl+C
        if not sys.stdin.isatty():
            print()
            return False
        raise


async def _look(text: str, provider: str | None) -> _Answer:
    """Ask the provider, if it can be asked. Raises SandboxNotFoundError for what is not an open lease."""
    import asyncio

    from lowtide.cli.addressing import lease_named
    from lowtide.errors import SandboxNotFoundError
    from lowtide.lifecycle import ask_provider
    from lowtide.lifecycle.ask_provider import Testimony
    from lowtide.lifecycle.lease import LeaseState
    from lowtide.lifecycle.owner import Standing
    from lowtide.lifecycle.recover import is_shown
    from lowtide.providers import registry

    lease = await lease_named(text, provider)
    if lease is None:
        raise SandboxNotFoundError(f"there is no open lease {text}", sandbox_id=text)
    if lease.state is LeaseState.HANDED_OVER:
        return _Answer(lease=lease, why="", refusal="it is released already")
    verdict = lease.owner.verdict()
    if lease.state is not LeaseState.KEPT and verdict.standing is Standing.ALIVE:
        return _Answer(lease=lease, why="", refusal=f"{verdict.why}; end that process first")
    try:
        place = registry.provider(lease.provider)
        async with asyncio.timeout(_ASK_SECONDS):
            if not await is_shown(place, lease):
                return _Answer(lease=lease, why=f"the {lease.provider} credentials at hand do not show it")
            sighting = await ask_provider.ask(place, lease)
    except Exception as error:  # an SDK raises anything
        return _Answer(lease=lease, why=str(error) or f"no answer within {_ASK_SECONDS:g} s")
    if sighting.testimony is Testimony.NOT_THERE:
        return _Answer(lease=lease, why="it no longer exists", gone=True)
    refusal = f"{lease.provider} can be asked for it: run `lowtide rm {lease.sandbox_id or lease.lease_id}`"
    return _Answer(lease=lease, why="", refusal=refusal)


async def _settle(one: _Answer) -> tuple[bool, str]:
    """Change the row, if it is still as it was seen. Returns whether that was done, and why or why not."""
    from lowtide.lifecycle.claim import OWNED
    from lowtide.lifecycle.lease import LeaseState
    from lowtide.lifecycle.leases import lifecycle

    if one.refusal is not None:
        return False, one.refusal
    after, why = LeaseState.GONE, one.why
    if not one.gone:
        after, why = LeaseState.HANDED_OVER, f"forgotten by hand, it may still be running: {one.why}"
    lease = one.lease
    # The guardian may be trying to end it: that is no other state of it.
    before = OWNED if lease.state in OWNED else {lease.state}
    changed = await lifecycle().ledger.change(
        lease.lease_id, after, before=before, owned_by=lease.owner, why=why
    )
    if changed is None:
        return False, "its lease has changed meanwhile; `lowtide history` shows how"
    return True, why
