"""The real container engines that tests run on, and the one reason for skipping without them."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit

import pytest

from lowtide.providers.docker.endpoint import resolve

IMAGE = os.environ.get("LOWTIDE_TEST_IMAGE", "lowtide-test:latest")
DOCKER = resolve(os.environ).url
PODMAN = os.environ.get("LOWTIDE_TEST_PODMAN", "")
REGISTRY = os.environ.get("LOWTIDE_TEST_REGISTRY", "")


@cache
def answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(parts.path)
        elif parts.hostname:
            socket.create_connection((parts.hostname, parts.port or 2375), 5).close()
        else:
            return False
    except OSError:
        return False
    return True


def needs(url: str, name: str) -> list[pytest.MarkDecorator]:
    """The marks of a module that runs on this engine."""
    reason = f"no {name} engine: scripts/engines up {name}, then eval its exports"
    return [pytest.mark.engine, pytest.mark.skipif(not answers(url), reason=reason)]


needs_docker = needs(DOCKER, "docker")
needs_podman = needs(PODMAN, "podman")
