"""The conformance suite on a real Podman engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide.testing import conformance as suite
from tests.container_engine import IMAGE, PODMAN, needs_podman

pytestmark = [*needs_podman, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _podman_host() -> Iterator[None]:
    """The docker provider, pointed at Podman's socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", PODMAN)
        yield


globals().update(
    suite.tests(
        suite.ProviderUnderTest(
            name="docker",
            keywords={"container_image": IMAGE},
            big_file_bytes=30_000_000,  # moved as on Docker, where it is ten times that
            timeout_seconds=4.0,
            max_lifetime_seconds=8.0,
            keeps_logs_of_the_ended=False,  # the engine removes it
            follows_logs_to_the_end=False,  # it stops to read when it removes the log, and removes it at once
        )
    )
)
