"""What modules of whole-product tests share: a local sandbox to attack, sandboxes on each container engine and on the node."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from isolation_attempts import HostHealth
from tests.container_engine import Boxes, both_engines, boxes_on
from tests.kubernetes_node import Node

from lowtide import Sandbox


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """One local sandbox for all attempts of a module."""
    with Sandbox.run(provider="local") as sandbox:
        yield sandbox


@pytest.fixture
def healthy_host() -> Iterator[None]:
    """The machine is after the test as it was before."""
    health = HostHealth()
    yield
    health.check()


@pytest.fixture(params=both_engines)
async def boxes(request: pytest.FixtureRequest) -> AsyncIterator[Boxes]:
    """Sandboxes on Docker, then on Podman."""
    async with boxes_on(request.param) as boxes:
        yield boxes


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """Sandboxes on the Kubernetes node."""
    node = Node()
    yield node
    await node.aclose()
