"""The conformance suite on CoreWeave: its SDK's stubs against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.testing import conformance as suite
from tests.coreweave_emulator import needs_emulator, serving

pytestmark = [*needs_emulator, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _emulator() -> Iterator[None]:
    for _ in serving():
        yield


globals().update(
    suite.tests(
        suite.ProviderUnderTest(
            name="coreweave",
            big_file_bytes=60_000_000,  # moved as on Docker, where it is five times that
            parallel=12,
            snapshot_keywords={"provider_options": {"file_system_snapshot": {"mount_path": "/opt"}}},
            snapshot_of="/opt",
            keeps_logs_of_the_ended=False,  # the service has none of what does not run
        )
    )
)
