"""The agent's view against its peers: one command's round trip, launch to ready, memory, much output.

Peers live in environments of their own, named by variables: LOWTIDE_BENCH_SWEREX is the python of one with
swe-rex, LOWTIDE_BENCH_OPENHANDS of one with openhands-sdk and openhands-agent-server (Python 3.12).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile

from benchmarks.measure import Comparison, Skipped, interleave, timed
from lowtide import Sandbox
from lowtide.actionserver.bundle import bundle
from lowtide.runtime import LocalRuntime

_SWEREX = """
import asyncio, json, sys, time
from swerex.runtime.local import LocalRuntime
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
async def main():
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=60.0))
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        await runtime.run_in_session(BashAction(command="echo hi"))
        print((time.perf_counter() - start) * 1000, flush=True)
asyncio.run(main())
"""
_OPENHANDS = """
import os, socket, subprocess, sys, time, urllib.request
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from openhands.sdk.workspace import RemoteWorkspace
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
server = subprocess.Popen([sys.executable, "-m", "openhands.agent_server", "--host", "127.0.0.1", "--port", str(port)],
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).read()
            break
        except OSError:
            time.sleep(0.1)
    workspace = RemoteWorkspace(host=f"http://127.0.0.1:{port}", working_dir="/tmp")
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        workspace.execute_command("echo hi")
        print((time.perf_counter() - start) * 1000, flush=True)
finally:
    server.terminate()
    server.wait()
"""


class _Peer:
    """Another project's client in its own interpreter: one line asks for one sample."""

    def __init__(self, variable: str, what: str, program: str) -> None:
        python = os.environ.get(variable)
        if not python:
            raise Skipped(f"{variable} is not set: the python of an environment with {what}")
        self._directory = tempfile.TemporaryDirectory(prefix="lowtide-peer-")  # peers write where they stand
        self._process = subprocess.Popen(
            [python, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._directory.name,
        )
        self._answer("ready")

    def sample(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._directory.cleanup()

    def _answer(self, wanted: str | None = None) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if wanted is None or line.strip() == wanted:
                return line
        raise RuntimeError("the peer ended")


def round_trip_swerex(samples: int) -> Comparison:
    peer = _Peer("LOWTIDE_BENCH_SWEREX", "swe-rex 1.4", _SWEREX)
    return _round_trip("action-swerex", "SWE-ReX run_in_session", 0.03, peer, samples)


def round_trip_openhands(samples: int) -> Comparison:
    peer = _Peer("LOWTIDE_BENCH_OPENHANDS", "openhands-sdk and openhands-agent-server", _OPENHANDS)
    name = "openhands-agent-server, RemoteWorkspace.execute_command"
    return _round_trip("action-openhands", name, 0.5, peer, samples)


def _round_trip(name: str, against: str, limit: float, peer: _Peer, samples: int) -> Comparison:
    try:
        with LocalRuntime() as runtime:
            ours, theirs = interleave(
                lambda: timed(lambda: runtime.run_command("echo hi").result()), peer.sample, samples=samples
            )
    finally:
        peer.close()
    return Comparison(
        name=name,
        what='`run_command("echo hi")` round trip, persistent shell',
        against=against,
        limit=limit,
        unit="ms",
        ours=ours,
        raw=theirs,
        details={},
    )


def launch(samples: int) -> Comparison:
    """From the exec that starts it to its word that the port takes requests; each time in a fresh directory."""
    made = bundle()
    path = f"/tmp/{made.name}"
    with Sandbox.run(provider="local") as sandbox:
        sandbox.write_file(path, made.data).result()
        count = iter(range(1_000_000))

        def serve() -> float:
            number = next(count)
            config = {
                "key": "k",
                "port": 20_000 + number,
                "directory": f"/tmp/l{number}",
                "working_dir": "/tmp",
            }
            spent = timed(
                lambda: sandbox.exec(
                    ["python3", "-I", path, "serve"], stdin=json.dumps(config) + "\n", check=True
                ).result()
            )
            sandbox.exec(["pkill", "-f", "actionserver.*serve"]).result()
            return spent

        def bare() -> float:
            return timed(lambda: sandbox.exec(["python3", "-I", "-c", "pass"]).result())

        ours, theirs = interleave(serve, bare, samples=samples)
    return Comparison(
        name="action-launch",
        what="action server: launch to ready in a local sandbox",
        against="`python3 -c pass` there",
        limit=8.0,
        unit="ms",
        ours=ours,
        raw=theirs,
        details={"file_bytes": len(made.data)},
    )


def idle_memory(samples: int) -> Comparison:
    read = "grep VmRSS /proc/{pid}/status"
    ours, theirs = [], []
    for _ in range(samples):
        with LocalRuntime() as runtime:
            server = (
                runtime.sandbox.exec(["pgrep", "-f", "actionserver.*serve"], check=True)
                .result()
                .stdout.split()[0]
            )
            ours.append(_kilobytes(runtime.sandbox, read.format(pid=server)))
            wait = (
                "python3 -I -c 'import time; time.sleep(100)' & sleep 0.5; "
                + read.format(pid="$!")
                + "; kill $!"
            )
            theirs.append(_kilobytes(runtime.sandbox, wait))
    return Comparison(
        name="action-memory",
        what="memory of an idle action server",
        against="a bare `python3`",
        limit=3.0,
        unit="MB",
        ours=tuple(ours),
        raw=tuple(theirs),
        details={"measure": "VmRSS"},
    )


def _kilobytes(sandbox: Sandbox, script: str) -> float:
    return int(sandbox.exec(["sh", "-c", script], check=True).result().stdout.split()[1]) / 1000


def much_output(samples: int) -> Comparison:
    command = "yes 0123456789abcdef | head -c 10000000"
    with LocalRuntime() as runtime:

        def ours() -> float:
            return timed(lambda: runtime.run_command(command).result())

        def plain() -> float:
            def work() -> None:
                with subprocess.Popen(
                    ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                ) as bash:
                    assert bash.stdout is not None
                    while bash.stdout.read(1 << 16):
                        pass

            return timed(work)

        mine, theirs = interleave(ours, plain, samples=samples)
    return Comparison(
        name="action-output",
        what="10 MB of output through `run`",
        against="plain bash writing to a pipe",
        limit=5.0,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )
