"""Build `inside.c` for every architecture: python build.py (`scripts/engines up tools` installs the compilers)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMPILERS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}
FLAGS = (
    "-std=gnu11 -Oz -Wall -Wextra -Werror -static -nostdlib -nostartfiles -ffreestanding -fno-builtin "
    "-fno-tree-loop-distribute-patterns -fno-pie -no-pie "
    "-fno-stack-protector -fno-asynchronous-unwind-tables -Wl,--build-id=none -Wl,-z,noexecstack "
    "-Wl,-z,max-page-size=4096 -Wl,-z,noseparate-code -s"
)
SANITIZED = (
    "-std=gnu11 -g -O1 -Wall -Wextra -Werror -DHOSTED -fsanitize=address,undefined -fno-sanitize-recover=all"
)


def build(architecture: str, target: Path, flags: str = FLAGS) -> None:
    subprocess.run(
        [COMPILERS[architecture], *flags.split(), "-o", str(target), str(HERE / "inside.c")], check=True
    )
    target.chmod(0o755)


if __name__ == "__main__":
    for name in sys.argv[1:] or COMPILERS:
        build(name, HERE / f"inside.{name}")
