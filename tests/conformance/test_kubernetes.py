"""The conformance suite on a real Kubernetes node."""

from __future__ import annotations

import pytest

from lowtide.testing import conformance as suite
from tests.kubernetes_node import IMAGE, needs_node

pytestmark = [*needs_node, pytest.mark.timeout(600)]


globals().update(
    suite.tests(
        suite.ProviderUnderTest(
            name="kubernetes",
            keywords={"container_image": IMAGE},
            timeout_seconds=4.0,
            max_lifetime_seconds=8.0,
        )
    )
)
