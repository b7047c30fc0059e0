"""The steps of a Dockerfile as Daytona's builder takes and shows them."""

from __future__ import annotations

from dataclasses import replace

from lowtide.emulators import dockerfile
from lowtide.emulators.daytona.machine import ACCOUNTS, HOMES, USERS
from lowtide.emulators.dockerfile import Step, Surroundings

OPENING = ("#1 [internal] load build definition from Dockerfile\n", "#2 [internal] load metadata\n")
# How the SDK's own `Image.debian_slim` begins: tools that every machine has that emulates it, or need not have.
_SLIM = (
    "RUN apt-get update",
    "RUN apt-get install -y gcc gfortran build-essential",
    "RUN pip install --upgrade pip",
    "RUN echo 'debconf debconf/frontend select Noninteractive' | debconf-set-selections",
)


def image_steps(text: str) -> list[Step]:
    """CannotBuild for what is not built here."""
    found = list(dockerfile.steps(text))
    if tuple(step.shown for step in found[1:5]) == _SLIM:
        found[1:5] = [replace(step, shown=f"{step.shown} (not run here)", argv=()) for step in found[1:5]]
    shown = [
        replace(step, shown=f"#{number + 2} [{number}/{len(found)}] {step.shown}")
        for number, step in enumerate(found, 1)
    ]
    if not any(step.argv or step.sources for step in shown):
        return shown
    # The accounts come first: a sandbox that stands on layers gets none at its start.
    accounts = Step(shown="", argv=("/bin/sh", "-c", USERS))
    home = Step(
        shown="",
        # Open, because a build's root has no way around permissions here, and recipes copy into it.
        argv=("/bin/sh", "-c", f"mkdir -p {HOMES['daytona']} && chmod 777 {HOMES['daytona']}"),
        around=Surroundings(user=ACCOUNTS["daytona"]),
    )
    return [accounts, home, replace(accounts, argv=(), around=Surroundings()), *shown]
