"""What only CoreWeave understands about one sandbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowtide.providers.hosted import asked_for


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreWeaveOptions:
    """Goes in `SandboxSpec.options`. Each is what cwsandbox's keyword of that name takes: its objects, or dicts."""

    resources: Any = None
    """``{"requests": …, "limits": …, "gpu": …}``, in place of lowtide's own ``resources``."""
    network: Any = None
    """cwsandbox's `NetworkOptions`, in place of lowtide's own ``network``."""
    services: Sequence[Any] | None = None
    """Ports with a public address: ``[{"port": 8080, "visibility": "public"}]``. `Sandbox.url` needs none."""
    secrets: Sequence[Any] | None = None
    """From a secret store into a variable: ``[{"store": "wandb", "name": "HF_TOKEN"}]``."""
    volumes: Sequence[Any] | None = None
    file_system_snapshot: Any = None
    """The scratch volume that `snapshot` is of, and from one starts with: ``{"mount_path": "/workspace"}``."""
    placement_mode: str | None = None
    """``"serverless"`` or ``"cks"``."""
    runner_ids: Sequence[str] | None = None
    runtime_class: str | None = None
    security_context: Any = None
    object_storage_access: Any = None
    image_pull_credentials: Any = field(default=None, repr=False)
    mounted_files: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """Those that were given, as cwsandbox's keywords."""
        given = asked_for({one.name: getattr(self, one.name) for one in dataclasses.fields(self)})
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
