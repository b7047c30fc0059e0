"""An image's configuration: everything it says of itself, checked exactly as a user's argument is.

It is checked when an image comes in, and again when it is read from the store: an older version may have
let in what is refused now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide import arguments
from lowtide.errors import ValidationError

_MAX_BYTES = 1 << 20  # all of its words together; the kernel takes little more in one command


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    environment: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    user: str | None = None
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[str, ...] = ()

    @classmethod
    def from_oci(cls, config: Any) -> Configuration:
        """From the object an image carries. Raises ValidationError, and says which part of it is wrong."""
        if not isinstance(config, Mapping):
            arguments.refuse("configuration", f"must be an object, not {type(config).__name__}")
        variables = arguments.strings("Env", config.get("Env") or ())
        volumes = config.get("Volumes") or {}
        if not isinstance(volumes, Mapping):
            arguments.refuse("Volumes", f"must be an object, not {type(volumes).__name__}")
        return cls.checked(
            environment=dict(item.partition("=")[::2] for item in variables),
            working_dir=config.get("WorkingDir") or "/",
            user=config.get("User") or None,
            entrypoint=config.get("Entrypoint") or (),
            command=config.get("Cmd") or (),
            labels=config.get("Labels") or {},
            volumes=list(volumes),
        )

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Configuration:
        """From what the store has written down."""
        return cls.checked(
            environment=manifest.get("environment") or {},
            working_dir=manifest.get("working_dir") or "/",
            user=manifest.get("user"),
            entrypoint=manifest.get("entrypoint") or (),
            command=manifest.get("command") or (),
            labels=manifest.get("labels") or {},
            volumes=manifest.get("volumes") or (),
        )

    @classmethod
    def checked(cls, **said: Any) -> Configuration:
        environment = arguments.environment("environment", said["environment"])
        if not isinstance(said["labels"], Mapping):
            arguments.refuse("labels", f"must be an object, not {type(said['labels']).__name__}")
        names = arguments.strings("labels", list(said["labels"]))
        values = arguments.strings("labels", list(said["labels"].values()))
        found = cls(
            environment=environment,
            working_dir=arguments.absolute_path("working_dir", said["working_dir"]),
            user=arguments.text("user", said["user"]) if said["user"] is not None else None,
            entrypoint=arguments.strings("entrypoint", said["entrypoint"]),
            command=arguments.strings("command", said["command"]),
            labels=dict(zip(names, values, strict=True)),
            volumes=tuple(arguments.absolute_path("volumes", path) for path in said["volumes"]),
        )
        if found._size() > _MAX_BYTES:
            arguments.refuse("configuration", f"must not hold more than {_MAX_BYTES} bytes of text")
        return found

    def as_manifest(self) -> dict[str, Any]:
        return {
            "environment": dict(self.environment),
            "working_dir": self.working_dir,
            "user": self.user,
            "entrypoint": list(self.entrypoint),
            "command": list(self.command),
            "labels": dict(self.labels),
            "volumes": list(self.volumes),
        }

    def _size(self) -> int:
        words = [*self.environment, *self.environment.values(), *self.entrypoint, *self.command]
        words += [*self.labels, *self.labels.values(), *self.volumes, self.working_dir, self.user or ""]
        return sum(len(word) + 1 for word in words)


def unusable(image: str, why: object, advice: str = "") -> ValidationError:
    """For whatever an image may not be."""
    return ValidationError(
        f"the image {image} cannot be used: {why}{advice}", argument="container_image", provider="local"
    )
