"""isolation="gvisor": one word, checked before anything is made, and what it becomes on each provider."""

from __future__ import annotations

import pytest

from lowtide import Sandbox, SandboxDefaults, UnsupportedError, ValidationError
from lowtide.providers.base import Isolation, Labels, SandboxSpec
from lowtide.providers.docker import container
from lowtide.providers.kubernetes import pod
from lowtide.providers.kubernetes.options import KubernetesOptions

LABELS = Labels(lease_id="lease", ledger_id="ledger", owner="owner")


def test_an_unknown_wall_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        SandboxDefaults(isolation="chroot")
    assert caught.value.argument == "isolation"
    assert SandboxDefaults(isolation="gvisor").isolation is Isolation.GVISOR


@pytest.mark.parametrize("provider", ["modal", "e2b", "daytona"])
def test_a_provider_without_it_is_named_before_anything_is_made(provider: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Sandbox.run(provider=provider, isolation="gvisor")
    assert (caught.value.provider, caught.value.feature) == (provider, "gvisor")
    assert caught.value.alternative


def test_on_docker_it_does_not_go_together_with_an_allow_list() -> None:
    with pytest.raises(UnsupportedError, match="together with isolation=gvisor") as caught:
        Sandbox.run(provider="docker", isolation="gvisor", network=["example.com"])
    assert (caught.value.provider, caught.value.feature) == ("docker", "network-allow")


def test_on_docker_it_is_the_runtime() -> None:
    def host_config(spec: SandboxSpec) -> dict[str, object]:
        body = container.create_body(spec, "image", volume="v", publish=False, key=b"k" * 16, network=None)
        return dict(body["HostConfig"])

    assert host_config(SandboxSpec(labels=LABELS, isolation=Isolation.GVISOR))["Runtime"] == "runsc"
    assert "Runtime" not in host_config(SandboxSpec(labels=LABELS))


def test_on_kubernetes_it_is_the_runtime_class() -> None:
    spec = SandboxSpec(labels=LABELS, isolation=Isolation.GVISOR)
    made = pod.pod(spec, default_image="image", architecture="x86_64", key=None)
    assert made["spec"]["runtimeClassName"] == "gvisor"
    twice = SandboxSpec(
        labels=LABELS, isolation=Isolation.GVISOR, options=KubernetesOptions(runtime_class="kata")
    )
    with pytest.raises(ValidationError):
        pod.check(twice)
