"""The conformance suite on the local provider with isolation="gvisor"."""

from __future__ import annotations

import shutil

import pytest

from lowtide.providers.base import Capability
from lowtide.testing import conformance as suite

pytestmark = [
    pytest.mark.skipif(
        shutil.which("runsc") is None, reason="runsc is not installed: scripts/engines up tools"
    ),
    pytest.mark.slow,
]

globals().update(
    suite.tests(
        suite.ProviderUnderTest(
            name="local",
            keywords={"isolation": "gvisor"},
            output_bytes=10 * 1024 * 1024,
            big_file_bytes=50 * 1000 * 1000,
            parallel=4,
            crowd=8,
            without=frozenset(
                {
                    Capability.NETWORK_FULL,
                    Capability.NETWORK_ALLOW,
                    Capability.NETWORK_PORTS,
                    Capability.PIDS_LIMIT,
                }
            ),
        )
    )
)
