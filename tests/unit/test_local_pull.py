"""Pulling images for the local provider, from a real registry on loopback."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    MissingDependencyError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.images.pull import Reference
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local import LocalProvider, container_image

sys.path.insert(0, str(Path(__file__).parent))
from local_registry import INDEX, OWN, PASSWORD, PROGRAM, USER, RunningRegistry, registry, tar
from local_sandbox import read, run, spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
needs_registry = pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed")

BASE = tar(
    ("etc", None, {}), ("tmp", None, {}), ("old", None, {}), ("etc/gone", b"x", {}), ("old/a", b"a", {})
)
UPPER = tar(
    ("etc/.wh.gone", b"", {}),
    ("old/.wh..wh..opq", b"", {}),
    ("old/b", b"b", {}),
    ("etc/new", b"new", {"uid": 5, "gid": 5}),
)


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registry(tmp_path_factory.mktemp("registry") / "r") as running:
        yield running


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "home/local/images", None)


def leftovers(store: ImageStore) -> set[str]:
    """What is there beside images, whole layers and locks."""
    found = set()
    for top in (store.directory, store.layers.directory):
        if top.is_dir():
            for name in os.listdir(top):
                if name.startswith(".") and name != ".layers" and not name.endswith("lock"):
                    found.add(name)
    return found


@needs_registry
async def test_a_sandbox_stands_on_a_pulled_image(provider: LocalProvider, remote: RunningRegistry) -> None:
    remote.push("team/app", "1", [BASE, UPPER], Env=["FROM=image"], WorkingDir="/work")
    name = f"{remote.address}/team/app:1"
    made = await provider.create(spec(image=name))  # it is not in the store: create pulls it
    names = {entry.name for entry in await provider.list_dir(made.sandbox_id, "/etc")}
    assert "new" in names
    assert "gone" not in names
    assert [entry.name for entry in await provider.list_dir(made.sandbox_id, "/old")] == ["b"]
    assert await read(provider, made.sandbox_id, "/etc/new") == b"new"
    assert (await provider.stat(made.sandbox_id, "/work")).kind == "directory"
    assert [image.name for image in provider.images.images()] == [name]
    assert (await run(provider, made.sandbox_id, "sh"))[0] == 127  # and on nothing of this machine


@needs_registry
def test_images_share_their_layers_and_the_last_one_takes_them_away(
    store: ImageStore, remote: RunningRegistry
) -> None:
    remote.push("shared/one", "1", [BASE])
    remote.push("shared/two", "1", [BASE, UPPER])
    one, two = f"{remote.address}/shared/one:1", f"{remote.address}/shared/two:1"
    store.pull(one)
    first = container_image.base_layers(store, one)
    assert first is not None
    inode = os.stat(first.root[0]).st_ino
    store.pull(two)
    second = container_image.base_layers(store, two)
    assert second is not None
    assert second.root[0] == first.root[0]
    assert os.stat(second.root[0]).st_ino == inode
    assert store.remove(two) is True
    assert not Path(second.root[1]).exists()
    assert Path(first.root[0]).is_dir()
    assert store.remove(one) is True
    assert not Path(first.root[0]).exists()
    assert not leftovers(store)


@needs_registry
def test_pulling_again_fetches_only_what_has_changed(store: ImageStore, remote: RunningRegistry) -> None:
    remote.push("moving/app", "latest", [BASE])
    name = f"{remote.address}/moving/app"
    assert len(store.pull(name).layers) == 1
    created = store.pull(name).created_at
    assert store.images()[0].created_at == created  # the same: nothing was replaced
    remote.push("moving/app", "latest", [BASE, UPPER])
    assert len(store.pull(name).layers) == 2


@needs_registry
def test_an_index_is_resolved_for_this_machine(store: ImageStore, remote: RunningRegistry) -> None:
    other = remote.push("many/app", "other", [BASE])
    own = remote.push("many/app", "own", [BASE, UPPER])
    entries = [
        {**other, "platform": {"architecture": "s390x", "os": "linux"}},
        {**own, "platform": {"architecture": OWN, "os": "linux"}},
    ]
    index = remote.put_manifest(
        "many/app", "1", {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    )
    assert len(store.pull(f"{remote.address}/many/app:1").layers) == 2
    assert len(store.pull(f"{remote.address}/many/app@{index['digest']}").layers) == 2
    remote.put_manifest("many/app", "2", {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries[:1]})
    with pytest.raises(ValidationError, match="s390x"):
        store.pull(f"{remote.address}/many/app:2")


@needs_registry
def test_a_layer_that_is_not_what_it_says_is_refused(store: ImageStore, remote: RunningRegistry) -> None:
    secret = tar(("etc", None, {}), ("etc/who", b"honest", {}))
    manifest = remote.push("changed/app", "1", [BASE, secret])
    document = json.loads(remote.blob_file(manifest["digest"]).read_bytes())
    file = remote.blob_file(document["layers"][1]["digest"])
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValidationError, match="is not that"):
        store.pull(f"{remote.address}/changed/app:1")
    assert store.images() == []
    assert not leftovers(store)
    file.write_bytes(data[:-9])
    with pytest.raises((ValidationError, SandboxUnavailableError)):
        store.pull(f"{remote.address}/changed/app:1")
    assert store.images() == []


@needs_registry
def test_a_pinned_manifest_is_checked_too(store: ImageStore, remote: RunningRegistry) -> None:
    manifest = remote.push("pinned/app", "1", [BASE])
    name = f"{remote.address}/pinned/app@{manifest['digest']}"
    assert len(store.pull(name).layers) == 1
    store.remove(name)
    file = remote.blob_file(manifest["digest"])
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises((ValidationError, SandboxUnavailableError)):
        store.pull(name)


@needs_registry
@pytest.mark.parametrize(
    "hostile",
    [
        tar(("../escape", b"x", {})),
        tar(("a", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("a/../../escape", b"x", {})),
        tar(("hard", None, {"type": tarfile.LNKTYPE, "linkname": "../../../../etc/passwd"})),
    ],
    ids=["dots", "dots behind a link", "hard link"],
)
def test_a_hostile_layer_is_refused_and_leaves_nothing(
    store: ImageStore, remote: RunningRegistry, tmp_path: Path, hostile: bytes
) -> None:
    remote.push("hostile/app", "1", [hostile])
    with pytest.raises(ValidationError):
        store.pull(f"{remote.address}/hostile/app:1")
    assert store.images() == []
    assert not leftovers(store)
    assert not list(tmp_path.rglob("escape"))


@needs_registry
def test_links_and_devices_in_a_layer_stay_harmless(
    store: ImageStore, remote: RunningRegistry, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    layer = tar(
        ("to", None, {"type": tarfile.SYMTYPE, "linkname": str(outside)}),
        (str(outside).lstrip("/"), None, {}),
        ("to/file", b"inside", {}),
        ("disk", None, {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0}),
    )
    remote.push("links/app", "1", [layer])
    store.pull(f"{remote.address}/links/app:1")
    found = container_image.base_layers(store, f"{remote.address}/links/app:1")
    assert found is not None
    assert not any(outside.iterdir())
    assert Path(found.root[0], str(outside).lstrip("/"), "file").read_bytes() == b"inside"
    assert not os.path.lexists(f"{found.root[0]}/disk")


@needs_registry
def test_credentials_are_the_ones_of_docker(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import base64

    with registry(tmp_path / "closed", login=True) as closed:
        closed.push("private/app", "1", [BASE])
        name = f"{closed.address}/private/app:1"
        with pytest.raises(AuthenticationError, match="docker login"):
            store.pull(name)
        folder = tmp_path / "user/.docker"
        folder.mkdir()
        token = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (folder / "config.json").write_text(json.dumps({"auths": {closed.address: {"auth": token}}}))
        assert len(store.pull(name).layers) == 1
        store.remove(name)
        wrong = base64.b64encode(f"{USER}:wrong".encode()).decode()
        (folder / "config.json").write_text(json.dumps({"auths": {closed.address: {"auth": wrong}}}))
        with pytest.raises(AuthenticationError) as refused:
            store.pull(name)
        assert "wrong" not in str(refused.value)
        helper = tmp_path / "bin/docker-credential-test"
        helper.parent.mkdir()
        helper.write_text(
            f'#!/bin/sh\nread host\n[ "$host" = "{closed.address}" ] || exit 1\n'
            f'echo \'{{"Username": "{USER}", "Secret": "{PASSWORD}"}}\'\n'
        )
        helper.chmod(0o755)
        monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
        (folder / "config.json").write_text(json.dumps({"credHelpers": {closed.address: "test"}}))
        assert len(store.pull(name).layers) == 1


@needs_registry
def test_a_killed_pull_leaves_no_image_and_the_next_one_cleans_up(
    store: ImageStore, remote: RunningRegistry, tmp_path: Path
) -> None:
    many = tar(*((f"file-{number}", os.urandom(200), {}) for number in range(20_000)))
    remote.push("large/app", "1", [many])
    name = f"{remote.address}/large/app:1"
    program = (
        "import sys; from pathlib import Path; from lowtide.providers.images.store import ImageStore\n"
        "ImageStore(Path(sys.argv[1]), None).pull(sys.argv[2])"
    )
    pulling = subprocess.Popen([sys.executable, "-c", program, str(store.directory), name])
    for _ in range(4000):
        if leftovers(store):  # it unpacks
            break
        assert pulling.poll() is None
        time.sleep(0.005)
    pulling.send_signal(signal.SIGKILL)
    pulling.wait()
    assert store.images() == []
    assert leftovers(store)
    assert len(store.pull(name).layers) == 1
    assert not leftovers(store)


@needs_registry
def test_what_is_not_there_is_said(store: ImageStore, remote: RunningRegistry) -> None:
    with pytest.raises(ValidationError, match="has no image"):
        store.pull(f"{remote.address}/no/such:1")
    for bad in ("UPPER", "a b", "x/../y", "-x", "a@sha256:1", ""):
        with pytest.raises(ValidationError, match="reference"):
            store.pull(bad)


def test_a_registry_that_cannot_be_reached_is_no_wait(store: ImageStore) -> None:
    with pytest.raises(SandboxUnavailableError, match="cannot be reached"):
        store.pull("127.0.0.1:9/app:1")
    with pytest.raises(ValidationError, match="image import"):
        container_image.base_layers(store, "127.0.0.1:9/app:1")


def test_this_machine_stands_in_for_its_own_python(store: ImageStore) -> None:
    name = f"python:{sys.version_info.major}.{sys.version_info.minor}-test{os.getpid()}"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            assert container_image.base_layers(store, name) is None
        except ValidationError:
            pytest.skip("Docker Hub can be reached from here, and has no such tag")
        assert container_image.base_layers(store, name) is None
    assert len([w for w in seen if "stands in" in str(w.message)]) == 1


def test_a_missing_extra_names_its_installation(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oras.provider", None)
    with pytest.raises(MissingDependencyError) as missing:
        store.pull("127.0.0.1:9/app:1")
    assert missing.value.install == "pip install 'lowtide[oci]'"


@pytest.mark.parametrize(
    ("text", "host", "path", "tag"),
    [
        ("python:3.11", "registry-1.docker.io", "library/python", "3.11"),
        ("docker.io/team/app", "registry-1.docker.io", "team/app", "latest"),
        ("ghcr.io/team/app:x", "ghcr.io", "team/app", "x"),
        ("localhost:5000/app", "localhost:5000", "app", "latest"),
    ],
)
def test_references_are_read_as_docker_reads_them(text: str, host: str, path: str, tag: str) -> None:
    reference = Reference.parse(text)
    assert (reference.registry, reference.path, reference.tag) == (host, path, tag)
    assert reference.plain is text.startswith("localhost")


@pytest.mark.parametrize("where", ["token", "redirect"])
def test_an_answer_without_an_end_is_given_up(store: ImageStore, where: str) -> None:
    """A token, and what comes with a redirect, are read whole by the libraries."""
    sent = 0

    class Endless(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing to the test's output."""

        def do_GET(self) -> None:
            nonlocal sent
            own = f"http://127.0.0.1:{server.server_port}"
            if self.path == "/v2/":
                self.send_response(200)
                self.end_headers()
                return
            if self.path.startswith("/token") or where == "redirect":
                self.send_response(302 if where == "redirect" else 200)
                self.send_header("Location", f"{own}/v2/")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for _ in range(64):  # far more than any document, and little enough for this machine
                        self.wfile.write(b" " * (1 << 20))
                        sent += 1
                return
            self.send_response(401)
            self.send_header("WWW-Authenticate", f'Bearer realm="{own}/token",service="x",scope="y"')
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(LowtideError, match="an answer of more than"):
            store.pull(f"127.0.0.1:{server.server_port}/a/b:latest")
        server.shutdown()
    assert sent < 64
