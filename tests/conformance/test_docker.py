"""The conformance suite on a real Docker engine."""

from __future__ import annotations

import pytest

from lowtide.testing import conformance as suite
from tests.container_engine import IMAGE, needs_docker

pytestmark = [*needs_docker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def provider_under_test() -> suite.ProviderUnderTest:
    return suite.ProviderUnderTest(
        name="docker",
        keywords={"container_image": IMAGE},
        parallel=12,
        timeout_seconds=4.0,
        max_lifetime_seconds=8.0,
    )


class TestExec(suite.ExecConformance): ...


class TestStreams(suite.StreamsConformance): ...


class TestFiles(suite.FilesConformance): ...


class TestTrees(suite.TreesConformance): ...


class TestLifecycle(suite.LifecycleConformance): ...


class TestSessions(suite.SessionConformance): ...


class TestFeatures(suite.FeaturesConformance): ...


class TestValidation(suite.ValidationConformance): ...


class TestCancellation(suite.CancellationConformance): ...


class TestConcurrency(suite.ConcurrencyConformance): ...


class TestIsolation(suite.IsolationConformance): ...
