"""Capabilities: what was asked for against what the provider can do, before anything is created."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide import validate
from lowtide.errors import UnsupportedError
from lowtide.providers import registry
from lowtide.providers.base import Capability, NetworkMode, Provider

if TYPE_CHECKING:
    from lowtide.defaults import SandboxDefaults

_NETWORK = {
    NetworkMode.NONE: Capability.NETWORK_NONE,
    NetworkMode.INTERNET: Capability.NETWORK_INTERNET,
    NetworkMode.HOST: Capability.NETWORK_HOST,
    NetworkMode.ALLOW: Capability.NETWORK_ALLOW,
}

_INSTEAD = {
    Capability.IMAGE: "leave container_image out and take the provider's own",
    Capability.COMMAND: "start it with exec() after the sandbox has started",
    Capability.LOGS: "run it with exec() and read process.stdout",
    Capability.STDIN: "write the input to a file with write_file() and read it from there",
    Capability.TTY: "run the command without tty=True",
    Capability.USER: "run it as the sandbox's own user, or through su or sudo inside",
    Capability.SIGNALS: "end the command with terminate()",
    Capability.CPU_LIMIT: "leave the cpu limit out",
    Capability.MEMORY_LIMIT: "leave the memory limit out",
    Capability.PIDS_LIMIT: "leave the pids limit out",
    Capability.DISK_LIMIT: "leave the disk limit out",
    Capability.NETWORK_NONE: "choose a provider that can cut the network off, such as local or docker",
    Capability.NETWORK_INTERNET: "leave network out",
    Capability.NETWORK_HOST: "use network='internet', an allow-list, or the local provider",
    Capability.NETWORK_ALLOW: "use network='none' or network='internet'",
    Capability.DENIED_CONNECTIONS: "use the local provider, or docker with an allow-list",
    Capability.NETWORK_PORTS: "name the host or range without a port, or use the local provider",
    Capability.GVISOR: "use local, docker or kubernetes with gVisor (runsc), or a provider with machines of its own",
    Capability.PORTS: "talk to the program through exec() and files",
    Capability.SNAPSHOT: "download() what you need and upload() it into the next sandbox",
    Capability.PAUSE: "snapshot() and start from it later, or leave it running",
}


def check(settings: SandboxDefaults) -> None:
    """Raises UnsupportedError, with provider, feature and alternative, for the first thing it cannot do."""
    chosen = settings.provider or registry.default_name()
    provider = registry.provider_class(chosen) if isinstance(chosen, str) else type(chosen)
    validate.provider_options(provider, settings.provider_options)
    for argument, capability in _asked_for(settings):
        require(provider, capability, argument, settings.isolation)


def require(
    provider: Provider | type[Provider], capability: Capability, argument: str, isolation: str | None = None
) -> None:
    lost = isolation is not None and capability in provider.traits.gvisor_lacks
    if capability in provider.capabilities and not lost:
        return
    alternative = _INSTEAD.get(capability, "choose another provider")
    together = f" together with isolation={isolation!s}" if lost else ""
    raise UnsupportedError(
        f"provider {provider.name!r} cannot do {capability.value!r}{together}, which {argument} asks for; {alternative}",
        argument=argument,
        provider=provider.name,
        feature=capability.value,
        alternative=alternative,
    )


def _asked_for(settings: SandboxDefaults) -> list[tuple[str, Capability]]:
    asked = []
    if settings.container_image is not None:
        asked.append(("container_image", Capability.IMAGE))
    if settings.command is not None:
        asked.append(("command", Capability.COMMAND))
    if settings.snapshot is not None:
        asked.append(("snapshot", Capability.SNAPSHOT))
    if settings.ports:
        asked.append(("ports", Capability.PORTS))
    if settings.network is not None:
        network = validate.network("network", settings.network)
        asked.append(("network", _NETWORK[network.mode]))
        if network.allow:
            from lowtide.providers.network.policy import Policy

            if any(entry.port is not None for entry in Policy.of(network.allow).entries):
                asked.append(("network", Capability.NETWORK_PORTS))
    if settings.isolation is not None:
        asked.append(("isolation", Capability.GVISOR))
    if settings.resources is not None:
        limits = validate.resources("resources", settings.resources)
        for value, capability in (
            (limits.cpu, Capability.CPU_LIMIT),
            (limits.memory_bytes, Capability.MEMORY_LIMIT),
            (limits.pids, Capability.PIDS_LIMIT),
            (limits.disk_bytes, Capability.DISK_LIMIT),
        ):
            if value is not None:
                asked.append(("resources", capability))
    return asked
