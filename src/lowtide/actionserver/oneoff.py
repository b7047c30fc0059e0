"""A command in a shell of its own, beside the sessions: `is_static`."""

from __future__ import annotations

import os
import threading
import time

from lowtide.actionserver.descriptors import readable
from lowtide.actionserver.output import HeadTail
from lowtide.actionserver.processes import end_session
from lowtide.actionserver.shell import ENVIRONMENT, Outcome

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_GRACE_SECONDS = 2.0


def run(
    command: str,
    *,
    cwd: str,
    environment: dict[str, str],
    hard: float | None,
    listener: Callable[[bytes], None] | None = None,
) -> Outcome:
    """Wait for its end; after `hard` seconds all it started is ended."""
    import subprocess

    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=cwd,
        env={**environment, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output, suffix, code = HeadTail(), "", 0
    assert process.stdout is not None
    source = process.stdout.fileno()
    over_read, over_write = os.pipe()

    def tell() -> None:
        process.wait()
        os.close(over_write)

    threading.Thread(target=tell, name="one-off", daemon=True).start()
    try:
        open_ends = [source, over_read]
        while True:
            left = None if hard is None else max(0.0, began + hard - time.monotonic())
            ready = readable(open_ends, left)
            if not ready and left == 0.0:
                end_session(process.pid, _GRACE_SECONDS)
                suffix = f"\n[Ended after {hard:g} seconds.]"
                break
            if source in ready:
                data = os.read(source, 1 << 16)
                if not data:
                    open_ends.remove(source)
                output.append(data)
                if listener is not None and data:
                    listener(data)
            elif over_read in ready:  # it has ended and what it wrote is read; its background jobs may go on
                code = process.wait()
                break
    finally:
        os.close(over_read)
        process.stdout.close()
    return Outcome(
        running=False,
        exit_code=-1 if suffix else 128 - code if code < 0 else code,
        taken=output.take(),
        cwd=cwd,
        seconds=time.monotonic() - began,
        suffix=suffix,
    )
