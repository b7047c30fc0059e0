"""Emulators: local servers that speak a provider's own protocol, backed by real local sandboxes.

with lowtide.emulators.start("e2b") as emulators:
    subprocess.run(["python", "their_script.py"], env={**os.environ, **emulators.environment})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.emulators.handle import Handle, start

__all__ = ["Handle", "start"]


def __getattr__(name: str) -> Any:
    # The reaper imports this package too, and has to stay small.
    if name in __all__:
        from lowtide.emulators import handle

        return getattr(handle, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
