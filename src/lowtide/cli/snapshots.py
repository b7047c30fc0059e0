"""What `lowtide snapshot` does: a provider's snapshots, told to people."""

from __future__ import annotations

import sys

from lowtide.cli import exit_codes
from lowtide.cli.failures import explain
from lowtide.cli.text import clean, print_json, print_table
from lowtide.defaults import default_provider
from lowtide.engine import engine
from lowtide.errors import LowtideError, UnsupportedError
from lowtide.providers import registry
from lowtide.providers.optional import Snapshots


def list_snapshots(name: str | None, *, as_json: bool) -> None:
    provider = _provider(name)
    found = sorted(engine().run(provider.list_snapshots()))
    if as_json:
        print_json([{"id": one} for one in found])
        return
    print_table(
        ["snapshot"],
        [[one] for one in found],
        empty="no snapshots: `lowtide stop --snapshot ID` takes one of a sandbox",
    )


def remove_snapshots(name: str | None, snapshots: tuple[str, ...], *, missing_ok: bool) -> int:
    """Each on its own: one that is in use does not keep the others."""
    provider = _provider(name)
    code = exit_codes.OK
    for one in snapshots:
        try:
            removed = engine().run(provider.delete_snapshot(one))
        except LowtideError as error:
            line, _ = explain(error)
            print(f"lowtide: {line}", file=sys.stderr)
            code = exit_codes.ERROR
            continue
        if removed:
            print(clean(f"{one} removed"))
        elif not missing_ok:
            text = f"lowtide: there is no snapshot {one}; `lowtide snapshot ls` lists them"
            print(clean(text), file=sys.stderr)
            code = exit_codes.ERROR
    return code


def _provider(name: str | None) -> Snapshots:
    provider = registry.provider(name or default_provider())
    if not isinstance(provider, Snapshots):
        raise UnsupportedError(
            f"{provider.name} takes no snapshots", provider=provider.name, feature="snapshot"
        )
    return provider
