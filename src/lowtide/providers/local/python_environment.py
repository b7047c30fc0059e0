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
    (packages / "_pip_hint.py").write_text(Path(__file__).with_name("pip_hint.py").read_text())


def interpreter() -> str | None:
    """The program itself, by a path that is there inside."""
    program = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    shown = ("/usr/bin/", "/usr/local/bin/", *(f"{tree}/" for tree in python_trees.trees()))
    return program if program.startswith(shown) else None
