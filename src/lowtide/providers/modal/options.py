"""What only Modal understands about one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_SECONDS = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalOptions:
    """Goes in `SandboxSpec.options`. Everything has Modal's own default, but for the timeout."""

    image: Any = None
    """A `modal.Image`; not together with ``container_image``."""
    dockerfile: str | None = None
    """The path of a Dockerfile to build the image from."""
    timeout_seconds: int = LONGEST_SECONDS
    """Modal's fixed end, which nothing moves; a day at most. A lease that is not renewed ends long before."""
    idle_timeout_seconds: int | None = None
    """Ends it after so long without a command or a connection. Nothing counts while this process is connected to it."""
    encrypted_ports: tuple[int, ...] = ()
    """Ports with a public address with TLS, which `url` then gives. Others are reached from here alone."""
    gpu: str | None = None
    cloud: str | None = None
    region: str | None = None
    secrets: tuple[Any, ...] = ()
    """`modal.Secret` objects whose variables the sandbox gets."""
    volumes: Mapping[str, Any] = field(default_factory=dict)
    """`modal.Volume` objects by where they are mounted."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """More tags beside lowtide's own, whose names begin with ``lowtide-``."""
