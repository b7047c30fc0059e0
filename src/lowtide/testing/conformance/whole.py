"""The whole suite for one provider: every conformance class, with the tests that apply to what it declares."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.providers import registry
from lowtide.providers.base import Capability
from lowtide.testing.conformance.base import Conformance, ProviderUnderTest
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

CLASSES: dict[str, type[Conformance]] = {
    "TestExec": ExecConformance,
    "TestStreams": StreamsConformance,
    "TestFiles": FilesConformance,
    "TestTrees": TreesConformance,
    "TestTransfers": TransfersConformance,
    "TestLifecycle": LifecycleConformance,
    "TestEndings": EndingsConformance,
    "TestSessions": SessionConformance,
    "TestFeatures": FeaturesConformance,
    "TestValidation": ValidationConformance,
    "TestCancellation": CancellationConformance,
    "TestConcurrency": ConcurrencyConformance,
    "TestIsolation": IsolationConformance,
}


def tests(under_test: ProviderUnderTest) -> dict[str, Any]:
    """What a test module needs in its globals: the fixture `provider_under_test` and the classes.

    A capability the provider declares is tested, one it does not declare is tested to be refused;
    the other test of the two is not there.
    """
    declared = registry.provider_class(under_test.name).capabilities - under_test.without

    @pytest.fixture(scope="module")
    def provider_under_test() -> ProviderUnderTest:
        return under_test

    classes = {name: _applying(name, base, declared) for name, base in CLASSES.items()}
    return {"provider_under_test": provider_under_test, **classes}


def _applying(name: str, base: type[Conformance], declared: frozenset[Capability]) -> type[Conformance]:
    # None in place of a test hides the one of the base class from pytest.
    hidden = {test: None for test in dir(base) if not _applies(getattr(base, test), declared)}
    return type(name, (base,), {"declared": declared, "__doc__": base.__doc__, **hidden})


def _applies(test: object, declared: frozenset[Capability]) -> bool:
    marks: dict[str, pytest.Mark] = {mark.name: mark for mark in getattr(test, "pytestmark", [])}
    required, refused = marks.get("lowtide_requires"), marks.get("lowtide_refuses")
    if required is not None and not declared.issuperset(required.args):
        return False
    return refused is None or not declared.issuperset(refused.args)
