"""The rights in docs/kubernetes.md are enough, and are the least: tried as that service account on a real node."""

from __future__ import annotations

import asyncio
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
    """A provider that may do what the page says, in a namespace of its own. A parameter is a right that it lacks: a
    resource, or one verb of it (``secrets:delete``)."""
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
                manifest["rules"] = [_without(rule, lacking) for rule in manifest["rules"]]
                manifest["rules"] = [rule for rule in manifest["rules"] if rule["verbs"]]
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


def _without(rule: dict[str, Any], lacking: str | None) -> dict[str, Any]:
    resource, _, verb = (lacking or "").partition(":")
    if resource not in rule["resources"]:
        return rule
    return {**rule, "verbs": [one for one in rule["verbs"] if verb and one != verb]}


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


@pytest.mark.parametrize("restricted", ["pods:watch"], indirect=True)
async def test_without_the_right_to_watch_it_looks_again_and_again(restricted: KubernetesProvider) -> None:
    """Also while the container is only being made, when an end first waits for it."""
    first, second = spec(), spec()
    sandbox_id = (await restricted.create(first)).sandbox_id
    assert (await restricted.wait_ready(sandbox_id)).state.value == "running"
    starting = (await restricted.create(second)).sandbox_id
    for _ in range(100):
        found = await restricted._lookup.pod(starting)
        if found is not None and found["spec"].get("nodeName"):
            break
        await asyncio.sleep(0.05)
    for one in (starting, sandbox_id):
        assert await restricted.destroy(one) is True
    assert [info async for info in restricted.list({})] == []


@pytest.mark.parametrize(
    "restricted",
    ["pods:delete", "secrets:delete", "networkpolicies:delete", "secrets:patch"],
    indirect=True,
)
async def test_where_something_could_not_be_removed_nothing_is_created(
    restricted: KubernetesProvider, request: pytest.FixtureRequest
) -> None:
    resource, verb = request.node.callspec.params["restricted"].split(":")
    wanted = spec(network=Network(mode=NetworkMode.NONE))
    with pytest.raises(errors.AuthenticationError, match=f"may not {verb} .*{resource}") as caught:
        await restricted.create(wanted)
    assert caught.value.nothing_sent
    assert await restricted.find(wanted) is None
