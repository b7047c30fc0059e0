"""The rights in docs/kubernetes.md are enough, and are the least: tried as that service account on a real node."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.kubernetes_node import IMAGE, needs_node

from lowtide import errors
from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers.base import Labels, Network, NetworkMode, ProcessSpec, SandboxSpec
from lowtide.providers.kubernetes import KubernetesOptions, KubernetesProvider

pytestmark = [*needs_node, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
PATHS = {
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
}


def manifests(namespace: str) -> list[dict[str, Any]]:
    import yaml

    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return list(yaml.safe_load_all(text.replace("sandboxes", namespace)))


@pytest_asyncio.fixture
async def restricted(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[KubernetesProvider]:
    """A provider that may do what the page says, in a namespace of its own. A parameter is a right that it lacks."""
    lacking = getattr(request, "param", None)
    admin = KubernetesProvider.connect(os.environ)
    namespace = f"lowtide-test-{secrets.token_hex(4)}"
    await admin._api.request(
        "POST",
        "/api/v1/namespaces",
        body={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
    )
    provider = None
    try:
        for manifest in manifests(namespace):
            if "rules" in manifest:
                manifest["rules"] = [r for r in manifest["rules"] if lacking not in r["resources"]]
            await admin._api.request("POST", PATHS[manifest["kind"]].format(namespace), body=manifest)
        answer = await admin._api.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/lowtide/token",
            body={
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": 3600},
            },
        )
        config = tmp_path / "kubeconfig"
        cluster = {"server": admin._access.server, "insecure-skip-tls-verify": True}
        config.write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": answer["status"]["token"]}}],
                    "contexts": [
                        {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}
                    ],
                    "current-context": "x",
                }
            )
        )
        provider = KubernetesProvider.connect({"KUBECONFIG": str(config)}, {"image": IMAGE})
        yield provider
    finally:
        if provider is not None:
            await provider.aclose()
        await admin._api.request("DELETE", f"/api/v1/namespaces/{namespace}", body={})
        await admin.aclose()


def spec(**changes: Any) -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="rights", owner="tests")
    return SandboxSpec(**{"labels": labels, "lifetime_seconds": 300, **changes})


async def test_the_rights_of_the_page_are_enough(restricted: KubernetesProvider) -> None:
    wanted = spec(network=Network(mode=NetworkMode.NONE))
    sandbox_id = (await restricted.create(wanted)).sandbox_id
    assert (await restricted.wait_ready(sandbox_id)).state.value == "running"
    handle = await restricted.start_process(sandbox_id, ProcessSpec(argv=("echo", "allowed")))
    assert b"".join([data async for _, data in handle.output()]) == b"allowed\n"
    await handle.aclose()

    async def content() -> AsyncIterator[bytes]:
        yield b"x"

    assert await restricted.write_file(sandbox_id, "/tmp/x", content()) == 1
    assert (await restricted.url(sandbox_id, 80)).url
    assert [info.sandbox_id async for info in restricted.list({})] == [sandbox_id]
    found = await restricted.find(wanted)
    assert found is not None
    assert await restricted.destroy(sandbox_id) is True
    assert await restricted.find(wanted) is None


@pytest.mark.parametrize("restricted", ["secrets"], indirect=True)
async def test_without_secrets_a_shell_line_brings_the_program_and_the_pod_has_the_key(
    restricted: KubernetesProvider,
) -> None:
    wanted = spec(network=Network(mode=NetworkMode.INTERNET), options=KubernetesOptions(read_only_root=True))
    sandbox_id = (await restricted.create(wanted)).sandbox_id
    await restricted.wait_ready(sandbox_id)
    another = KubernetesProvider.connect(restricted.credentials())
    try:
        for provider in (restricted, another):
            script = "rm -f /.lowtide/inside; cp /bin/true /.lowtide/inside; env; cat /proc/1/environ"
            handle = await provider.start_process(sandbox_id, ProcessSpec(argv=("sh", "-c", script)))
            out = b"".join([data async for _, data in handle.output()])
            assert await handle.wait() != 0
            assert out.count(b"Read-only file system") == 2
            assert b"LOWTIDE_KEY" not in out
        assert await another.renew(sandbox_id, 200) is not None
    finally:
        await another.aclose()
    assert [info.sandbox_id async for info in restricted.list({})] == [sandbox_id]
    assert await restricted.destroy(sandbox_id) is True
    assert await restricted.find(wanted) is None


async def test_what_the_page_does_not_give_is_refused_by_name(restricted: KubernetesProvider) -> None:
    elsewhere = spec(options=KubernetesOptions(namespace="default"))
    with pytest.raises(errors.AuthenticationError, match=r"docs/kubernetes\.md"):
        await restricted.create(elsewhere)
