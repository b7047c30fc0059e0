"""Whether the engine has the runtime that a stronger wall takes. Asked before anything is made."""

from __future__ import annotations

from lowtide.errors import UnsupportedError, ValidationError
from lowtide.providers.base import SandboxSpec
from lowtide.providers.docker.client import EngineClient
from lowtide.providers.docker.container import GVISOR_RUNTIME
from lowtide.providers.docker.options import DockerOptions


async def check_gvisor(client: EngineClient, spec: SandboxSpec) -> None:
    options: DockerOptions = spec.options or DockerOptions()
    if options.runtime not in (None, GVISOR_RUNTIME):
        raise ValidationError(
            f"isolation='gvisor' is the runtime {GVISOR_RUNTIME}, and provider_options name {options.runtime}",
            argument="isolation",
            provider="docker",
        )
    if spec.network is not None and spec.network.allow:
        # gVisor has a network stack of its own: what is set up in the namespace behind it has no effect inside.
        raise UnsupportedError(
            "the docker provider cannot do an allow-list and isolation='gvisor' together",
            provider="docker",
            argument="network",
            feature="network-allow",
            alternative="network='none' with isolation='gvisor', or the allow-list without it",
        )
    with client.translated(spec.lease_id):
        known = sorted((await client.docker.system.info()).get("Runtimes") or {})
    if GVISOR_RUNTIME not in known:
        raise UnsupportedError(
            f"the engine has no runtime {GVISOR_RUNTIME}; it has {', '.join(known) or 'none'}",
            provider="docker",
            argument="isolation",
            feature="gvisor",
            alternative="install gVisor on the engine's machine (runsc install, then restart the engine)",
        )
