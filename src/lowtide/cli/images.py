"""What `lowtide image` does: the local provider's image store, told to people."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lowtide.cli import exit_codes
from lowtide.cli.failures import explain
from lowtide.cli.text import age, clean, print_json, print_table, size, timestamp
from lowtide.errors import LowtideError
from lowtide.providers import registry

if TYPE_CHECKING:
    from lowtide.emulators.layer_cache import LayerCache
    from lowtide.providers.images.store import Image, ImageStore
    from lowtide.providers.local import LocalProvider


def import_image(name: str, file: str, *, as_json: bool) -> None:
    _tell(_store().import_file(name, Path(file)), as_json=as_json)


def pull_image(reference: str, *, as_json: bool) -> None:
    _tell(_store().pull(reference), as_json=as_json)


def list_images(*, as_json: bool) -> None:
    found = _store().images()
    if as_json:
        print_json([_as_dict(image) for image in found])
        return
    print_table(
        ["image", "layers", "size", "age"],
        [
            [
                image.name,
                "unusable" if image.problem else str(len(image.layers)),
                size(image.size_bytes),
                age(image.created_at),
            ]
            for image in found
        ],
        empty="no images: `lowtide image import NAME FILE.tar` adds one",
    )
    kept = _build_layers().layers()
    if kept:
        total = size(sum(one.size_bytes for one in kept))
        print(f"and {len(kept)} layers that emulators built, {total}: `lowtide image prune` removes them")


def prune_layers(*, as_json: bool) -> None:
    """What stands on them has its own hold on the files: nobody who runs now loses anything."""
    gone = _build_layers().make_room(0)
    total = sum(one.size_bytes for one in gone)
    if as_json:
        print_json({"layers": len(gone), "size_bytes": total})
    else:
        print(f"{len(gone)} layers that emulators built removed, {size(total)}")


def remove_images(names: tuple[str, ...], *, missing_ok: bool) -> int:
    """Each on its own: one that is in use does not keep the others."""
    code = exit_codes.OK
    for name in names:
        try:
            removed = _store().remove(name)
        except LowtideError as error:
            line, _ = explain(error)
            print(f"lowtide: {line}", file=sys.stderr)
            code = exit_codes.ERROR
            continue
        if removed:
            print(clean(f"{name} removed"))
        elif not missing_ok:
            print(clean(f"lowtide: there is no image {name}; `lowtide image ls` lists them"), file=sys.stderr)
            code = exit_codes.ERROR
    return code


def _store() -> ImageStore:
    return cast("LocalProvider", registry.provider("local")).images


def _build_layers() -> LayerCache:
    from lowtide.emulators.layer_cache import LayerCache
    from lowtide.machine import home

    return LayerCache.of(home())


def _tell(image: Image, *, as_json: bool) -> None:
    if as_json:
        print_json(_as_dict(image))
    else:
        print(clean(f"{image.name}: {len(image.layers)} layers, {size(image.size_bytes)}"))


def _as_dict(image: Image) -> dict[str, Any]:
    return {
        "name": image.name,
        "layers": len(image.layers),
        "size_bytes": image.size_bytes,
        "created_at": timestamp(image.created_at),
    }
