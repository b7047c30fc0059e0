"""The JSON documents of an image: bounded, and of the shape they must have."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from lowtide.errors import ValidationError
from lowtide.providers.images.bounds import MAX_DOCUMENT_BYTES

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def parse(content: bytes, what: str) -> Any:
    if len(content) > MAX_DOCUMENT_BYTES:
        raise bad(f"its {what} is larger than {MAX_DOCUMENT_BYTES} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise bad(f"its {what} is not JSON") from error


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise bad(f"its {what} is not an object")
    return value


def mappings(value: Any, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise bad(f"its {what} are not a list")
    return [mapping(item, what) for item in value]


def words(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad(f"its {what} are not a list of strings")
    return list(value)


def digest(value: Any) -> str:
    """It becomes a part of an address and of a file name."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise bad(f"{str(value)[:100]!r} is not a sha256 digest")
    return value


def for_this_machine(index: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of an index that runs here."""
    own = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    others = set()
    for manifest in mappings(index.get("manifests"), "manifests"):
        platform = mapping(manifest.get("platform") or {}, "platform")
        if platform.get("architecture", own) == own and platform.get("os", "linux") == "linux":
            return manifest
        others.add(str(platform.get("architecture"))[:40])
    there = ", ".join(sorted(others)[:20]) or "nothing"
    raise bad(f"it is not made for this machine ({own}), only for {there}")


def bad(why: str) -> ValidationError:
    return ValidationError(f"the image cannot be used: {why}", argument="container_image", provider="local")
