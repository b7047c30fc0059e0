"""Emulators as a fixture: ``with lowtide.testing.emulator("e2b") as emulators: …``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.emulators.handle import Handle

_WINDOW = "LOWTIDE_CREATE_WINDOW_SECONDS"


@contextmanager
def emulator(
    *names: str,
    plain: bool = False,
    limit: int | None = None,
    network: str = "none",
    packages: str = "check",
    home: str | os.PathLike[str] | None = None,
    set_environment: bool = False,
) -> Iterator[Handle]:
    """The named emulators, serving, for the length of the block.

    With `set_environment` this process's own environment points at them meanwhile, so that an SDK
    used in the same process finds them. Then a create that was refused or lost is also looked for only
    five seconds long (`LOWTIDE_CREATE_WINDOW_SECONDS`, unless it is set): an emulator on this machine does not
    lag by a minute.
    """
    from lowtide.emulators.handle import start

    with start(*names, plain=plain, limit=limit, network=network, packages=packages, home=home) as handle:
        authority = handle.environment.get("LOWTIDE_EMULATOR_AUTHORITY")
        before = {name: os.environ.get(name) for name in (*handle.environment, "SSL_CERT_DIR", _WINDOW)}
        if set_environment:
            os.environ.setdefault(_WINDOW, "5")
            os.environ.update(handle.environment)
            if authority is not None:
                # As `emulators/python_start` does in a program: Daytona's SDK uploads with `os.environ` emptied.
                os.environ.pop("SSL_CERT_DIR", None)
                os.putenv("SSL_CERT_DIR", authority)
        try:
            yield handle
        finally:
            if set_environment and authority is not None:
                os.unsetenv("SSL_CERT_DIR")
            for name, value in before.items() if set_environment else ():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
