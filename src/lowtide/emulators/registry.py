"""Which emulators there are, and where; nothing is imported until one is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lowtide.errors import MissingDependencyError, ValidationError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Emulator

EMULATORS: dict[str, str] = {
    "e2b": "lowtide.emulators.e2b:E2BEmulator",
    "daytona": "lowtide.emulators.daytona:DaytonaEmulator",
    "runloop": "lowtide.emulators.runloop:RunloopEmulator",
    "coreweave": "lowtide.emulators.coreweave:CoreWeaveEmulator",
    "modal": "lowtide.emulators.modal:ModalEmulator",
}


def check(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, without doubles and in order; ValidationError for one that is not known."""
    if not names:
        raise ValidationError(f"name at least one emulator: {', '.join(EMULATORS)}", argument="names")
    for name in names:
        if name not in EMULATORS:
            known = ", ".join(EMULATORS)
            raise ValidationError(f"there is no emulator called {name!r}; known: {known}", argument="names")
    return tuple(dict.fromkeys(names))


def load(name: str) -> type[Emulator]:
    module, _, attribute = EMULATORS[name].partition(":")
    try:
        loaded: type[Emulator] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise ValidationError(f"the emulator {name!r} is not in this build", argument="names") from None
        install = f'pip install "lowtide[emulators,{name}]"'
        raise MissingDependencyError(
            f"the emulator {name!r} needs {error.name}: {install}", install=install
        ) from error
    return loaded
