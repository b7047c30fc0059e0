"""Owners: which process, of which machine, boot and namespace, a lease belongs to, and whether it still lives.

Death is proven, never assumed. Only "no such process" (or another process under its number, or another
program in its place) seen in the same pid namespace, boot and machine is death; every other failure to
look is "not known" and changes nothing.
"""

from __future__ import annotations

import enum
import hashlib
import os
import secrets
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from lowtide import machine

_LIFE = secrets.token_hex(6)
"""Of this import of lowtide: a subinterpreter, or a second import, is another owner in the same process."""


class Standing(enum.StrEnum):
    """What can be told about an owner from here."""

    ALIVE = "alive"
    DEAD = "dead"
    RESTARTED = "restarted"  # its machine has booted again, and no process of the owner's boot is left
    PERHAPS_RESTARTED = (
        "perhaps-restarted"  # another boot now; a restart, or another machine with the same machine-id
    )
    UNKNOWN = "unknown"


RESTARTS = frozenset({Standing.RESTARTED, Standing.PERHAPS_RESTARTED})
"""For a hosted sandbox both mean the same: the provider is asked whether its lease is still renewed."""
UNPROVEN = frozenset({Standing.UNKNOWN, Standing.PERHAPS_RESTARTED})
"""The owner may be alive, perhaps on another machine: there its local sandboxes are, too."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to "does it live?", with the reason, for people."""

    standing: Standing
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One life of one process of one machine since one boot: never confused with a reused pid."""

    host: str = field(compare=False)
    """The machine's name when the row was written, for people. A renamed machine is the same machine."""
    machine_id: str
    boot_id: str
    namespace: str
    """The pid (and time) namespace that `pid` and `start_time` count in; empty where it was not recorded."""
    pid: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/PID/stat; 0 where the owner cannot know: then only that there is no process
    of its number proves its death."""
    image: str = field(compare=False)
    """Another one after every exec; empty where the kernel does not show it."""
    life: str
    """Which import of lowtide in that process, chosen at random; behind a colon, where the kernel shows it, what it gave
    this program at its exec (`machine.RunningProcess.random`)."""

    @classmethod
    def current(cls) -> Owner:
        return _this_owner()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def label(self) -> str:
        """A short form for provider-side labels."""
        text = "|".join(
            (self.machine_id, self.boot_id, self.namespace, str(self.pid), str(self.start_time), self.life)
        )
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @property
    def here(self) -> bool:
        """On this machine, in this boot and pid namespace: then its death can be seen."""
        return self.same_boot and self.namespace == machine.namespace()

    @property
    def same_boot(self) -> bool:
        """On this machine and in this boot; perhaps in another container."""
        return self.machine_id == machine.machine_id() and self.boot_id == machine.boot_id()

    def replaced_by(self, other: Owner) -> bool:
        """Whether this one has made way for `other` by an exec: the same process, another program in it."""
        return (
            self.here
            and other.here
            and (self.pid, self.start_time) == (other.pid, other.start_time)
            and not self._same_program(other.image, other.random)
        )

    def _of_another_boot(self) -> Verdict:
        process = f"process {self.pid}"
        over = machine.boot_is_over(self.boot_id, machine.state_directory())
        if over:
            return Verdict(
                Standing.RESTARTED, f"its owner, {process}, was running before this machine was restarted"
            )
        if over is False:
            return Verdict(
                Standing.UNKNOWN,
                f"its owner, {process}, is on another machine ({self.host}) that has the same machine-id as this one",
            )
        return Verdict(
            Standing.PERHAPS_RESTARTED,
            f"its owner, {process}, was running before this machine was restarted, or runs on another machine with the "
            "same machine-id: nothing in the state directory tells which",
        )

    @property
    def random(self) -> str:
        """Part of `life`, so that an earlier version, which compares that as a whole, still reads the row."""
        return self.life.partition(":")[2]

    def _same_program(self, image: str, random: str) -> bool:
        """Whether the process that looks like this one still runs the program that wrote the row.

        The kernel's random bytes decide where both sides have them. Where they cannot be read the addresses decide,
        and an exec that the kernel puts into the same place (address randomisation is disabled) is not seen until the
        process ends. What shows neither counts as the same: that is no proof of an end.
        """
        if self.random and random:
            return self.random == random
        return not self.image or not image or self.image == image

    def alive(self) -> bool | None:
        """True or False where it can be known from here, None where not (another machine, another container).

        An owner on this machine from an earlier boot is dead, once that boot is proven to be over.
        """
        standing = self.verdict().standing
        return None if standing in UNPROVEN else standing is Standing.ALIVE

    def verdict(self) -> Verdict:
        """Whether it lives, as far as that can be told from here, and how that is known."""
        process = f"process {self.pid}"
        if self.machine_id != machine.machine_id():
            return Verdict(Standing.UNKNOWN, f"its owner, {process}, is on another machine ({self.host})")
        if machine.UNKNOWN_BOOT in (self.boot_id, machine.boot_id()):
            return Verdict(
                Standing.UNKNOWN, f"which boot its owner, {process}, belongs to cannot be read here"
            )
        if self.boot_id != machine.boot_id():
            return self._of_another_boot()
        if self.namespace and self.namespace != machine.namespace():
            return Verdict(
                Standing.UNKNOWN,
                f"its owner, {process}, is in another pid namespace (a container), which cannot be seen from here",
            )
        try:
            found = machine.running_process(self.pid)
        except OSError as error:
            return Verdict(
                Standing.UNKNOWN,
                f"its owner, {process}, could not be looked at ({error.strerror or error})",
            )
        if found is not None and self.start_time in (0, found.start_time):
            if self._same_program(found.image, found.random):
                return Verdict(Standing.ALIVE, f"its owner, {process}, is alive")
            why = f"its owner, {process}, was replaced by exec"
        else:
            why = f"its owner, {process}, is dead"
        if not self.namespace:
            return Verdict(
                Standing.UNKNOWN,
                f"there is no {process} here, but an earlier version of lowtide did not write down which pid "
                "namespace its owner was in",
            )
        return Verdict(Standing.DEAD, why)


@cache
def _this_owner() -> Owner:
    me = machine.this_process()
    return Owner(
        host=machine.this_host(),
        machine_id=machine.machine_id(),
        boot_id=machine.boot_id(),
        namespace=machine.namespace(),
        pid=os.getpid(),
        start_time=me.start_time,
        image=me.image,
        life=f"{_LIFE}:{me.random}" if me.random else _LIFE,
    )


# Not by its number: in a pid namespace of its own a child may have its parent's.
os.register_at_fork(after_in_child=_this_owner.cache_clear)
