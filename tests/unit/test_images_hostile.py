"""Images made by somebody hostile: configurations, layers, archives and documents that are refused, and by name."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import LowtideError, ResourceExhaustedError, ValidationError
from lowtide.providers.images import bounds
from lowtide.providers.images.bounds import Bounds
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local import LocalProvider
from lowtide.trees.remove import remove_at

sys.path.insert(0, str(Path(__file__).parent))
from image_files import DIRECTORY, OWN, blob, docker_save, layer
from local_registry import PROGRAM, registry
from local_sandbox import spec

GOOD = layer(("etc", None, DIRECTORY), ("tmp", None, DIRECTORY), ("etc/motd", b"hello", {}))
INJECTION = "/\0--bind\0/\0/hostroot"
BAD_CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"WorkingDir": INJECTION}, "working_dir"),
    ({"WorkingDir": "relative"}, "working_dir"),
    ({"WorkingDir": ["/"]}, "working_dir"),
    ({"WorkingDir": "/\ud800"}, "working_dir"),
    ({"Env": ["A=" + INJECTION]}, "Env"),
    ({"Env": ["A\0--bind=1"]}, "Env"),
    ({"Env": ["=nothing"]}, "environment"),
    ({"Env": ["1A=x"]}, "environment"),
    ({"Env": "A=b"}, "Env"),
    ({"Env": [{"A": "b"}]}, "Env"),
    ({"Env": ["A=" + "x" * (2 << 20)]}, "configuration"),
    ({"User": "root\0--uid"}, "user"),
    ({"User": 0.5}, "user"),
    ({"Cmd": ["sh\0-c"]}, "command"),
    ({"Cmd": "sh"}, "command"),
    ({"Entrypoint": ["\0"]}, "entrypoint"),
    ({"Entrypoint": {"a": "b"}}, "entrypoint"),
    ({"Labels": {"a": "\0"}}, "labels"),
    ({"Labels": ["a"]}, "labels"),
    ({"Labels": {"a": 1}}, "labels"),
    ({"Volumes": {"data\0": {}}}, "volumes"),
    ({"Volumes": {"data": {}}}, "volumes"),
    ({"Volumes": ["/data"]}, "Volumes"),
]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "local/images", None)


def nothing_left(store: ImageStore) -> bool:
    """Neither an image nor a draft of one; what was there before is still there."""
    return not [name for name in os.listdir(store.directory) if name not in (".layers", "keep")]


# ------------------------------------------------------------ configuration


@pytest.mark.parametrize(("config", "argument"), BAD_CONFIGURATIONS)
def test_a_configuration_is_checked_as_an_argument_is(
    store: ImageStore, tmp_path: Path, config: dict[str, Any], argument: str
) -> None:
    file = docker_save(tmp_path / "image.tar", [GOOD], config)
    with pytest.raises(ValidationError, match=argument):
        store.import_file("bad", file)
    assert store.images() == []


@pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed")
async def test_a_configuration_is_checked_on_a_first_pull(provider: LocalProvider, tmp_path: Path) -> None:
    with registry(tmp_path / "registry") as remote:
        remote.push("evil", "1", [GOOD], WorkingDir=INJECTION)
        remote.push("evil", "2", [GOOD], Env=["A=" + INJECTION])
        for tag in ("1", "2"):
            with pytest.raises(ValidationError, match="NUL"):
                await provider.create(spec(image=f"{remote.address}/evil:{tag}"))
    assert provider.images.images() == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("working_dir", INJECTION),
        ("environment", {"A": INJECTION}),
        ("environment", {"A\0": "b"}),
        ("command", ["\0"]),
        ("diff_ids", ["../../../../../../etc"]),
        ("diff_ids", ["sha256:" + "0" * 63 + "/"]),
        ("layers", 10_000),
        ("layers", "1"),
    ],
)
async def test_what_an_older_version_let_in_is_refused(provider: LocalProvider, key: str, value: Any) -> None:
    provider.images.add("old", [io.BytesIO(GOOD)], {})
    file = provider.images.directory / "old/manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ValidationError, match=r"image rm old"):
        await provider.create(spec(image="old"))
    [listed] = provider.images.images()
    assert listed.problem is not None
    assert provider.images.remove("old") is True


async def test_a_snapshot_of_what_an_older_version_let_in_is_refused(provider: LocalProvider) -> None:
    made = await provider.create(spec())
    taken = await provider.snapshot(made.sandbox_id, "old")
    file = provider.home / "snapshots" / taken / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "working_dir": INJECTION}))
    with pytest.raises(ValidationError, match="NUL"):
        await provider.create(spec(snapshot=taken))


async def test_nothing_with_a_nul_byte_reaches_bubblewrap(provider: LocalProvider, tmp_path: Path) -> None:
    """Below every check of arguments: where bubblewrap is executed. And it is said, and not lost on the way."""
    (tmp_path / "mark").mkdir()
    words = f"/\0--bind\0{tmp_path}/mark\0/mnt"
    with pytest.raises(LowtideError, match="NUL"):
        await provider.create(spec(working_dir=words))


# ------------------------------------------------------------ layers

LINK = {"type": tarfile.SYMTYPE}
HARD = {"type": tarfile.LNKTYPE}
REFUSED: dict[str, bytes] = {
    "whiteout of nothing": layer(("a/.wh.", b"", {})),
    "whiteout of here": layer((".wh..", b"", {})),
    "whiteout of the parent": layer((".wh...", b"", {})),
    "whiteout of the parent, deeper": layer(("a", None, DIRECTORY), ("a/.wh...", b"", {})),
    "whiteout behind a link": layer(("up", None, {**LINK, "linkname": "../.."}), ("up/.wh...", b"", {})),
    "parent": layer(("../escape", b"x", {})),
    "parent in the middle": layer(("a/../../escape", b"x", {})),
    "parent behind a link": layer(("l", None, {**LINK, "linkname": "/"}), ("l/../escape", b"x", {})),
    "hard link outside": layer(("l", None, {**HARD, "linkname": "../../../etc/passwd"})),
    "hard link to nothing": layer(("l", None, {**HARD, "linkname": "missing"})),
    "hard link to itself": layer(("l", b"x", {}), ("l", None, {**HARD, "linkname": "l"})),
    "hard link to a directory": layer(("d", None, DIRECTORY), ("l", None, {**HARD, "linkname": "d"})),
    "hard link to the layer": layer(("l", None, {**HARD, "linkname": "/"})),
    "file under a file": layer(("f", b"x", {}), ("f/g", b"y", {})),
    "file behind a dead link": layer(("l", None, {**LINK, "linkname": "gone"}), ("l/f", b"x", {})),
    "links in a circle": layer(
        ("a", None, {**LINK, "linkname": "b"}), ("b", None, {**LINK, "linkname": "a"}), ("a/f", b"x", {})
    ),
    "name longer than a name": layer(("n" * 256, b"x", {})),
    "path longer than a path": layer(("d/" * 2100 + "f", b"x", {})),
    "link longer than a path": layer(("l", None, {**LINK, "linkname": "x/" * 2100})),
    "empty link": layer(("l", None, {**LINK, "linkname": ""})),
    "whiteout longer than a name": layer((".wh." + "n" * 256, b"", {})),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_hostile_layer_is_refused_and_touches_nothing(store: ImageStore, what: str) -> None:
    store.add("keep", [io.BytesIO(GOOD)], {})
    before = sorted(str(path) for path in store.directory.parent.rglob("*"))
    with pytest.raises(ValidationError, match="layer"):
        store.add("bad", [io.BytesIO(GOOD), io.BytesIO(REFUSED[what])], {})
    assert sorted(str(path) for path in store.directory.parent.rglob("*")) == before


@pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed")
def test_a_whiteout_does_not_empty_the_layer_store(store: ImageStore, tmp_path: Path) -> None:
    with registry(tmp_path / "registry") as remote:
        remote.push("good", "1", [GOOD])
        remote.push("evil", "1", [REFUSED["whiteout of the parent"]])
        [path] = store.pull(f"{remote.address}/good:1").layers
        with pytest.raises(ValidationError):
            store.pull(f"{remote.address}/evil:1")
    assert Path(path, "etc/motd").read_bytes() == b"hello"


def test_what_is_odd_but_harmless_is_taken(store: ImageStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    odd = layer(
        ("/absolute", b"1", {}),
        ("./dot//twice", b"2", {}),
        ("twice", b"first", {}),
        ("twice", b"second", {}),
        ("dir", None, DIRECTORY),
        ("dir/in", b"x", {}),
        ("dir", b"now a file", {}),
        ("file", b"x", {}),
        ("file", None, DIRECTORY),
        ("null", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("sda", None, {"type": tarfile.BLKTYPE, "devmajor": 8}),
        ("pipe", None, {"type": tarfile.FIFOTYPE}),
        ("out", None, {**LINK, "linkname": str(outside)}),
        ("up", None, {**LINK, "linkname": "../../../../.."}),
        ("time", b"x", {"pax_headers": {"mtime": "1e300"}}),
        ("when", b"x", {"pax_headers": {"mtime": "nan"}}),
        ("whose", b"x", {"uid": 1 << 40, "gid": 1 << 40}),
        ("attribute", b"x", {"pax_headers": {"SCHILY.xattr.user.overlay.redirect": "/etc"}}),
        ("setuid", b"x", {"mode": 0o6755}),
        ("aufs/.wh..wh.plnk", b"", {}),
        ("opaque/.wh..wh..opq", b"", {}),
        ("/".join(["d"] * 1900) + "/f", b"deep", {}),
    )
    [path] = store.add("odd", [io.BytesIO(odd)], {}).layers
    top = Path(path)
    assert (top / "absolute").read_bytes() == b"1"
    assert (top / "dot/twice").read_bytes() == b"2"
    assert (top / "twice").read_bytes() == b"second"
    assert (top / "dir").read_bytes() == b"now a file"
    assert (top / "file").is_dir()
    assert not (top / "null").exists()
    assert not (top / "sda").exists()
    assert stat.S_ISFIFO((top / "pipe").stat().st_mode)
    assert os.listxattr(top / "attribute") == []
    assert os.listxattr(top / "opaque") == ["user.overlay.opaque"]
    assert list(outside.iterdir()) == []
    assert store.remove("odd") is True


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\0"])
def test_the_primitive_that_removes_takes_only_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "top/keep").mkdir(parents=True)
    fd = os.open(tmp_path / "top", os.O_RDONLY)
    try:
        with pytest.raises(ValueError, match="not the name"):
            remove_at(fd, name)
    finally:
        os.close(fd)
    assert (tmp_path / "top/keep").is_dir()


# ------------------------------------------------------------ bounds


def test_an_image_has_so_many_bytes_entries_and_layers(tmp_path: Path) -> None:
    small = ImageStore(tmp_path / "images", None, bounds=Bounds(bytes=3 << 20, entries=50))
    with pytest.raises(ResourceExhaustedError, match="LOWTIDE_IMAGE_MAX_BYTES"):
        small.add("large", [io.BytesIO(layer(("f", bytes(4 << 20), {})))], {})
    with pytest.raises(ResourceExhaustedError, match="LOWTIDE_IMAGE_MAX_ENTRIES"):
        small.add("many", [io.BytesIO(layer(*((f"f{n}", b"", {}) for n in range(60))))], {})
    with pytest.raises(ValidationError, match="129 layers"):
        small.add("deep", [io.BytesIO(layer()) for _ in range(200)], {})
    with pytest.raises(ValidationError, match="0 layers"):
        small.add("none", [], {})
    assert nothing_left(small)


def test_the_bounds_are_set_by_the_environment() -> None:
    found = Bounds.from_environment({"LOWTIDE_IMAGE_MAX_BYTES": "5", "LOWTIDE_IMAGE_MAX_RATIO": "7"})
    assert found == Bounds(bytes=5, ratio=7)
    with pytest.raises(ValidationError, match="LOWTIDE_IMAGE_MAX_ENTRIES"):
        Bounds.from_environment({"LOWTIDE_IMAGE_MAX_ENTRIES": "many"})


def test_a_layer_that_swells_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_RATIO_COUNTS_FROM", 32 << 20)
    zeros = gzip.compress(bytes(16 << 20), 9)  # members follow one another in one file
    head = tarfile.TarInfo("f")
    head.size = 100 << 30
    bomb = tmp_path / "bomb"
    with open(bomb, "wb") as file:
        file.write(gzip.compress(head.tobuf(tarfile.PAX_FORMAT)))
        for _ in range(20):
            file.write(zeros)
    store = ImageStore(tmp_path / "images", None)
    with open(bomb, "rb") as file, pytest.raises(ResourceExhaustedError, match="LOWTIDE_IMAGE_MAX_RATIO"):
        store.add("bomb", [file], {})
    assert nothing_left(store)


def test_every_packing_is_taken_and_xz_with_little_memory(store: ImageStore) -> None:
    import bz2

    for pack in (gzip.compress, bz2.compress, lzma.compress):
        [path] = store.add("packed", [io.BytesIO(pack(GOOD))], {}).layers
        assert Path(path, "etc/motd").read_bytes() == b"hello"
    hungry = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    packed = lzma.compress(GOOD, filters=hungry)
    with pytest.raises(ValidationError, match="layer"):
        store.add("hungry", [io.BytesIO(packed)], {})


def test_a_packed_archive_is_imported_with_little_memory(store: ImageStore, tmp_path: Path) -> None:
    import bz2

    file = tmp_path / "archive"
    for pack in (bytes, gzip.compress, bz2.compress, lzma.compress):
        file.write_bytes(pack(GOOD))
        [path] = store.import_file("packed", file).layers
        assert Path(path, "etc/motd").read_bytes() == b"hello"
    file.write_bytes(
        lzma.compress(GOOD, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}])
    )
    with pytest.raises(ValidationError, match="not an image"):
        store.import_file("hungry", file)
    alone = [{"id": lzma.FILTER_LZMA1, "preset": 0, "dict_size": 1 << 30}]
    file.write_bytes(lzma.compress(GOOD, format=lzma.FORMAT_ALONE, filters=alone))
    with pytest.raises(ValidationError, match="not an image"):
        store.import_file("hungry", file)


# ------------------------------------------------------------ archives and documents


def _header(kind: bytes, content: bytes) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


def _record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + len(str(len(body) + len(str(len(body)))))
    return str(length).encode() + body


def _nested_index() -> list[tuple[str, bytes | None, dict[str, Any]]]:
    """An index that names itself. Its digest is not checked on import, so any name will do."""
    digest = "0" * 64
    index = {"manifests": [{"digest": f"sha256:{digest}", "platform": {"architecture": OWN, "os": "linux"}}]}
    data = json.dumps(index).encode()
    return [("oci-layout", b"{}", {}), ("index.json", data, {}), (f"blobs/sha256/{digest}", data, {})]


def _manifest_only(content: bytes) -> bytes:
    return layer(("manifest.json", content, {}))


BROKEN: dict[str, bytes] = {
    "an index of itself": layer(*_nested_index()),
    "a manifest that is a list of numbers": _manifest_only(b"[1]"),
    "a manifest that is a number": _manifest_only(b"7"),
    "a manifest that is no JSON": _manifest_only(b"\xff"),
    "a manifest as deep as the stack": _manifest_only(b"[" * 100_000),
    "a manifest without layers": _manifest_only(b'[{"Config": "c"}]'),
    "a manifest of numbered layers": _manifest_only(b'[{"Config": "c", "Layers": [1]}]'),
    "two images": _manifest_only(b'[{"Config": "c", "Layers": []}, {"Config": "c", "Layers": []}]'),
    "a huge manifest": _manifest_only(b" " * (5 << 20) + b"[]"),
    "layers that are links in a circle": layer(
        ("manifest.json", b'[{"Config": "a", "Layers": ["a"]}]', {}),
        ("a", None, {**LINK, "linkname": "b"}),
        ("b", None, {**LINK, "linkname": "a"}),
    ),
    "a blob by a path": layer(
        ("oci-layout", b"{}", {}), ("index.json", b'{"manifests": [{"digest": "sha256:../../x"}]}', {})
    ),
    "an index of strings": layer(("oci-layout", b"{}", {}), ("index.json", b'{"manifests": ["a"]}', {})),
    "headers before headers": _header(tarfile.XHDTYPE, _record("path", "x")) * 5000,
    "long names before long names": _header(tarfile.GNUTYPE_LONGNAME, b"x\0") * 5000,
    "a header that is no record": _header(tarfile.XHDTYPE, b"1" * 600_000) + GOOD,
    "a record that is longer than its header": _header(tarfile.XHDTYPE, b"99 path=x\n") + GOOD,
    "a negative size": _header(tarfile.XHDTYPE, _record("size", "-1024")) + layer(("f", b"x" * 2000, {})),
    "a sparse file": _header(tarfile.XHDTYPE, _record("GNU.sparse.size", str(1 << 60))) + GOOD,
    "an old sparse file": _header(tarfile.GNUTYPE_SPARSE, b""),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.timeout(60)
def test_a_broken_archive_is_said_to_be_one(store: ImageStore, tmp_path: Path, what: str) -> None:
    file = tmp_path / "image.tar"
    file.write_bytes(BROKEN[what])
    with pytest.raises(ValidationError):
        store.import_file("bad", file)
    with contextlib.suppress(FileNotFoundError):
        assert nothing_left(store)


def test_an_oci_layout_and_links_to_layers_are_read(store: ImageStore, tmp_path: Path) -> None:
    content, content_file = blob(GOOD)
    config, config_file = blob({"config": {"Env": ["A=b"], "User": "7", "Labels": {"a": ""}}})
    manifest, manifest_file = blob({"config": config, "layers": [content]})
    index, index_file = blob({"manifests": [{**manifest, "platform": {"architecture": OWN, "os": "linux"}}]})
    top = json.dumps({"manifests": [{"digest": "sha256:" + "0" * 64, "platform": {"os": "plan9"}}, index]})
    file = tmp_path / "layout.tar"
    file.write_bytes(
        layer(
            ("oci-layout", b"{}", {}),
            ("index.json", top.encode(), {}),
            *(content_file, config_file, manifest_file, index_file),
        )
    )
    found = store.import_file("layout", file)
    assert found.configuration.environment == {"A": "b"}
    assert found.configuration.user == "7"
    linked = [
        ("one/layer.tar", GOOD, {}),
        ("two/layer.tar", None, {**LINK, "linkname": "../one/layer.tar"}),
        ("c.json", b"{}", {}),
        ("manifest.json", b'[{"Config": "c.json", "Layers": ["one/layer.tar", "two/layer.tar"]}]', {}),
    ]
    file.write_bytes(layer(*linked))  # type: ignore[arg-type]
    assert len(store.import_file("linked", file).layers) == 2


_MEASURE = """
import resource, sys
from pathlib import Path
from lowtide.providers.images.store import ImageStore
store = ImageStore(Path(sys.argv[1]), None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    store.import_file("x", Path(sys.argv[2]))
except ValueError as error:
    print(error, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _packed(*parts: bytes) -> bytes:
    return b"".join(gzip.compress(part, 9) for part in parts)


def _large_header() -> bytes:
    """A header of 512 MiB in half a megabyte."""
    size = 512 << 20
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, size
    return _packed(info.tobuf(tarfile.USTAR_FORMAT)) + gzip.compress(b"1" * (1 << 20), 9) * 512


def _many_entries() -> bytes:
    one = tarfile.TarInfo("some/directory/that/is/not/so/deep/f").tobuf(tarfile.USTAR_FORMAT)
    return _packed(one * 60_000 + _manifest_only(b"[]"))


@pytest.mark.parametrize("make", [_large_header, _many_entries])
def test_importing_takes_little_memory(tmp_path: Path, make: Any) -> None:
    file = tmp_path / "image.tar.gz"
    file.write_bytes(make())
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path / "images"), str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 24 << 10, done.stderr  # kilobytes
