"""The conformance suite: what every provider must do, as classes that a provider's tests subclass.

A provider passes when a module like this one is green:

    import pytest
    from lowtide.testing import conformance as suite

    @pytest.fixture(scope="module")
    def provider_under_test():
        return suite.ProviderUnderTest(name="mine", keywords={"container_image": "python:3.11"})

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

What the provider's declared capabilities exclude is skipped, and the skip names the capability.
Inside the sandbox the suite needs a POSIX shell and the usual small tools (cat, head, sleep, stty…).
"""

from lowtide.testing.conformance.base import Conformance, ProviderUnderTest, requires
from lowtide.testing.conformance.cancellation import CancellationConformance
from lowtide.testing.conformance.concurrency import ConcurrencyConformance
from lowtide.testing.conformance.exec import ExecConformance
from lowtide.testing.conformance.features import FeaturesConformance
from lowtide.testing.conformance.files import FilesConformance
from lowtide.testing.conformance.isolation import IsolationConformance
from lowtide.testing.conformance.lifecycle import LifecycleConformance
from lowtide.testing.conformance.sessions import SessionConformance
from lowtide.testing.conformance.streams import StreamsConformance
from lowtide.testing.conformance.trees import TreesConformance
from lowtide.testing.conformance.validation import ValidationConformance

__all__ = [
    "CancellationConformance",
    "ConcurrencyConformance",
    "Conformance",
    "ExecConformance",
    "FeaturesConformance",
    "FilesConformance",
    "IsolationConformance",
    "LifecycleConformance",
    "ProviderUnderTest",
    "SessionConformance",
    "StreamsConformance",
    "TreesConformance",
    "ValidationConformance",
    "requires",
]
