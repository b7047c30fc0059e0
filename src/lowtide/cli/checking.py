"""What `lowtide doctor` checks: lowtide's own state, and each provider that is installed."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide._version import __version__
from lowtide.cli import exit_codes
from lowtide.cli.failures import explain
from lowtide.cli.text import one_line, print_json
from lowtide.defaults import default_provider
from lowtide.engine import engine
from lowtide.errors import LowtideError, MissingDependencyError, SandboxFailedError
from lowtide.machine import home
from lowtide.providers import registry
from lowtide.providers.base import Provider

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that works or does not, and what to do about it."""

    about: str  # "lowtide", or the provider's name
    name: str
    ok: bool
    why: str
    fix: str | None = None
    vital: bool = False  # without it nothing works


def check_all(provider: str | None) -> list[Finding]:
    """Every check; only a provider that was named, or the default, is really tried."""
    findings = list(_own())
    chosen = provider or default_provider()
    names = [chosen] if provider else sorted(registry.known(), key=lambda one: (one != chosen, one))
    for name in names:
        findings += _provider(name, tried=name == chosen)
    return findings


def show(findings: list[Finding], *, as_json: bool) -> int:
    """Print them. 0 when everything vital works."""
    if as_json:
        print_json(
            [
                {
                    "about": one.about,
                    "check": one.name,
                    "ok": one.ok,
                    "vital": one.vital,
                    "why": one.why,
                    "fix": one.fix,
                }
                for one in findings
            ]
        )
    else:
        _print(findings)
    return exit_codes.OK if all(one.ok for one in findings if one.vital) else exit_codes.ERROR


def _print(findings: list[Finding]) -> None:
    about = None
    for one in findings:
        if one.about != about:
            about = one.about
            print(about)
        print(f"  {'yes' if one.ok else 'NO '} {one.name}: {one_line(one.why)}")
        if not one.ok and one.fix:
            print(f"      fix: {one_line(one.fix)}")


def _own() -> Iterator[Finding]:
    from lowtide.cli.guarding import ask_guardian
    from lowtide.lifecycle.leases import lifecycle

    yield Finding(
        about="lowtide",
        name="version",
        ok=True,
        why=f"{__version__} on Python {sys.version.split()[0]} ({sys.executable})",
    )
    try:
        path = home()
        leases = engine().run(lifecycle().leases())
    except LowtideError as error:
        yield Finding(
            about="lowtide",
            name="ledger",
            ok=False,
            why=str(error),
            fix="set LOWTIDE_HOME to a directory you can write",
            vital=True,
        )
        return
    orphans = [lease for lease in leases if lease.owner.alive() is False and lease.kept_until is None]
    yield Finding(
        about="lowtide", name="ledger", ok=True, why=f"{len(leases)} open leases in {path}", vital=True
    )
    yield Finding(
        about="lowtide",
        name="orphans",
        ok=not orphans,
        why=f"{len(orphans)} sandboxes whose owner is dead",
        fix="lowtide sweep",
    )
    kept_aside = sorted(
        path.name for path in path.glob("ledger.db.damaged-*") if path.suffix[-4:] not in ("-wal", "-shm")
    )
    if kept_aside:
        yield Finding(
            about="lowtide",
            name="ledger kept aside",
            ok=False,
            why=f"the ledger was damaged, or its log was deleted; it is kept as {', '.join(kept_aside)} in {path}. A new "
            "one has what the guardian and the owners remembered",
            fix="look for sandboxes without a lease with: lowtide sweep --all-ledgers --provider NAME; then delete it",
        )
    guardian = ask_guardian()
    running = (
        f"runs as {guardian['pid']}"
        if guardian["running"]
        else "not running; it comes with the first sandbox"
    )
    yield Finding(about="lowtide", name="guardian", ok=True, why=running)
    for note in guardian["notes"]:
        yield Finding(
            about="lowtide", name="guardian's note", ok=False, why=note, fix=f"see {guardian['log']}"
        )


def _provider(name: str, *, tried: bool) -> Iterator[Finding]:
    try:
        cls = registry.provider_class(name)
    except MissingDependencyError as error:
        yield Finding(about=name, name="installed", ok=False, why=str(error), fix=error.install, vital=tried)
        return
    except AttributeError as error:
        yield Finding(about=name, name="installed", ok=False, why=str(error), vital=tried)
        return
    entry = registry.known()[name]
    if not entry.installed:
        why = f"{entry.summary}; not all of what it needs is here"
        yield Finding(about=name, name="installed", ok=False, why=why, fix=entry.install, vital=tried)
        return
    hint = "" if tried else f" (`lowtide doctor --provider {name}` tries it)"
    yield Finding(about=name, name="installed", ok=True, why=entry.summary + hint)
    yield from _own_checks(name)
    if not tried:
        return
    try:
        place = registry.provider(name)
        if cls.traits.outlives_machine:  # a sandbox there may cost money: looking is enough
            count = engine().run(_count(place), timeout=_ANSWER_SECONDS)
            why = f"answers; {count} sandboxes there"
        else:
            why = _try_one(name)
    except (LowtideError, TimeoutError) as error:
        text, _ = explain(error)
        yield Finding(about=name, name="works", ok=False, why=text or "no answer in time", vital=True)
        return
    yield Finding(about=name, name="works", ok=True, why=why, vital=True)


def _own_checks(name: str) -> Iterator[Finding]:
    """What the provider itself knows about this machine, where it has a `doctor` module."""
    try:
        module = importlib.import_module(f"{registry.known()[name].module}.doctor")
    except ImportError:
        return
    checks = getattr(module, "doctor", None)
    for check in checks() if checks is not None else ():
        yield Finding(about=name, name=check.name, ok=check.ok, why=check.why, fix=check.fix)


async def _count(place: Provider) -> int:
    return len([info async for info in place.list({})])


def _try_one(name: str) -> str:
    from lowtide.sandbox import Sandbox

    started = time.monotonic()
    with Sandbox.run(provider=name, tags=["doctor"], keep="never") as sandbox:
        result = sandbox.exec(["true"]).result(_ANSWER_SECONDS)
    if result.returncode != 0:
        raise SandboxFailedError(
            f"`true` in a sandbox ended with {result.returncode}: {result.stderr}", reason="exit code"
        )
    return f"a sandbox was made, used and ended in {(time.monotonic() - started) * 1000:.0f} ms"
