"""The conformance suite on Daytona: the real SDK against the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.testing import conformance as suite
from tests.daytona_emulator import needs_emulator, serving

pytestmark = [*needs_emulator, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _emulator() -> Iterator[None]:
    for _ in serving():
        yield


@pytest.fixture(scope="module")
def provider_under_test(_emulator: None) -> suite.ProviderUnderTest:
    return suite.ProviderUnderTest(
        name="daytona",
        keywords={"provider_options": {"user": "root"}},
        parallel=12,
        timeout_seconds=4.0,
        max_lifetime_seconds=60.0,
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
