"""What a `container_image` stands for on this machine, and which sandboxes stand on one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from pathlib import Path

from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local import rooms_on_disk
from lowtide.providers.local.base_layers import BaseLayers
from lowtide.providers.local.sandbox_directory import sandbox_directories

_PYTHON = re.compile(r"(?:(?:docker\.io/)?library/|docker\.io/)?python:(\d+\.\d+)(?:[.-][\w.-]*)?$")
_warned: set[str] = set()


def base_layers(store: ImageStore, image: str) -> BaseLayers | None:
    """What a sandbox on this image stands on; None: this machine's own Python stands in."""
    if image.startswith("/"):
        return _root_filesystem(image)
    found = store.image(image)
    missing: LowtideError | None = None
    if found is None:
        try:
            found = store.pull(image, only_missing=True)
        except (SandboxUnavailableError, MissingDependencyError, AuthenticationError) as error:
            missing = error
    if found is not None:
        return BaseLayers(
            root=found.layers,
            environment=found.configuration.environment,
            working_dir=found.configuration.working_dir,
            record={"base": image},
        )
    match = _PYTHON.match(image)
    if match and match[1] == f"{sys.version_info.major}.{sys.version_info.minor}":
        if image not in _warned:
            _warned.add(image)
            warnings.warn(
                f"the image {image} is not in the local store ({missing}): this machine's own Python {match[1]} "
                f"stands in. `lowtide image pull {image}` or `lowtide image import {image} FILE.tar` puts the "
                "real one there",
                stacklevel=2,
            )
        return None
    raise ValidationError(
        f"the image {image} is not in the local store ({missing}). Run `lowtide image import {image} FILE.tar` "
        f"with a file from `docker save`, or `lowtide image pull {image}`; a root filesystem directory works too",
        argument="container_image",
        provider="local",
    ) from missing


def _root_filesystem(path: str) -> BaseLayers:
    real = os.path.realpath(path)
    if not os.path.isdir(real) or real == "/":
        raise ValidationError(
            f"{path} is not a root filesystem directory", argument="container_image", provider="local"
        )
    return BaseLayers(root=(real,), foreign=(real,), working_dir="/", record={"base": path})


def in_use(home: Path, image: str) -> list[str]:
    """The sandboxes and snapshots that stand on it. Rooms on it are cleared away: nobody lives there yet."""
    rooms_on_disk.clear(home, image)
    users = [
        directory.sandbox_id
        for directory in sandbox_directories(home / "sandboxes")
        if (directory.spec() or {}).get("foundation", {}).get("base") == image
    ]
    for manifest in (home / "snapshots").glob("[!.]*/manifest.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(manifest.read_bytes()).get("base") == image:
                users.append(manifest.parent.name)
    return users
