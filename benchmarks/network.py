"""How long `pip install` of a large wheel takes through ``network="internet"``, against this machine's own network.

Both sides install from an index on a public address, in network namespaces that are made for it: a machine, which
runs lowtide, and a world with the index. Nothing leaves this computer.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.measure import Comparison, Skipped, interleave, timed

SIZE = 50 * 1000 * 1000
INDEX = "http://good.example/files/simple/"


def pip_install(home: Path, samples: int) -> Comparison:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise Skipped("makes network namespaces: needs root and `ip` (iproute2)")
    from tests.allow_list.world import run_on_the_machine

    with tempfile.TemporaryDirectory(dir=home) as folder:
        page = Path(folder, "simple", "large")
        page.mkdir(parents=True)
        _wheel(page / "large-1.0-py3-none-any.whl")
        (page / "index.html").write_text(
            '<a href="large-1.0-py3-none-any.whl">large-1.0-py3-none-any.whl</a>'
        )
        command = [sys.executable, "-m", "benchmarks.network", str(samples)]
        done = run_on_the_machine(command, 1800, Path(folder))
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    measured = json.loads(done.stdout)
    return Comparison(
        name="network",
        what='`pip install` of a 50 MB wheel through `network="internet"`',
        against='the same with `network="host"`',
        limit=1.3,
        unit="ms",
        ours=tuple(measured["internet"]),
        raw=tuple(measured["host"]),
        details={},
    )


def _wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("large/__init__.py", "")
        wheel.writestr("large/data.bin", os.urandom(SIZE))
        wheel.writestr("large-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: large\nVersion: 1.0\n")
        wheel.writestr(
            "large-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = [*wheel.namelist(), "large-1.0.dist-info/RECORD"]
        wheel.writestr("large-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))


def _on_the_machine(samples: int) -> None:
    from lowtide import Sandbox

    command = ["pip", "install", "--quiet", "--no-deps", "--no-cache-dir", "--force-reinstall"]
    command += ["--disable-pip-version-check"]
    command += ["--index-url", INDEX, "--trusted-host", "good.example", "large"]
    with (
        Sandbox.run(provider="local", network="internet") as internet,
        Sandbox.run(provider="local", network="host") as host,
    ):

        def install(sandbox: Sandbox) -> float:
            return timed(lambda: sandbox.exec(command, check=True, timeout_seconds=300).result())

        ours, raw = interleave(lambda: install(internet), lambda: install(host), samples=samples, warm_up=1)
    print(json.dumps({"internet": ours, "host": raw}))


if __name__ == "__main__":
    _on_the_machine(int(sys.argv[1]))
