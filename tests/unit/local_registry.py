"""A real registry on loopback for the tests of pulling: Debian's docker-registry, and a way to put images in it."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD = "alice", "hunter2"
_HTPASSWD = "alice:$2b$04$RGsvYY8Se51ljkka2v9.1.OvXRqZsG99jXAkvQDH8Z2dIUuBiSkbi\n"
OWN = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
INDEX, MANIFEST = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"


class RunningRegistry:
    def __init__(self, address: str, storage: Path, login: bool) -> None:
        self.address, self.storage = address, storage
        self._headers = {}
        if login:
            token = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            self._headers = {"Authorization": f"Basic {token}"}

    def ask(
        self, method: str, path: str, data: bytes | None = None, kind: str = "application/octet-stream"
    ) -> Any:
        url = path if path.startswith("http") else f"http://{self.address}{path}"
        headers = {**self._headers, "Content-Type": kind}
        request = urllib.request.Request(url, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers

    def put_blob(self, name: str, data: bytes, kind: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        where = self.ask("POST", f"/v2/{name}/blobs/uploads/", b"")["Location"]
        self.ask("PUT", f"{where}{'&' if '?' in where else '?'}digest={digest}", data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def put_manifest(self, name: str, tag: str, document: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.ask("PUT", f"/v2/{name}/manifests/{tag or digest}", data, document["mediaType"])
        return {"mediaType": document["mediaType"], "digest": digest, "size": len(data)}

    def push(self, name: str, tag: str, layers: list[bytes], **config: Any) -> dict[str, Any]:
        """One image from layers as plain tars; the registry holds them gzipped."""
        diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        document = {
            "architecture": OWN,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        settings = self.put_blob(
            name, json.dumps(document).encode(), "application/vnd.oci.image.config.v1+json"
        )
        packed = [gzip.compress(layer, 1, mtime=0) for layer in layers]
        blobs = [self.put_blob(name, data, "application/vnd.oci.image.layer.v1.tar+gzip") for data in packed]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": settings, "layers": blobs}
        return self.put_manifest(name, tag, manifest)

    def blob_file(self, digest: str) -> Path:
        algorithm, _, number = digest.partition(":")
        return self.storage / f"docker/registry/v2/blobs/{algorithm}/{number[:2]}/{number}/data"


@contextlib.contextmanager
def registry(directory: Path, *, login: bool = False) -> Iterator[RunningRegistry]:
    assert PROGRAM is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    directory.mkdir(parents=True)
    settings: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(directory / "storage")}},
        "http": {"addr": address},
    }
    if login:
        (directory / "htpasswd").write_text(_HTPASSWD)
        settings["auth"] = {"htpasswd": {"realm": "a test", "path": str(directory / "htpasswd")}}
    (directory / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    process = subprocess.Popen(
        [PROGRAM, "serve", str(directory / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        running = RunningRegistry(address, directory / "storage", login)
        for _ in range(600):
            try:
                running.ask("GET", "/v2/")
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None
                time.sleep(0.05)
        yield running
    finally:
        process.kill()
        process.wait()


def tar(*members: tuple[str, bytes | None, dict[str, object]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data, attributes in members:
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if data is None and "type" not in attributes:
                member.type = tarfile.DIRTYPE
            for key, value in attributes.items():
                setattr(member, key, value)
            member.size = len(data or b"")
            archive.addfile(member, io.BytesIO(data or b""))
    return out.getvalue()
