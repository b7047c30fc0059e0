"""The agent's view on a real Docker engine and a real Kubernetes node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide.runtime import DockerRuntime, KubernetesRuntime
from lowtide.runtime.base import Runtime, session_tag
from tests.container_engine import IMAGE, needs_docker
from tests.kubernetes_node import needs_node
from tests.runtime import cases
from tests.runtime.cases import shell  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 120.0
PLACES = [
    pytest.param(DockerRuntime, id="docker", marks=needs_docker),
    pytest.param(KubernetesRuntime, id="kubernetes", marks=needs_node),
]


@pytest.fixture(scope="module", params=PLACES)
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    with request.param(config={"container_image": IMAGE}) as made:
        yield made


class TestShell(cases.ShellCases):
    pass


class TestFiles(cases.FileCases):
    pass


@pytest.mark.parametrize("kind", PLACES)
def test_attach_share_close_gone(kind: type[Runtime]) -> None:
    with kind(config={"container_image": IMAGE}) as first:
        first.run_command("mark=seen").result(SECONDS)
        with kind(sid=first.sid, attach_to_existing=True) as second:
            assert second.run_command("echo $mark").result(SECONDS).content == "seen\n"
        assert first.run_command("echo still").result(SECONDS).content == "still\n"
        assert first.server_url().result(SECONDS).url.startswith("http://127.0.0.1:")
    assert Sandbox.list(tags=[session_tag(first.sid)], provider=first.provider).result(SECONDS) == []
