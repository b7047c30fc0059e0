"""Removing a tree that hostile code has written. The spawner loads this file by its path."""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

_MOST_OPEN = 16  # descriptors are few


def remove_tree(top: Path) -> None:
    """Remove a tree that hostile code has written: links are never followed, closed directories are opened."""
    try:
        parent = os.open(top.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        remove_at(parent, top.name)
    finally:
        os.close(parent)


def remove_at(parent: int, name: str) -> None:
    """The same, of a name in an open directory. ValueError: what is not the name of something in it."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of something in a directory")
    # A list and not recursion: a sandbox can make directories deeper than the stack.
    try:
        os.rmdir(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        return
    except OSError:
        pass
    stack: list[tuple[int, str, list[str]]] = []
    try:
        _empty(parent, name, stack)
    finally:
        for fd, _, _ in stack:  # only where it failed
            os.close(fd)


def _empty(parent: int, name: str, stack: list[tuple[int, str, list[str]]]) -> None:
    fd, folders = _clear(parent, name)
    stack.append((fd, name, folders))
    while stack:
        fd, own_name, folders = stack[-1]
        if folders:
            child = folders.pop()
            try:
                os.rmdir(child, dir_fd=fd)
            except FileNotFoundError:
                pass
            except OSError:
                below, more = _clear(fd, child)
                stack.append((below, child, more))
                if len(stack) > _MOST_OPEN:  # bring what is deeper up here and go on flat
                    _flatten(stack)
            continue
        stack.pop()
        os.close(fd)
        above = stack[-1][0] if stack else parent
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(own_name, dir_fd=above)


def _flatten(stack: list[tuple[int, str, list[str]]]) -> None:
    top_fd, _, top_folders = stack[0]
    fd, name, _ = stack[-1]
    moved = f".deep-{os.urandom(6).hex()}"
    os.rename(name, moved, src_dir_fd=stack[-2][0], dst_dir_fd=top_fd)
    os.close(fd)
    stack.pop()
    top_folders.append(moved)


def _clear(parent: int, name: str) -> tuple[int, list[str]]:
    """Open a directory, remove what is no directory in it, say which directories there are."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        fd = os.open(name, flags, dir_fd=parent)
    try:
        return fd, _clear_open(fd)
    except BaseException:
        os.close(fd)
        raise


def _clear_open(fd: int) -> list[str]:
    # Also as root, who in a sandbox may not write where nobody may.
    if os.fstat(fd).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o700)
    folders = []
    with os.scandir(fd) as found:
        items = [(item.name, item.is_dir(follow_symlinks=False)) for item in found]
    for child, folder in items:
        if folder:
            folders.append(child)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(child, dir_fd=fd)
    return folders
