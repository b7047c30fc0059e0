"""Joining the layers of an overlay into one layer that shows the same.

What an upper layer deletes or replaces is left out. Its marks stay (a whiteout for what is deleted, `opaque` for a
directory that hides those below): what lies below all of them may have something of that name as well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from lowtide.trees.copy import ATTRIBUTES, Entries, copy_tree, finish_directory
from lowtide.trees.remove import remove_at
from lowtide.trees.walk import DIRECTORY, Position, walk

_OPAQUE = "user.overlay.opaque"
_ORIGIN = "user.overlay.origin"
"""Only where a directory has it does an overlay look for whiteouts in the only layer that has the directory."""


def join_trees(layers: Sequence[str], target: str) -> None:
    """`layers` from the bottom up; nobody writes them any more, and the target's files are hard links to theirs."""
    copy_tree(layers[0], target, link=True)
    into = os.open(target, DIRECTORY)
    try:
        for layer in layers[1:]:
            top = os.open(layer, DIRECTORY)
            try:
                with Entries(f"{target}.links") as entries:
                    _lay_over(top, into, entries)
            finally:
                os.close(top)
    finally:
        os.close(into)


def _lay_over(layer: int, target: int, entries: Entries) -> None:
    at = Position(target)
    try:
        _open(target)
        for entry in walk(layer):
            if entry.left:
                finish_directory(entry.own, at.fd, os.fstat(entry.own))
                at.leave()
            elif entry.own >= 0:
                hides = _opaque(entry.own)
                if hides or not _is_directory(entry.name, at.fd):
                    hides = _remove(entry.name, at.fd) or hides
                    os.mkdir(entry.name, 0o700, dir_fd=at.fd)
                at.enter(entry.name)
                _open(at.fd)
                if hides:
                    os.setxattr(at.fd, _OPAQUE, b"y")
            else:
                _remove(entry.name, at.fd)
                entries.link(entry, at.fd)
        finish_directory(layer, target, os.fstat(layer))
    finally:
        at.close()


def _open(target: int) -> None:
    """Make a directory writable until it is full, also where its owner may not write.

    Its own marks are those of the uppermost layer that has it; but what hid the layers below still does, and there
    may still be whiteouts in it.
    """
    os.fchmod(target, 0o700)
    for name in os.listxattr(target):
        if name.startswith(ATTRIBUTES) and name not in (_OPAQUE, _ORIGIN):
            os.removexattr(target, name)


def _opaque(directory: int) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE) == b"y"
    except OSError:
        return False


def _is_directory(name: str, parent: int) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    except FileNotFoundError:
        return False


def _remove(name: str, parent: int) -> bool:
    """True: there was something."""
    try:
        os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    remove_at(parent, name)
    return True
