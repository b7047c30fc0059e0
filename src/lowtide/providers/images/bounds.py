"""How much an image may take: bytes, entries, layers, and how far it may swell when it is unpacked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import ResourceExhaustedError, ValidationError

MAX_LAYERS = 128
"""What an overlay takes in one mount; docker itself stops at 127."""
MAX_DOCUMENT_BYTES = 4 << 20
"""Of a manifest, an index or a configuration: what registries take."""
MAX_INDEXES = 3
"""How many indexes may lead to one another before there is an image."""
_BYTES, _ENTRIES, _RATIO = "LOWTIDE_IMAGE_MAX_BYTES", "LOWTIDE_IMAGE_MAX_ENTRIES", "LOWTIDE_IMAGE_MAX_RATIO"
_RATIO_COUNTS_FROM = 1 << 30  # a small image of zeros does no harm, and there are some
_DISK_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """For one image. Each can be set by the environment variable of its name."""

    bytes: int = 32 << 30
    entries: int = 2_000_000
    ratio: int = 200
    """Unpacked to packed, once it is more than a gibibyte."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Bounds:
        standard = cls()
        return cls(
            bytes=_number(environ, _BYTES, standard.bytes),
            entries=_number(environ, _ENTRIES, standard.entries),
            ratio=_number(environ, _RATIO, standard.ratio),
        )


class Budget:
    """What one image has used of its bounds. Raises ResourceExhaustedError when it wants more."""

    def __init__(self, bounds: Bounds, directory: Path) -> None:
        self._bounds = bounds
        self._most = min(bounds.bytes, int(shutil.disk_usage(directory).free * _DISK_SHARE))
        self._bytes = self._packed = self._entries = 0

    def check_download(self, size: int) -> None:
        """Before it is fetched: what the registry says that it is large."""
        if size > self._most:
            raise self._exceeded(f"is {size} bytes large, packed", _BYTES, self._most)

    def packed(self, count: int) -> None:
        self._packed += count

    def unpacked(self, count: int) -> None:
        self._bytes += count
        if self._bytes > self._most:
            raise self._exceeded(
                "is larger, unpacked, than what is allowed or the disk has room for", _BYTES, self._most
            )
        if self._bytes > max(_RATIO_COUNTS_FROM, self._packed * self._bounds.ratio):
            raise self._exceeded("swells too far when it is unpacked", _RATIO, self._bounds.ratio)

    def entry(self) -> None:
        self._entries += 1
        if self._entries > self._bounds.entries:
            raise self._exceeded("holds too many files", _ENTRIES, self._bounds.entries)

    def _exceeded(self, what: str, variable: str, bound: int) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"the image {what} (at most {bound}); {variable} sets another bound", provider="local"
        )


def check_layers(count: int) -> None:
    if not 0 < count <= MAX_LAYERS:
        raise ValidationError(
            f"the image has {count} layers; between 1 and {MAX_LAYERS} can be stacked. Squash it "
            "(`docker export` a container of it, and import that)",
            argument="container_image",
            provider="local",
        )


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return otherwise
    if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise ValidationError(f"{name} must be a positive whole number, not {text!r}", argument=name)
    return int(text)
