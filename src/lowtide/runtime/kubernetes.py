"""The runtime on the kubernetes provider."""

from __future__ import annotations

from typing import ClassVar

from lowtide.runtime.base import Runtime


class KubernetesRuntime(Runtime):
    """Actions through the action server in a kubernetes sandbox."""

    provider: ClassVar[str] = "kubernetes"
