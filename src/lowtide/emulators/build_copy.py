"""What copies files into a build sandbox, and out of an earlier stage: programs for its shell, and what they are given."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

from lowtide.providers.base import ProcessHandle

_PIECE = 1 << 20

COPY = r"""
set -e
unpack=$1 target=$2 mode=$3 archives=$4; shift 4
context=$(mktemp -d)
trap 'chmod -R u+rwx "$context"; rm -rf "$context"' EXIT  # also where it fails: another user may try again
tar "$unpack" - -C "$context" --no-same-owner --ignore-zeros
IFS=  # names may have spaces; the marks of a pattern still mean what they mean
many=0
for source; do for found in "$context"/$source; do
  [ -e "$found" ] || [ -L "$found" ] || { echo "$source: not in the build context" >&2; exit 1; }
  many=$((many + 1))
done; done
change() { [ -z "$mode" ] || [ -L "$1" ] || chmod "$mode" "$1"; }
for source; do for found in "$context"/$source; do
  if [ -d "$found" ] && [ ! -L "$found" ]; then
    mkdir -p "$target"; cp -RP "$found/." "$target/"
    [ -z "$mode" ] || (cd "$found"; export mode target; find . ! -name . ! -type l -exec sh -ec '
      for one; do chmod "$mode" "$target/$one"; done' sh {} +)
  elif [ -n "$archives" ] && [ -f "$found" ] && [ -s "$found" ] && tar -tf "$found" >/dev/null 2>&1; then
    mkdir -p "$target"; tar -xf "$found" -C "$target" --no-same-owner
  elif [ "$many" -gt 1 ] || [ -d "$target" ] || [ "${target%/}" != "$target" ]; then
    mkdir -p "$target"; cp -RP "$found" "$target/"; change "$target/${found##*/}"
  else mkdir -p "$(dirname "$target")"; cp -RP "$found" "$target"; change "$target"; fi
done; done
"""

TAKE = """cd / && IFS= && for word; do shift; set -- "$@" $word; done && exec tar --one-file-system -cf - -- "$@" """

Content = bytes | tuple[Path, ...]
"""Tars with what COPY may name: one (plain or gzip), or several files that are plain."""


async def feed(handle: ProcessHandle, content: Content) -> bytes:
    """Its input; the hash of what was given. It ends also where that cannot be read."""
    read = hashlib.sha256()
    with contextlib.suppress(BrokenPipeError):
        try:
            for piece in _pieces(content):
                read.update(piece)
                await handle.write_stdin(piece)
        finally:
            await handle.close_stdin()
    return read.digest()


def digest_of(content: Content) -> bytes:
    found = hashlib.sha256()
    for piece in _pieces(content):
        found.update(piece)
    return found.digest()


def start_of(content: Content) -> bytes:
    return next(_pieces(content), b"")[:2]


def _pieces(content: Content) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for at in range(0, len(content), _PIECE):
            yield content[at : at + _PIECE]
        return
    for path in content:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
