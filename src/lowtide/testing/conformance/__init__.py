"""The conformance suite: what every provider must do, as classes of tests.

A provider passes when a module like this one is green:

    from lowtide.testing import conformance as suite

    globals().update(
        suite.tests(suite.ProviderUnderTest(name="mine", keywords={"container_image": "python:3.11"}))
    )

A capability that the provider declares is tested; of one that it does not, the refusal is. A single
class can be subclassed by hand, next to a fixture ``provider_under_test``; then what the declared
capabilities exclude is skipped, and the skip names the capability.
Inside the sandbox the suite needs a POSIX shell and the usual small tools (cat, head, sleep, stty…).
"""

from lowtide.testing.conformance.base import Conformance, ProviderUnderTest, requires
from lowtide.testing.conformance.cancellation import CancellationConformance
from lowtide.testing.conformance.concurrency import ConcurrencyConformance
from lowtide.testing.conformance.endings import EndingsConformance
from lowtide.testing.conformance.exec import ExecConformance
from lowtide.testing.conformance.features import FeaturesConformance
from lowtide.testing.conformance.files import FilesConformance
from lowtide.testing.conformance.isolation import IsolationConformance
from lowtide.testing.conformance.lifecycle import LifecycleConformance
from lowtide.testing.conformance.sessions import SessionConformance
from lowtide.testing.conformance.streams import StreamsConformance
from lowtide.testing.conformance.transfers import TransfersConformance
from lowtide.testing.conformance.trees import TreesConformance
from lowtide.testing.conformance.validation import ValidationConformance
from lowtide.testing.conformance.whole import tests

__all__ = [
    "CancellationConformance",
    "ConcurrencyConformance",
    "Conformance",
    "EndingsConformance",
    "ExecConformance",
    "FeaturesConformance",
    "FilesConformance",
    "IsolationConformance",
    "LifecycleConformance",
    "ProviderUnderTest",
    "SessionConformance",
    "StreamsConformance",
    "TransfersConformance",
    "TreesConformance",
    "ValidationConformance",
    "requires",
    "tests",
]
