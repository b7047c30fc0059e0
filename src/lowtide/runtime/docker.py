"""The runtime on the docker provider."""

from __future__ import annotations

from typing import ClassVar

from lowtide.runtime.base import Runtime


class DockerRuntime(Runtime):
    """Actions through the action server in a docker sandbox."""

    provider: ClassVar[str] = "docker"
