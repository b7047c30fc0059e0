"""Conformance of refusals: a missing capability is said before anything is created.

A wrong argument is refused before any provider is asked, so that is no provider's to get right: tests/unit/test_defaults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lowtide import Sandbox
from lowtide.errors import UnsupportedError
from lowtide.providers.base import Capability, Provider
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    create_keywords,
    refuses,
)

ASKS: dict[Capability, dict[str, Any]] = {
    Capability.CPU_LIMIT: {"resources": {"limits": {"cpu": "1"}}},
    Capability.MEMORY_LIMIT: {"resources": {"limits": {"memory": "256Mi"}}},
    Capability.PIDS_LIMIT: {"resources": {"limits": {"pids": 64}}},
    Capability.DISK_LIMIT: {"resources": {"limits": {"disk": "1Gi"}}},
    Capability.NETWORK_NONE: {"network": "none"},
    Capability.NETWORK_INTERNET: {"network": "internet"},
    Capability.NETWORK_HOST: {"network": "host"},
    Capability.NETWORK_ALLOW: {"network": {"allow": ["192.0.2.1"]}},
    Capability.NETWORK_PORTS: {"network": {"allow": ["192.0.2.1:8080"]}},
    Capability.GVISOR: {"isolation": "gvisor"},
    Capability.COMMAND: {"command": "sleep", "args": ["1"]},
    Capability.SNAPSHOT: {"snapshot": "some-snapshot"},
    Capability.PORTS: {"ports": [8080]},
}
"""Create keywords that ask for it."""

CALLS: dict[Capability, Callable[[Sandbox], object]] = {
    Capability.STDIN: lambda box: box.exec(["cat"], stdin=b"x"),
    Capability.TTY: lambda box: box.exec(["true"], tty=True),
    Capability.USER: lambda box: box.exec(["true"], user="nobody"),
    Capability.PAUSE: lambda box: box.pause(),
    Capability.LOGS: lambda box: box.stream_logs(),
    Capability.DENIED_CONNECTIONS: lambda box: box.denied_connections(),
}
"""Calls that ask for it."""


class ValidationConformance(Conformance):
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        mark = metafunc.definition.get_closest_marker("lowtide_refuses")
        if mark is not None:
            refused = [capability for capability in mark.args if capability not in (self.declared or ())]
            metafunc.parametrize("capability", refused, ids=str)

    @refuses(*ASKS)
    def test_what_the_provider_cannot_do_is_refused_before_anything_is_created(
        self, capability: Capability, tag: str, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        self._skip_if_declared(provider, capability)
        with pytest.raises(UnsupportedError) as caught:
            Sandbox.run(**create_keywords(provider_under_test, tags=[tag], **ASKS[capability]))
        assert caught.value.provider == provider.name
        assert caught.value.feature
        assert Sandbox.list(tags=[tag], provider=provider.name).result(ANSWER_SECONDS) == []

    @refuses(*CALLS)
    def test_a_call_the_provider_cannot_do_is_refused_before_anything_is_created(
        self, capability: Capability, tag: str, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        self._skip_if_declared(provider, capability)
        box = Sandbox(**create_keywords(provider_under_test, tags=[tag]))
        with pytest.raises(UnsupportedError) as caught:
            CALLS[capability](box)
        assert caught.value.provider == provider.name
        assert caught.value.feature == capability
        assert Sandbox.list(tags=[tag], provider=provider.name).result(ANSWER_SECONDS) == []

    def _skip_if_declared(self, provider: Provider, capability: Capability) -> None:
        """Only where the class was subclassed by hand: `tests` leaves the case out."""
        if capability in (provider.capabilities if self.declared is None else self.declared):
            pytest.skip(f"{provider.name} declares: {capability}")
