"""Images on the engine: pulled with progress, committed as snapshots."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import stat
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide import threads
from lowtide.engine import children_take_signals
from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    SandboxError,
    SandboxFailedError,
    SandboxUnavailableError,
)
from lowtide.providers.base import LABEL_PREFIX
from lowtide.providers.docker.client import EngineClient
from lowtide.providers.docker.errors import SERVICE, mapped

SNAPSHOT_REPOSITORY = "lowtide-snapshot"
_PROGRAM_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """One step of a pull, for whoever shows it."""

    image: str
    layer: str | None
    status: str
    current_bytes: int | None = None
    total_bytes: int | None = None


def split_reference(reference: str) -> tuple[str, str]:
    """Name and tag or digest. Without one the engine would fetch every tag there is."""
    if "@" in reference:
        name, _, digest = reference.partition("@")
        return name, digest
    head, colon, tag = reference.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (reference, "latest")


async def pull(
    client: EngineClient,
    reference: str,
    config_directory: Path,
    on_progress: Callable[[PullProgress], None] | None = None,
) -> None:
    name, tag = split_reference(reference)
    registry = (
        name.split("/", 1)[0]
        if "/" in name and re.search(r"[.:]|^localhost$", name.split("/", 1)[0])
        else "docker.io"
    )
    headers = {}
    login = await credentials(config_directory, registry)
    if login:
        headers["X-Registry-Auth"] = base64.urlsafe_b64encode(json.dumps(login).encode()).decode()
    options = {"fromImage": name, "tag": tag}
    try:
        with mapped():
            async with client.stream("POST", "images/create", params=options, headers=headers) as answer:
                async for line in answer.content:
                    if line.strip():
                        _step(reference, json.loads(line), on_progress)
    except (SandboxFailedError, SandboxUnavailableError):  # the second: the engine itself does not answer
        raise
    except AuthenticationError as error:
        words = f"{registry} refused to give {reference}: log in with `docker login {registry}` ({error})"
        raise SERVICE.error(AuthenticationError, words) from error
    except LowtideError as error:
        raise _not_pulled(reference, str(error)) from error


def _step(reference: str, step: dict[str, Any], on_progress: Callable[[PullProgress], None] | None) -> None:
    if "error" in step:
        raise _not_pulled(reference, str(step["error"]))
    if on_progress is not None:
        detail = step.get("progressDetail") or {}
        on_progress(
            PullProgress(
                image=reference,
                layer=step.get("id"),
                status=str(step.get("status", "")),
                current_bytes=detail.get("current"),
                total_bytes=detail.get("total"),
            )
        )


def _not_pulled(reference: str, words: str) -> SandboxFailedError:
    words = f"the image {reference} is not on the engine and could not be pulled: {words}"
    return SERVICE.error(SandboxFailedError, words, reason="image-pull")


async def credentials(config_directory: Path, registry: str) -> dict[str, str] | None:
    """The user's docker login for a registry: from config.json or the credential program it names."""
    try:
        config = json.loads((config_directory / "config.json").read_text())
    except (OSError, ValueError):
        return None
    names = (
        (registry, f"https://{registry}")
        if registry != "docker.io"
        else ("https://index.docker.io/v1/", "docker.io")
    )
    for name in names:
        program = config.get("credHelpers", {}).get(name) or config.get("credsStore")
        if program and (login := await _ask_program(str(program), name)):
            return login
        entry = config.get("auths", {}).get(name)
        if entry and entry.get("auth"):
            user, _, password = base64.b64decode(entry["auth"]).decode().partition(":")
            if entry.get("identitytoken"):
                return {"identitytoken": entry["identitytoken"], "serveraddress": name}
            return {"username": user, "password": password, "serveraddress": name}
    return None


async def _ask_program(program: str, registry: str) -> dict[str, str] | None:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", program):
        return None
    try:
        login = json.loads(await asyncio.to_thread(_run_program, program, registry))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if login.get("Username") == "<token>":
        return {"identitytoken": login["Secret"], "serveraddress": registry}
    return (
        {"username": login["Username"], "password": login["Secret"], "serveraddress": registry}
        if "Secret" in login
        else None
    )


def _run_program(program: str, registry: str) -> bytes:
    with children_take_signals():
        done = threads.run_process(
            [f"docker-credential-{program}", "get"],
            input=registry.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PROGRAM_SECONDS,
        )
    return bytes(done.stdout)


async def commit(client: EngineClient, container_id: str, sandbox_id: str, name: str) -> str:
    """Make an image of the container's files; the id is what `SandboxSpec.snapshot` takes."""
    # The tag is for people and for `list_snapshots`; never the same twice, or the older image would lose
    # its only name and nobody would find it again.
    tag = f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)[:100].lstrip('.-') or 'snapshot'}-{secrets.token_hex(4)}"
    with mapped(sandbox_id):
        answer = await client.container(container_id).commit(
            repository=SNAPSHOT_REPOSITORY,
            tag=tag,
            pause=True,
            config={"Labels": {}},  # Podman wants a body
        )
    identity = str(answer.get("Id") or answer.get("ID"))
    return identity if identity.startswith("sha256:") else f"sha256:{identity}"


async def blocks_engine(client: EngineClient, container_id: str) -> str | None:
    """The path of a container at which the engine would wait for ever when it starts it, and every later request about the
    container with it: a FIFO or a device that the engine reads to find the user. None: there is no such."""
    for path in ("/etc/passwd", "/etc/group"):
        if await client.kind_of(container_id, path) not in (None, stat.S_IFREG, stat.S_IFDIR):
            return path
    return None


async def inherited_labels(client: EngineClient, snapshot_id: str) -> list[str]:
    """The marks of the sandbox a snapshot was taken from: the engine copies them from container to image
    and from image to container, and a new sandbox must not carry another one's."""
    answer = await client.docker.images.inspect(snapshot_id)
    labels = answer.get("Config", {}).get("Labels") or {}
    return [key for key in labels if key.startswith(LABEL_PREFIX)]


async def delete_snapshot(client: EngineClient, snapshot_id: str) -> bool:
    """Only what we committed: other images are not ours to remove."""
    import aiodocker

    with mapped():
        try:
            answer = await client.docker.images.inspect(snapshot_id)
            if not _is_snapshot(answer):
                return False
            await client.docker.images.delete(answer["Id"], force=False)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return False
            if error.status == 409:
                words = f"snapshot {snapshot_id} is in use: {error.message}"
                raise SERVICE.error(SandboxError, words) from error
            raise
    return True


async def list_snapshots(client: EngineClient) -> Sequence[str]:
    with mapped():
        answer = await client.docker.images.list()
    found = [str(image["Id"]) for image in answer if _is_snapshot(image)]
    return [one if one.startswith("sha256:") else f"sha256:{one}" for one in found]


def _is_snapshot(image: dict[str, Any]) -> bool:
    names = (str(tag).rpartition(":")[0].rpartition("/")[2] for tag in image.get("RepoTags") or ())
    return any(name == SNAPSHOT_REPOSITORY for name in names)
