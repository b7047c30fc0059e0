"""The conformance suite on a real Docker engine."""

from __future__ import annotations

import pytest

from lowtide.testing import conformance as suite
from tests.container_engine import IMAGE, needs_docker

pytestmark = [*needs_docker, pytest.mark.timeout(600)]


globals().update(
    suite.tests(
        suite.ProviderUnderTest(
            name="docker",
            keywords={"container_image": IMAGE},
            timeout_seconds=4.0,
            max_lifetime_seconds=8.0,
            keeps_logs_of_the_ended=False,  # the engine removes it
        )
    )
)
