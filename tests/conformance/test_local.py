"""The conformance suite on the local provider."""

from __future__ import annotations

from lowtide.testing import conformance as suite

globals().update(suite.tests(suite.ProviderUnderTest(name="local", crowd=200)))
