"""The skeleton: the shared read-only layer under every sandbox that runs on this machine's own /usr."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.providers.local import python_environment, python_trees
from lowtide.trees.passable import make_passable

_FORMAT = 7  # part of the fingerprint: raise it when what is built below changes

_DIRECTORIES = (
    "dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "usr", "var", "var/cache",
    "var/lib", "var/local", "var/log", "var/mail", "var/opt", "var/spool",
)  # fmt: skip
_STICKY = ("tmp", "var/tmp")

_TEXTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    "user:x:1000:1000:user:/home/user:/bin/bash\n",
    "etc/group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\nuser:x:1000:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "etc/resolv.conf": "",
    "etc/hostname": "sandbox\n",
    "etc/profile": "PS1='\\u@\\h:\\w\\$ '\n",
    "etc/bash.bashrc": "PS1='\\u@\\h:\\w\\$ '\n",
    "etc/shells": "/bin/sh\n/bin/bash\n",
    "etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
    "etc/fstab": "",
    "etc/mtab": "",
}
# Public facts of this machine's installation that programs in /usr need. Nothing secret, nothing about people.
_COPIED = (
    "etc/alternatives", "etc/ca-certificates.conf", "etc/debian_version", "etc/ld.so.cache", "etc/ld.so.conf.d",
    "etc/localtime", "etc/magic", "etc/mime.types", "etc/os-release", "etc/protocols", "etc/services",
    "etc/ssl/certs", "etc/ssl/openssl.cnf", "etc/terminfo", "etc/timezone", "etc/python3", "etc/python3.11",
    "etc/perl", "etc/pki/tls/certs", "etc/inputrc", "etc/java-11-openjdk", "etc/java-17-openjdk",
    "etc/java-21-openjdk",
)  # fmt: skip
# Where programs are usually put. Owned by the sandbox's root even where the rest of /usr is not.
_USR_DIRECTORIES = (
    "bin", "games", "include", "lib", "lib64", "libexec", "sbin", "share", "share/man", "share/doc", "src",
    "local", "local/bin", "local/etc", "local/games", "local/include", "local/lib", "local/sbin", "local/share",
    "local/src", "local/share/man",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    root: str
    usr: str


def skeleton(base_directory: Path, owner: int | None) -> Skeleton:
    """Built once for this machine, this Python and this owner; found by its fingerprint afterwards."""
    place = base_directory / fingerprint(owner)
    if not place.is_dir():
        _build_atomically(place, owner)
    return Skeleton(root=str(place / "root"), usr=str(place / "usr"))


def fingerprint(owner: int | None) -> str:
    """Changes with what a skeleton is made of."""
    text = hashlib.sha256(repr((_FORMAT, python_trees.prefixes(), python_trees.trees(), owner)).encode())
    names = ["/etc/ld.so.cache", "/etc/alternatives", "/etc/os-release", "/etc/ssl/certs", "/etc/localtime"]
    names += [f"{prefix}/pyvenv.cfg" for prefix in python_trees.prefixes()]
    for name in names:
        with contextlib.suppress(OSError):
            info = os.stat(name)
            text.update(f"{name} {info.st_mtime_ns} {info.st_size}".encode())
    return text.hexdigest()[:16]


def _build_atomically(place: Path, owner: int | None) -> None:
    make_passable(place.parent)
    draft = place.with_name(f".{place.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        _build(draft)
        if owner is not None:
            for path in _walk(draft):
                os.chown(path, owner, owner, follow_symlinks=False)
            os.chown(draft / "root/home/user", owner + 1000, owner + 1000)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():  # another process was first: that one is as good
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _build(draft: Path) -> None:
    root, usr = draft / "root", draft / "usr"
    draft.mkdir(mode=0o755)
    root.mkdir()
    usr.mkdir()
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in _STICKY:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    for name in ("home/user", "run/lock"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.isdir(f"/usr/{name}"):
            (root / name).symlink_to(f"usr/{name}")
    (root / "var/run").symlink_to("/run")
    (root / "var/lock").symlink_to("/run/lock")
    for name, text in _TEXTS.items():
        (root / name).write_text(text)
    for name in _COPIED:
        _copy_public(Path("/") / name, root / name)
    _build_python(root)
    for name in _USR_DIRECTORIES:
        if name.startswith("local") or (os.path.isdir(f"/usr/{name}") and not os.path.islink(f"/usr/{name}")):
            (usr / name).mkdir(parents=True, exist_ok=True)
    for path in _walk(draft):
        if path.is_dir() and not path.is_symlink() and not path.stat().st_mode & stat.S_ISVTX:
            path.chmod(0o755)
        elif (
            path.is_file() and not path.is_symlink()
        ):  # all of it is for everybody, whatever the program's umask is
            path.chmod(path.stat().st_mode | 0o444)
    (root / "home/user").chmod(0o755)


def _build_python(root: Path) -> None:
    """Where Python's trees are mounted, and what lies beside them that it cannot do without."""
    for path in (*python_trees.prefixes(), *python_trees.trees()):
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for prefix in python_trees.prefixes():
        inside = root / prefix.lstrip("/")
        _copy_public(Path(prefix) / "pyvenv.cfg", inside / "pyvenv.cfg")
        if os.path.islink(f"{prefix}/lib64") and os.readlink(f"{prefix}/lib64") == "lib":
            (inside / "lib64").symlink_to("lib")
    python_environment.build(root)


def _copy_public(source: Path, target: Path) -> None:
    """Copy what everybody may read; links stay links, except one that leads out of what is copied."""
    try:
        info = source.lstat()
    except OSError:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(info.st_mode):
        link = os.readlink(source)
        if "/usr/" in link or source.parts[1:3] == ("etc", "alternatives") or "/" not in link:
            target.symlink_to(link)
            return
        with contextlib.suppress(OSError):
            if stat.S_ISREG(source.stat().st_mode) and source.stat().st_mode & 0o004:
                shutil.copyfile(source, target)
    elif stat.S_ISDIR(info.st_mode):
        target.mkdir(exist_ok=True)
        for child in source.iterdir():
            _copy_public(child, target / child.name)
    elif stat.S_ISREG(info.st_mode) and info.st_mode & 0o004 and not source.name.endswith(".key"):
        shutil.copyfile(source, target)


def _walk(top: Path) -> Iterator[Path]:
    yield top
    for folder, names, files in os.walk(top):
        for name in names + files:
            yield Path(folder) / name
