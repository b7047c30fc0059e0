"""Isolated Python: how every process that lowtide starts beside the program is started.

Such a process runs with the user's rights and, some of them, with credentials. So nothing that lies in
the working directory, beside the program or in PYTHONPATH may stand in for a module it imports: the
interpreter starts with ``-I``, this very lowtide is loaded from where it is, and what the program has
on its path besides comes last.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import cache
from pathlib import Path

from lowtide.errors import MissingDependencyError

# A lock or a pipe that the program has inherited is not to be held for as long as the detached process lives.
_DETACH = "import os\nos.closerange(3, os.sysconf('SC_OPEN_MAX'))\nif os.fork(): os._exit(0)\n"
_START = """\
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
import json
root, more, module, *arguments = sys.argv[1:]
spec = PathFinder.find_spec("lowtide", [root])
sys.modules["lowtide"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["lowtide"])
sys.path += [path for path in json.loads(more) if path not in sys.path]
sys.argv = [module, *arguments]
sys.exit(import_module(module).main(*arguments))
"""


def command(module: str, *arguments: str, detached: bool = False) -> list[str]:
    """The command line that calls `main` of that module of this lowtide with these arguments.

    `detached`: the process is no child of its starter for longer than a moment. Raises
    MissingDependencyError where there is no Python to start (an application frozen into one file).
    """
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    program = _DETACH + _START if detached else _START
    return [python(), *flags, "-c", program, _root(), json.dumps(_path()), module, *arguments]


def python() -> str:
    """The interpreter for such processes: ``LOWTIDE_PYTHON``, else the one that runs here."""
    chosen = os.environ.get("LOWTIDE_PYTHON")
    if chosen:
        return chosen
    if not (getattr(sys, "frozen", False) or _compiled() or not os.path.exists(_root())):
        for candidate in (sys.executable, *_beside_the_library()):
            name = os.path.basename(candidate).lower()
            if name.startswith(("python", "pypy")) and os.access(candidate, os.X_OK):
                return candidate
    raise MissingDependencyError(
        f"there is no Python to start lowtide's own processes with: {sys.executable or 'this program'} is not one. "
        f"Set LOWTIDE_PYTHON to a Python {sys.version_info.major}.{sys.version_info.minor} that has lowtide's dependencies",
        install="LOWTIDE_PYTHON",
    )


def _compiled() -> bool:
    """Nuitka leaves its mark in every module it compiles."""
    return "__compiled__" in globals()


def _beside_the_library() -> list[str]:
    """Where a program embeds Python (uWSGI, Blender), its executable is not one; these are."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [
        os.path.join(prefix, "bin", f"python{version}")
        for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)
    ]


@cache
def _root() -> str:
    """The directory (or archive) that this lowtide lies in."""
    return str(Path(__file__).resolve().parents[1])


def installation() -> str:
    """The directory (or archive) that this lowtide is loaded from."""
    return _root()


def _installed() -> tuple[int, int] | None:
    """Which file one module of this lowtide is; in an archive, the archive."""
    for path in (os.path.join(_root(), "lowtide", "_version.py"), _root()):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            return found.st_dev, found.st_ino
    return None


_LOADED = _installed()


def intact() -> bool:
    """Whether the lowtide that runs here is still installed: not removed, nor replaced by another version."""
    return _installed() == _LOADED


def _path() -> list[str]:
    """What a helper may need of the program's own path: its dependencies, wherever they were installed.

    Not the program's directory, nor the working directory: they are on the path only by being there.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = set()
    with contextlib.suppress(FileNotFoundError):  # somebody has removed it
        beside.add(os.getcwd())
    if main:
        beside |= {os.path.dirname(os.path.abspath(main)), os.path.dirname(os.path.realpath(main))}
    entries = [entry for entry in sys.path if os.path.isabs(entry) and entry not in beside]
    return [*entries, _root()]
