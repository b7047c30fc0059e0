"""The one file: this package's sources as a zip that Python runs, made from what is installed, the same every time.

It is not kept in the repository, so it cannot be out of step with the sources; making it takes some
fifty milliseconds, once in a process. Beside each source stands its bytecode for the Python that runs lowtide:
a sandbox with the same one (always so on `local`) need not compile, any other takes the source.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import zipfile
from functools import cache
from importlib import resources
from typing import NamedTuple

_LEFT_OUT = ("bundle.py",)
_MOMENT = (1980, 1, 1, 0, 0, 0)


class Bundle(NamedTuple):
    data: bytes
    digest: str

    @property
    def name(self) -> str:
        """Changes with the content, so that one that is in the sandbox already is the right one."""
        return f"lowtide-actionserver-{self.digest[:16]}.pyz"


@cache
def bundle() -> Bundle:
    """The file to bring into a sandbox."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        _put(
            archive,
            "__main__.py",
            b"import sys\nfrom lowtide.actionserver.__main__ import main\nsys.exit(main(sys.argv[1:]))\n",
        )
        _put(archive, "lowtide/__init__.py", b"")
        for folder in ("", "drivers"):
            place = resources.files("lowtide.actionserver") / folder
            for file in sorted(place.iterdir(), key=lambda item: item.name):
                if (
                    file.is_file()
                    and file.name.endswith((".py", ".js", ".sh"))
                    and file.name not in _LEFT_OUT
                ):
                    _put(
                        archive,
                        "/".join(filter(None, ("lowtide/actionserver", folder, file.name))),
                        file.read_bytes(),
                    )
    data = b"#!/usr/bin/env python3\n" + out.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())


def _put(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(path, _MOMENT), data)
    if path.endswith(".py"):
        archive.writestr(zipfile.ZipInfo(path + "c", _MOMENT), _bytecode(path, data))


def _bytecode(path: str, source: bytes) -> bytes:
    """As importlib reads it: magic, "do not look at the source", a hash nobody checks, the code."""
    code = compile(source, path, "exec", dont_inherit=True, optimize=0)
    head = importlib.util.MAGIC_NUMBER + (0b01).to_bytes(4, "little") + importlib.util.source_hash(source)
    return head + marshal.dumps(code)
