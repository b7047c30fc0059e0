"""How long a sandbox's life and one command in it take."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import Comparison, interleave, timed
from benchmarks.raw import RawBubblewrap, nsenter, run
from lowtide import Sandbox

PAUSE_SECONDS = 0.05
"""A life is followed by work in the background: the next sandbox is made ready, the files are removed."""


def whole_life(home: Path, samples: int) -> Comparison:
    return _lives(home, samples, name="life", pause=PAUSE_SECONDS, in_a_row=1, limit=2.0)


def back_to_back(home: Path, samples: int) -> Comparison:
    return _lives(home, samples, name="life-back-to-back", pause=0.0, in_a_row=20, limit=1.8)


def _lives(home: Path, samples: int, *, name: str, pause: float, in_a_row: int, limit: float) -> Comparison:
    def ours() -> float:
        def life() -> None:
            sandbox = Sandbox.run(provider="local")
            sandbox.exec(["true"]).result()
            sandbox.stop().result()

        return timed(life)

    ours()  # builds the shared layer that the raw one uses too
    bubblewrap = RawBubblewrap(home)

    def raw() -> float:
        argv = bubblewrap.argv("true")
        return timed(lambda: run(argv))

    try:
        mine, theirs = interleave(ours, raw, samples=samples, pause=pause, in_a_row=in_a_row)
    finally:
        bubblewrap.close()
    return Comparison(
        name=name,
        what="`Sandbox.run()` to the first exec's result, to `stop()`" + ("" if pause else ", back to back"),
        against="raw bubblewrap with the same mounts running the same command",
        limit=limit,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


def one_command(home: Path, samples: int) -> Comparison:
    with Sandbox.run(provider="local") as sandbox:
        sandbox.wait()
        argv = nsenter(first_process(home, sandbox), "true")
        mine, theirs = interleave(
            lambda: timed(lambda: sandbox.exec(["true"]).result()),
            lambda: timed(lambda: run(argv)),
            samples=samples,
        )
    return Comparison(
        name="exec",
        what='`exec(["true"])` in a running sandbox',
        against="raw `nsenter` by `subprocess.run`",
        limit=1.6,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={},
    )


def first_process(home: Path, sandbox: Sandbox) -> int:
    """The host's pid of the sandbox's PID 1."""
    from lowtide.providers.local.sandbox_directory import SandboxDirectory

    _, inner = SandboxDirectory(home / "local" / "sandboxes" / str(sandbox.sandbox_id)).processes()
    assert inner is not None
    return inner.pid
