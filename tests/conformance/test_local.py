"""The conformance suite on the local provider."""

from __future__ import annotations

import pytest

from lowtide.testing import conformance as suite


@pytest.fixture(scope="module")
def provider_under_test() -> suite.ProviderUnderTest:
    return suite.ProviderUnderTest(name="local", crowd=200)


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
