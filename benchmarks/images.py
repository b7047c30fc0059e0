"""How long a sandbox from a cached image lives, next to one from this machine's /usr."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any, cast

from benchmarks.life import PAUSE_SECONDS
from benchmarks.measure import Comparison, interleave, timed
from lowtide import Sandbox
from lowtide.providers import registry

NAME = "benchmark/image:200"
FILES, FILE_BYTES = 2000, 100_000


def from_image(home: Path, samples: int) -> Comparison:
    store = cast(Any, registry.provider("local")).images
    image = store.add(NAME, [_program_layer("/usr/bin/true"), _weight_layer()], {})

    def life(container_image: str | None) -> float:
        def work() -> None:
            sandbox = Sandbox.run(provider="local", container_image=container_image)
            sandbox.exec(["/usr/bin/true"], check=True).result()
            sandbox.stop().result()

        work()  # another kind came before; the first of a kind has no room waiting (docs/local.md)
        work()
        time.sleep(PAUSE_SECONDS)
        return timed(work)

    try:
        mine, theirs = interleave(lambda: life(NAME), lambda: life(None), samples=samples)
    finally:
        store.remove(NAME)
    return Comparison(
        name="image",
        what="local sandbox from a cached 200 MB image: run, exec, stop",
        against="local sandbox from the host's /usr: the same",
        limit=1.3,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={"image_mb": round(image.size_bytes / 1e6), "layers": image.layers},
    )


def _program_layer(program: str) -> io.BytesIO:
    """One program and the libraries it is linked with, at their real places."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in dict.fromkeys([program, *re.findall(r"(/\S+) \(0x", listed)]):
            with open(path, "rb") as file:
                member = tarfile.TarInfo(path.lstrip("/"))
                member.size, member.mode = os.fstat(file.fileno()).st_size, 0o755
                archive.addfile(member, file)
    out.seek(0)
    return out


def _weight_layer() -> io.BytesIO:
    out = io.BytesIO()
    content = os.urandom(FILE_BYTES)
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(FILES):
            member = tarfile.TarInfo(f"opt/weight/{number % 50}/{number}")
            member.size = FILE_BYTES
            archive.addfile(member, io.BytesIO(content))
    out.seek(0)
    return out
