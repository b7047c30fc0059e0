"""Attempts on the Python that runs lowtide, and on what lies beside it: files of mode 600, sockets."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path

from tests.escape.attempt import LeftOut, Target, attempt


def _planted(target: Target, folder: Path) -> str | None:
    name = f"planted-{secrets.token_hex(4)}"
    path = folder / name
    try:
        path.touch(0o600)
    except OSError as error:
        raise LeftOut(f"{folder} is not this user's to write") from error
    try:
        path.write_text("secret")
        path.chmod(0o600)
        with target.make() as box:
            seen = target.python(
                "print(tried(lambda p: open(p).read(), sys.argv[1]) or '')", str(path), box=box
            )
        return f"read {folder}'s file of mode 600" if "secret" in seen else None
    finally:
        path.unlink()


def _site_packages() -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.prefix) / "lib" / version / "site-packages"


@attempt("read a file of mode 600 in the virtual environment")
def private_file_in_prefix(target: Target) -> str | None:
    return _planted(target, Path(sys.prefix))


@attempt("read a file of mode 600 among the packages")
def private_file_in_packages(target: Target) -> str | None:
    return _planted(target, _site_packages())


@attempt("read a file of mode 600 beside the interpreter")
def private_file_in_bin(target: Target) -> str | None:
    return _planted(target, Path(sys.prefix) / "bin")


@attempt("read a file that became private after lowtide's first sandbox")
def file_that_became_private(target: Target) -> str | None:
    """By its mode alone, and as a new file; the times of its directory say nothing about either."""
    folder = Path(sys.prefix) / "bin"
    known, new = (folder / f"planted-{secrets.token_hex(4)}" for _ in range(2))
    try:
        known.write_text("secret")
    except OSError as error:
        raise LeftOut(f"{folder} is not this user's to write") from error
    try:
        known.chmod(0o644)
        code = "print(*(tried(lambda p: open(p).read(), path) or '' for path in sys.argv[1:]))"
        for _ in range(3):  # one of them is made beforehand
            with target.make() as box:
                target.python(code, str(known), box=box)
        info = folder.stat()
        known.chmod(0o600)
        new.touch(0o600)
        new.write_text("secret")
        os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))
        for _ in range(2):
            with target.make() as box:
                if "secret" in target.python(code, str(known), str(new), box=box):
                    return f"read a file of mode 600 in {folder}"
        return None
    finally:
        known.unlink()
        new.unlink(missing_ok=True)


def _listening(target: Target, folder: Path) -> str | None:
    if len(str(folder)) > 90 or not os.access(folder, os.W_OK):
        raise LeftOut(f"no socket can be put into {folder}")
    path = folder / f"s{secrets.token_hex(3)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        path.chmod(0o777)
        server.listen()
        server.settimeout(0.2)
        try:
            code = """
import socket
if tried(socket.socket(socket.AF_UNIX).connect, sys.argv[1]) is None and os.path.exists(sys.argv[1]):
    print("there")
"""
            with target.make() as box:
                target.python(code, str(path), box=box)
            try:
                server.accept()[0].close()
                return f"reached a socket in {folder}"
            except TimeoutError:
                return None
        finally:
            path.unlink()


@attempt("reach a listening socket in the virtual environment")
def socket_in_prefix(target: Target) -> str | None:
    return _listening(target, Path(sys.prefix))


@attempt("reach a listening socket among the packages")
def socket_in_packages(target: Target) -> str | None:
    return _listening(target, _site_packages())


@attempt("change the Python that runs lowtide")
def change_python(target: Target) -> str | None:
    target.python(
        """
for folder in sys.argv[1:]:
    tried(lambda: open(folder + "/escape.pth", "w"))
    tried(os.utime, folder)
""",
        str(_site_packages()),
        sys.prefix,
        str(Path(sys.prefix) / "bin"),
    )
    found = [str(path) for path in (_site_packages(), Path(sys.prefix)) if (path / "escape.pth").exists()]
    return f"wrote into {found}" if found else None
