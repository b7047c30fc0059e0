"""Testing: the conformance suite every provider passes, faults to inject, and the pytest plugin.

Nothing here is loaded until it is asked for, because the plugin's entry point imports this package
at the start of every pytest run on a machine that has lowtide installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.testing.conformance import (
        CancellationConformance,
        ConcurrencyConformance,
        Conformance,
        ExecConformance,
        FeaturesConformance,
        FilesConformance,
        IsolationConformance,
        LifecycleConformance,
        ProviderUnderTest,
        SessionConformance,
        StreamsConformance,
        TreesConformance,
        ValidationConformance,
    )
    from lowtide.testing.emulator_fixture import emulator
    from lowtide.testing.faulty import FaultyProvider, FaultyService
    from lowtide.testing.leaks import Leak, Watch

_MODULES = {
    "CancellationConformance": "lowtide.testing.conformance",
    "ConcurrencyConformance": "lowtide.testing.conformance",
    "Conformance": "lowtide.testing.conformance",
    "ExecConformance": "lowtide.testing.conformance",
    "FaultyProvider": "lowtide.testing.faulty",
    "FaultyService": "lowtide.testing.faulty",
    "FeaturesConformance": "lowtide.testing.conformance",
    "FilesConformance": "lowtide.testing.conformance",
    "IsolationConformance": "lowtide.testing.conformance",
    "Leak": "lowtide.testing.leaks",
    "LifecycleConformance": "lowtide.testing.conformance",
    "ProviderUnderTest": "lowtide.testing.conformance",
    "SessionConformance": "lowtide.testing.conformance",
    "StreamsConformance": "lowtide.testing.conformance",
    "TreesConformance": "lowtide.testing.conformance",
    "ValidationConformance": "lowtide.testing.conformance",
    "Watch": "lowtide.testing.leaks",
    "emulator": "lowtide.testing.emulator_fixture",
}

__all__ = [
    "CancellationConformance",
    "ConcurrencyConformance",
    "Conformance",
    "ExecConformance",
    "FaultyProvider",
    "FaultyService",
    "FeaturesConformance",
    "FilesConformance",
    "IsolationConformance",
    "Leak",
    "LifecycleConformance",
    "ProviderUnderTest",
    "SessionConformance",
    "StreamsConformance",
    "TreesConformance",
    "ValidationConformance",
    "Watch",
    "emulator",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
