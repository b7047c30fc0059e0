"""The real container engines that tests run on, and the one reason for skipping without them."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import socket
import subprocess
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pytest

from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers.base import Labels, ProcessSpec, SandboxSpec
from lowtide.providers.docker import DockerProvider
from lowtide.providers.docker.access import resolve
from lowtide.providers.inside.program import program

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

both_engines = [
    pytest.param(DOCKER, id="docker", marks=needs_docker),
    pytest.param(PODMAN, id="podman", marks=needs_podman),
]


class Boxes:
    """Sandboxes at the level of the seam, on one engine, that end with the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.provider = DockerProvider.connect({**os.environ, "DOCKER_HOST": url})
        self.ledger_id = secrets.token_hex(8)
        self.made: list[SandboxSpec] = []

    def spec(self, **keywords: Any) -> SandboxSpec:
        keywords.setdefault("image", IMAGE)
        keywords.setdefault("lifetime_seconds", 600.0)
        tags = keywords.pop("tags", ())
        labels = Labels(lease_id=new_lease_id(), ledger_id=self.ledger_id, owner="test", tags=tags)
        spec = SandboxSpec(labels=labels, **keywords)
        self.made.append(spec)
        return spec

    async def make(self, **keywords: Any) -> str:
        return (await self.provider.create(self.spec(**keywords))).sandbox_id

    async def run(self, sandbox_id: str, *argv: str, **keywords: Any) -> tuple[int, str, str]:
        handle = await self.provider.start_process(sandbox_id, ProcessSpec(argv=argv, **keywords))
        streams = {1: b"", 2: b""}
        async for number, data in handle.output():
            streams[number] += data
        code = await handle.wait()
        await handle.aclose()
        return code, streams[1].decode(), streams[2].decode()

    async def gone(self, sandbox_id: str, *, seconds: float = 60.0) -> bool:
        """Whether the engine lists it no more, now or soon. The provider's memory is not asked."""
        for _ in range(int(seconds * 10)):
            if docker(self.url, "ps", "-aq", "--no-trunc", "--filter", f"name=^/?{sandbox_id}$") == "":
                return True
            await asyncio.sleep(0.1)
        return False

    async def aclose(self) -> None:
        await asyncio.gather(*(self.provider.destroy(spec.lease_id) for spec in self.made))
        left = [info async for info in self.provider.list({"lowtide-ledger": self.ledger_id})]
        await self.provider.aclose()
        assert left == []


@asynccontextmanager
async def boxes_on(url: str) -> AsyncIterator[Boxes]:
    boxes = Boxes(url)
    try:
        yield boxes
    finally:
        await boxes.aclose()


def docker(url: str, *arguments: str, **keywords: Any) -> str:
    """The docker command, on that engine: somebody else's hand."""
    environ = {**os.environ, "DOCKER_HOST": url}
    done = subprocess.run(["docker", *arguments], env=environ, check=True, capture_output=True, **keywords)
    return done.stdout.decode().strip()


def import_bare_image(url: str, name: str) -> None:
    """An image that holds one static program and nothing else: no shell, no libc, no /etc."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        data = program(os.uname().machine)
        entry = tarfile.TarInfo("only")
        entry.size, entry.mode = len(data), 0o755
        tar.addfile(entry, io.BytesIO(data))
    docker(url, "import", "-", name, input=out.getvalue())
