"""Starting and ending the proxy of one sandbox, from the process that makes or destroys it."""

from __future__ import annotations

import asyncio
import errno
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide import orphans, threads
from lowtide.errors import LowtideError, SandboxFailedError, UnsupportedError
from lowtide.providers.base import Network, NetworkMode

_PATIENCE_SECONDS = 30.0
_PACKAGES = str(Path(__file__).parents[3])
# Nothing of this program's environment, and nothing that a site file could change.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from lowtide.providers.network.__main__ import main; main()"
)


@dataclass(frozen=True, slots=True)
class Served:
    """The process of a proxy, and when it started."""

    pid: int
    start_time: int


async def start(
    provider: str, sandbox_id: str, pid: int, start_time: int, network: Network, denied: Path
) -> Served:
    """Connect the network of that process to what `network` allows. Returns when it works.

    `denied` is the file in which the proxy records what it refuses.
    """
    allow = None if network.mode is NetworkMode.INTERNET else list(network.allow)
    asked = {"allow": allow, "pid": pid, "start_time": start_time, "denied": str(denied)}
    answered = await asyncio.to_thread(_run, json.dumps(asked), sandbox_id)
    if "why" in answered:
        raise _failure(provider, sandbox_id, network, answered)
    orphans.expect(answered["pid"], answered["start_time"])
    return Served(answered["pid"], answered["start_time"])


def _run(asked: str, sandbox_id: str) -> dict[str, Any]:
    python = getattr(sys, "_base_executable", None) or sys.executable
    done = threads.run_process(
        [
            python,
            "-I",
            "-S",
            "-c",
            _PROGRAM,
            _PACKAGES,
            sandbox_id,
        ],  # its id, for whoever reads a process list
        input=asked.encode(),
        capture_output=True,
        env={},
        cwd="/",
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    try:
        answered = json.loads(done.stdout)
    except ValueError:
        answered = {"why": done.stderr.decode("utf-8", "replace").strip()[-500:] or "it ended without a word"}
    return answered if isinstance(answered, dict) else {"why": "it answered nonsense"}


def _failure(provider: str, sandbox_id: str, network: Network, answered: dict[str, Any]) -> LowtideError:
    code, why = answered.get("errno"), answered["why"]
    if code in (
        errno.EOPNOTSUPP,
        errno.EPROTONOSUPPORT,
        errno.ENOENT,
        errno.EPERM,
        errno.EACCES,
        errno.EAFNOSUPPORT,
    ):
        return UnsupportedError(
            f"this machine cannot enforce network={network.mode.value!r} for a sandbox: {why}",
            provider=provider,
            argument="network",
            feature=f"network-{network.mode.value}",
            alternative="a kernel with nf_tables and its redirect (modprobe nft_redir), or network='none'",
        )
    return SandboxFailedError(
        f"the sandbox's network could not be started: {why}",
        provider=provider,
        sandbox_id=sandbox_id,
        reason="network",
    )
