"""The Python environment of a sandbox on this machine's /usr: writable, on top of the visible one that is not.

`pip install` writes here. What the visible Python has installed is found through a path file, and stays as it is.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from lowtide.providers.local import python_trees

PLACE = "/opt/python"
BIN = f"{PLACE}/bin"

# Said before pip tries for a minute to reach what it cannot.
_HINT = '''"""Imported for pip alone: says in one line why it cannot reach an index."""
import os, sys

def offline():
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return False
    try:
        with open("/proc/net/route") as v4, open("/proc/net/ipv6_route") as v6:
            return len(v4.readlines()) < 2 and all(line.split()[-1] == "lo" for line in v6)
    except OSError:
        return False

if {"install", "download"} & set(sys.orig_argv) and not {"--no-index", "-h", "--help"} & set(sys.orig_argv) and offline():
    os.environ.setdefault("PIP_RETRIES", "0")
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    print(
        'lowtide: this sandbox has no network, so pip reaches no index: make it with network="full", or with '
        'network=["pypi.org", "files.pythonhosted.org"]',
        file=sys.stderr,
    )
'''
_PIP = f"""#!/bin/sh
{BIN}/python3 -c 'import pip' 2>/dev/null || {BIN}/python3 -m ensurepip >/dev/null 2>&1
exec {BIN}/python3 -m pip "$@"
"""


def build(root: Path) -> None:
    """Into the layer under every sandbox; nothing where this Python cannot be seen inside."""
    program = interpreter()
    if program is None:
        return
    place = root / PLACE.lstrip("/")
    packages = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "include").mkdir()
    (place / "lib64").symlink_to("lib")
    version = ".".join(map(str, sys.version_info[:3]))
    (place / "pyvenv.cfg").write_text(
        f"home = {os.path.dirname(program)}\ninclude-system-site-packages = true\nversion = {version}\n"
    )
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    (place / "bin" / names[0]).symlink_to(program)
    for name in names[1:]:
        (place / "bin" / name).symlink_to(names[0])
    for name in ("pip", "pip3"):
        (place / "bin" / name).write_text(_PIP)
        (place / "bin" / name).chmod(0o755)
    visible = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (packages / "_visible.pth").write_text("".join(f"{path}\n" for path in visible))
    (packages / "_pip.pth").write_text(
        'import sys; {"pip"} & set(sys.orig_argv[1:4]) and __import__("_pip_hint")\n'
    )
    (packages / "_pip_hint.py").write_text(_HINT)


def interpreter() -> str | None:
    """The program itself, by a path that is there inside."""
    program = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    shown = ("/usr/bin/", "/usr/local/bin/", *(f"{tree}/" for tree in python_trees.trees()))
    return program if program.startswith(shown) else None
