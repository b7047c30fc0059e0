"""Keep: whether a sandbox survives its end, by one policy and by the switches people know."""

from __future__ import annotations

import enum
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from lowtide import logger
from lowtide.lifecycle.lease import Keep, Lease

log = logger.get("lowtide.keep")

DAY = 86_400.0


class Fate(enum.Enum):
    """What the end of a lease does to its sandbox."""

    DESTROY = "destroy"
    KEEP = "keep"  # leave it running
    STOP = "stop"  # stop it, delete it later


@dataclass(frozen=True, slots=True)
class Decision:
    fate: Fate
    why: str


def switched(lease: Lease, environ: Mapping[str, str] | None = None) -> Lease:
    """The lease with the provider's own keep switch in it, so that it also holds for whoever ends it later."""
    environ = os.environ if environ is None else environ
    if lease.provider == "daytona" and "DAYTONA_KEEP_SANDBOX" in environ:
        return replace(lease, keep=Keep.ALWAYS)
    return lease


def decide(lease: Lease, *, failed: bool, environ: Mapping[str, str] | None = None) -> Decision:
    """What happens to this sandbox now that its lease ends.

    `failed`: the ``with`` body raised, the session's block raised, or the owner crashed. Whoever ends
    the lease of another process passes an empty `environ`: its own switches are not the owner's.
    """
    environ = os.environ if environ is None else environ
    if lease.keep is Keep.ALWAYS:
        return Decision(Fate.KEEP, "keep=always")
    if lease.keep is Keep.ON_FAILURE and failed:
        return Decision(Fate.KEEP, "keep=on-failure, and it failed")
    if lease.provider == "daytona":
        if "DAYTONA_KEEP_SANDBOX" in environ:
            return Decision(Fate.KEEP, "DAYTONA_KEEP_SANDBOX is set")
        if environ.get("DAYTONA_DELETE_ON_CLOSE", "true").strip().lower() == "false":
            return Decision(Fate.STOP, "DAYTONA_DELETE_ON_CLOSE=false")
    return Decision(Fate.DESTROY, "its lease ended")


def announce(lease: Lease, *, why: str, until: float, lives_until: float | None) -> None:
    """Say that a sandbox was kept, how to get back in, and how to delete it."""
    command = "lowtide" if shutil.which("lowtide") else f"{sys.executable} -m lowtide"
    lines = [
        f"lowtide kept sandbox {lease.sandbox_id} ({lease.provider}) until {_clock(until)}: {why}",
        f"  enter it:  {command} shell {lease.sandbox_id}",
        f"  delete it: {command} rm {lease.sandbox_id}",
    ]
    if lives_until is not None and lives_until < until - 60:
        lines.insert(1, f"  note: {lease.provider} itself ends it at {_clock(lives_until)}")
    # A warning: shown on stderr where the program has set up no logging, in its log where it has.
    log.warning("%s", "\n".join(lines))


def _clock(at: float) -> str:
    shown = datetime.fromtimestamp(at).astimezone()
    return shown.strftime("%H:%M:%S" if at - time.time() < DAY / 2 else "%Y-%m-%d %H:%M")
