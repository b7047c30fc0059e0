"""What Modal is asked for when a sandbox is made."""

from __future__ import annotations

import math
import os
from typing import Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import NetworkMode, SandboxSpec
from lowtide.providers.inside import program
from lowtide.providers.modal.errors import PROVIDER, SERVICE
from lowtide.providers.modal.options import LONGEST_SECONDS, ModalOptions

ARCHITECTURE = "x86_64"
"""The only one that Modal has."""
DEFAULT_LIFETIME_SECONDS = 3600.0
LONGEST_COMMAND = 1 << 16  # Modal's limit for all arguments together
DEFAULT_PYTHON = "3.11"


def arguments(spec: SandboxSpec, key: bytes) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The main process and the keywords of the create call. Identity and both ends are inside this one request."""
    options = hosted.options_of(spec, ModalOptions, PROVIDER)
    timeout = options.timeout_seconds
    for name, seconds in (
        ("timeout_seconds", timeout),
        ("idle_timeout_seconds", options.idle_timeout_seconds),
    ):
        if seconds is not None and not 1 <= seconds <= LONGEST_SECONDS:
            raise _wrong(name, f"must be from 1 to {LONGEST_SECONDS}")
    lifetime = math.ceil(min(spec.lifetime_seconds or DEFAULT_LIFETIME_SECONDS, timeout))
    given: dict[str, Any] = {
        "name": spec.lease_id,
        "tags": hosted.labels_of(spec, options.tags, PROVIDER, argument="tags"),
        "env": {**spec.environment, program.KEY: key.hex()},
        "timeout": timeout,
        **_network(spec, options),
    }
    limits = spec.limits
    if limits.cpu is not None:
        given["cpu"] = (min(limits.cpu, 0.125), limits.cpu)
    if limits.memory_bytes is not None:
        mib = max(1, math.ceil(limits.memory_bytes / (1 << 20)))
        given["memory"] = (min(mib, 128), mib)
    if spec.working_dir is not None:
        given["workdir"] = spec.working_dir
    if options.idle_timeout_seconds is not None:
        given["idle_timeout"] = options.idle_timeout_seconds
    if options.encrypted_ports:
        given["encrypted_ports"] = list(options.encrypted_ports)
    for name in ("gpu", "cloud", "region"):
        if getattr(options, name) is not None:
            given[name] = getattr(options, name)
    if options.secrets:
        given["secrets"] = list(options.secrets)
    if options.volumes:
        given["volumes"] = dict(options.volumes)
    return _main(spec, lifetime, timeout), given


def image(modal: Any, spec: SandboxSpec) -> tuple[Any, Any]:
    """What it runs on, and by what it can be known again."""
    options = hosted.options_of(spec, ModalOptions, PROVIDER)
    said = [one for one in (spec.image, options.image, options.dockerfile) if one is not None]
    if len(said) > 1:
        raise _wrong("image", "a sandbox has one image: container_image, image or dockerfile")
    if not all(isinstance(one, modal.Secret) for one in options.secrets):
        raise _wrong("secrets", "must be modal.Secret objects")
    if options.image is not None:
        if not isinstance(options.image, modal.Image):
            raise _wrong("image", "must be a modal.Image; the name of one goes in container_image")
        return options.image, None
    if options.dockerfile is not None:
        if not os.path.isfile(options.dockerfile):
            raise _wrong("dockerfile", f"there is no file {options.dockerfile}")
        return modal.Image.from_dockerfile(options.dockerfile), None  # it may be another one next time
    if spec.image is not None:
        if len(spec.image.split()) != 1:  # it becomes a line of a Dockerfile
            raise _wrong("container_image", "the name of an image has no spaces")
        return modal.Image.from_registry(spec.image), ("registry", spec.image)
    return modal.Image.debian_slim(python_version=DEFAULT_PYTHON), ("default",)


def place(lease_id: str) -> str:
    """Of the program inside. Every lease has its own: what an image or a snapshot brings along is never taken for it."""
    return f"/tmp/.lowtide-{lease_id}"  # noqa: S108 - it may be executed, not read


def _main(spec: SandboxSpec, lifetime: int, timeout: int) -> tuple[str, ...]:
    """The program inside is the main process; it comes in with its own start, and keeps the lease's clock."""
    words = ("lowtide", str(lifetime), str(timeout), *(spec.command or ()))
    size = sum(len(word.encode()) for word in words)
    for small in (False, True):  # packed it takes longer to start and leaves more room for the command
        line = program.main_line(place(spec.lease_id), ARCHITECTURE, small=small, log=True)
        if size + len(line) < LONGEST_COMMAND:
            break
    words = ("/bin/sh", "-c", line, *words)
    if size + len(line) >= LONGEST_COMMAND:
        raise errors.ValidationError(
            "the main command is too long for Modal: put it into a file, and start that",
            argument="command",
            provider=PROVIDER,
        )
    return words


def _network(spec: SandboxSpec, options: ModalOptions) -> dict[str, Any]:
    network = spec.network
    if network is None or network.mode is NetworkMode.INTERNET:
        return {}
    if network.mode is NetworkMode.NONE:
        # Blocked altogether, it could have no port with an address either.
        return {"outbound_cidr_allowlist": []} if options.encrypted_ports else {"block_network": True}
    ranges, names = hosted.only_ipv4(network.allow, SERVICE)
    return {"outbound_cidr_allowlist": ranges, **({"outbound_domain_allowlist": names} if names else {})}


def _wrong(argument: str, words: str) -> errors.ValidationError:
    return errors.ValidationError(f"{argument}: {words}", argument=argument, provider=PROVIDER)
