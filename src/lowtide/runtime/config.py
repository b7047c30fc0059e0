"""What a runtime is made with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lowtide import validate
from lowtide.errors import ValidationError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What a runtime's sandbox is made with, and how long things may take."""

    container_image: str | None = None
    working_dir: str | None = None
    """Where the agent works; made if it is not there. None: where the provider starts commands."""
    environment_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workspace_mount: str | None = None
    """A directory of this machine to work in. No provider here mounts one: it is warned about and left out."""
    provider_options: Mapping[str, Any] | Any | None = None
    sandbox: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Any other keyword of `Sandbox`: tags, resources, network…"""
    connect_timeout_seconds: float = 120.0
    """For all of `connect`: create, start, reach."""
    transport: str = "inside"
    """How the action server is reached: "inside" needs no address of the sandbox, "url" takes the provider's."""

    def __post_init__(self) -> None:
        if self.transport not in ("inside", "url"):
            raise ValidationError(
                f"transport must be 'inside' or 'url', not {self.transport!r}", argument="transport"
            )
        validate.seconds("connect_timeout_seconds", self.connect_timeout_seconds)

    @classmethod
    def of(cls, config: RuntimeConfig | Mapping[str, Any] | None) -> RuntimeConfig:
        if config is None:
            return cls()
        if isinstance(config, RuntimeConfig):
            return config
        known = {field.name for field in dataclasses.fields(cls)}
        for key in config:
            if key not in known:
                raise ValidationError(
                    f"unknown setting {key!r}; known are {', '.join(sorted(known))}", argument="config"
                )
        return cls(**config)
