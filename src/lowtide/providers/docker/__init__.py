"""The Docker provider: one container per sandbox on a Docker or Podman engine."""

from lowtide.providers.docker.options import DockerOptions, Mount, PullPolicy
from lowtide.providers.docker.provider import DockerProvider

__all__ = ["DockerOptions", "DockerProvider", "Mount", "PullPolicy"]
