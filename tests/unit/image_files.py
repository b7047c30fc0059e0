"""What the tests of images share: layers as tars, and files as `docker save` and OCI tools write them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

OWN = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
DIRECTORY: dict[str, Any] = {"type": tarfile.DIRTYPE, "mode": 0o755}


def layer(*members: tuple[str, bytes | None, dict[str, Any]]) -> bytes:
    """A tar of (name, content, what its entry is beside that)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, more in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content) if content is not None else None)
    return out.getvalue()


def docker_save(path: Path, layers: list[bytes], config: Any) -> Path:
    files: list[tuple[str, bytes | None, dict[str, Any]]] = [
        (f"{number}/layer.tar", data, {}) for number, data in enumerate(layers)
    ]
    names = [name for name, _, _ in files]
    files.append(("config.json", json.dumps({"config": config}).encode(), {}))
    files.append(("manifest.json", json.dumps([{"Config": "config.json", "Layers": names}]).encode(), {}))
    path.write_bytes(layer(*files))
    return path


def blob(document: Any) -> tuple[dict[str, Any], tuple[str, bytes, dict[str, Any]]]:
    """A descriptor, and the file of an OCI layout that it describes."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    return {"digest": f"sha256:{digest}", "size": len(data)}, (f"blobs/sha256/{digest}", data, {})
