"""Attempts by an image: through its configuration, its layers, its archive, and what the store holds of it."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.providers.images.store import ImageStore
from tests.escape.attempt import Target, attempt
from tests.unit.image_files import DIRECTORY, docker_save, layer

INJECTION = "/\0--bind\0/\0/hostroot"
GOOD = layer(("etc", None, DIRECTORY), ("tmp", None, DIRECTORY), ("etc/motd", b"hello", {}))
LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}


def store_of(target: Target) -> ImageStore:
    """One beside the real one, with another image in it that must stay whole."""
    store = ImageStore(target.directory() / "local/images", None)
    store.add("other", [io.BytesIO(GOOD)], {})
    return store


def imported(target: Target, config: dict[str, Any]) -> str | None:
    store = store_of(target)
    file = docker_save(target.directory() / "image.tar", [GOOD], config)
    try:
        store.import_file("evil", file)
    except LowtideError:
        return None
    return "the image was taken"


def unpacked(target: Target, *hostile: tuple[str, bytes | None, dict[str, Any]]) -> str | None:
    store = store_of(target)
    outside = target.directory()
    before = sorted(map(str, (*store.directory.parent.rglob("*"), *outside.rglob("*"))))
    moved = [(name.replace("OUTSIDE", str(outside)), content, more) for name, content, more in hostile]
    for _, _, more in moved:
        more["linkname"] = str(more.get("linkname", "")).replace("OUTSIDE", str(outside))
    try:
        store.add("evil", [io.BytesIO(layer(*moved))], {})
        store.remove("evil")
    except LowtideError:
        pass
    after = sorted(map(str, (*store.directory.parent.rglob("*"), *outside.rglob("*"))))
    return None if after == before else f"changed: {set(after) ^ set(before)}"


@attempt("give bubblewrap arguments through an image's working directory")
def image_working_directory(target: Target) -> str | None:
    return imported(target, {"WorkingDir": INJECTION})


@attempt("give bubblewrap arguments through an image's environment")
def image_environment(target: Target) -> str | None:
    return imported(target, {"Env": ["A=" + INJECTION]}) or imported(
        target, {"Env": ["A" + INJECTION + "=b"]}
    )


@attempt("give bubblewrap arguments through an image's user, command, labels or volumes")
def image_other_words(target: Target) -> str | None:
    for config in ({"User": INJECTION}, {"Cmd": [INJECTION]}, {"Entrypoint": [INJECTION]}):
        if got := imported(target, config):
            return got
    return imported(target, {"Labels": {"a": INJECTION}}) or imported(target, {"Volumes": {INJECTION: {}}})


@attempt("give bubblewrap arguments through an image that an older version took in")
def image_in_the_store(target: Target) -> str | None:
    store = store_of(target)
    for key, value in (
        ("working_dir", INJECTION),
        ("environment", {"A": INJECTION}),
        ("diff_ids", ["../../../../../../etc"]),
    ):
        file = Path(store.directory, "other/manifest.json")
        whole = file.read_text()
        file.write_text(json.dumps({**json.loads(whole), key: value}))
        try:
            store.image("other")
            return f"{key} was taken"
        except LowtideError:
            file.write_text(whole)
    return None


@attempt("delete all layers with a whiteout of the parent, of here or of nothing")
def image_whiteouts(target: Target) -> str | None:
    for name in (".wh...", ".wh..", ".wh.", "a/.wh...", "a/b/../.wh..."):
        if got := unpacked(target, (name, b"", {})):
            return got
    return None


@attempt("write outside a layer by names, links and hard links")
def image_paths(target: Target) -> str | None:
    for hostile in (
        [("../escape", b"x", {})],
        [("OUTSIDE/escape", b"x", {})],
        [("l", None, {**LINK, "linkname": "OUTSIDE"}), ("l/escape", b"x", {})],
        [("l", None, {**LINK, "linkname": "../../../../../../../OUTSIDE"}), ("l/escape", b"x", {})],
        [("l", None, {**LINK, "linkname": "OUTSIDE"}), ("l/.wh.x", b"", {})],
        [("h", None, {**HARD, "linkname": "../../../../../../etc/passwd"})],
        [("l", None, {**LINK, "linkname": "/etc"}), ("h", None, {**HARD, "linkname": "l/passwd"})],
    ):
        if got := unpacked(target, *hostile):  # type: ignore[arg-type]
            return got
    return None


@attempt("get a device into a sandbox through a layer")
def image_devices(target: Target) -> str | None:
    store = store_of(target)
    device = {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0, "mode": 0o666}
    [path] = store.add("devices", [io.BytesIO(layer(("sda", None, device)))], {}).layers
    return "a device node was made" if Path(path, "sda").exists() else None
