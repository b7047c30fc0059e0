"""The conformance suite on Runloop: the real SDK against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.testing import conformance as suite
from tests.runloop_emulator import needs_emulator, serving

pytestmark = [*needs_emulator, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _emulator() -> Iterator[None]:
    for _ in serving():
        yield


globals().update(
    suite.tests(
        suite.ProviderUnderTest(
            name="runloop",
            big_file_bytes=60_000_000,  # moved as on E2B, where it is five times that
            keywords={"provider_options": {"user": "root"}},
            parallel=12,
            timeout_seconds=4.0,
            max_lifetime_seconds=4.0,
        )
    )
)
