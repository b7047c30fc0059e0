"""An id that nothing can have: it is not found, and never becomes part of a path. No service is asked."""

from __future__ import annotations

import pytest

from lowtide.errors import SandboxNotFoundError
from lowtide.providers import registry
from lowtide.providers.base import Provider
from lowtide.testing.conformance.lifecycle import IMPOSSIBLE_IDS

NOWHERE = {
    "faulty": {"LOWTIDE_FAULTY_DIR": "faulty"},
    "docker": {"DOCKER_HOST": "tcp://127.0.0.1:9"},
    "kubernetes": {"KUBECONFIG": "kubeconfig"},
    "e2b": {"E2B_API_KEY": "e2b_" + "0" * 40, "E2B_API_URL": "http://127.0.0.1:9"},
    "daytona": {"DAYTONA_API_KEY": "key", "DAYTONA_API_URL": "http://127.0.0.1:9"},
}
SDK = {"docker": "aiodocker", "kubernetes": "aiohttp", "e2b": "e2b", "daytona": "daytona"}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: nowhere
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: nobody, user: {token: none}}]
"""


@pytest.fixture(params=sorted(NOWHERE))
def provider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Provider:
    if request.param in SDK:
        pytest.importorskip(SDK[request.param])
    environ = dict(NOWHERE[request.param])
    place = tmp_path_factory.mktemp("nowhere")
    (place / "kubeconfig").write_text(KUBECONFIG)
    for name in {"KUBECONFIG", "LOWTIDE_FAULTY_DIR"} & environ.keys():
        environ[name] = str(place / environ[name])
    return registry.provider_class(request.param).connect(environ)


@pytest.mark.parametrize("sandbox_id", IMPOSSIBLE_IDS, ids=ascii)
async def test_an_impossible_id_is_not_there(provider: Provider, sandbox_id: str) -> None:
    try:
        with pytest.raises(SandboxNotFoundError):
            await provider.get(sandbox_id)
        assert await provider.destroy(sandbox_id) is False
    finally:
        await provider.aclose()
