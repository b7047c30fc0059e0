"""What there is to measure: each row's name, its section, and how it is run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Comparison

Measure = Callable[[Path, Namespace], Any]
"""One `Comparison`, several, or rows that are JSON already. Raises `Skipped`."""


def _life(home: Path, given: Namespace) -> Comparison:
    from benchmarks import life

    return life.whole_life(home, given.samples)


def _back_to_back(home: Path, given: Namespace) -> Comparison:
    from benchmarks import life

    return life.back_to_back(home, given.samples)


def _many(home: Path, given: Namespace) -> list[Comparison]:
    from benchmarks import many

    return many.against_ten(home, given.many)


def _exec(home: Path, given: Namespace) -> Comparison:
    from benchmarks import life

    return life.one_command(home, given.samples)


def _memory(home: Path, given: Namespace) -> Comparison:
    from benchmarks import memory

    return memory.alive_at_once(home, given.sandboxes)


def _import(home: Path, given: Namespace) -> Comparison:
    from benchmarks import imports

    return imports.import_sandbox(given.samples)


def _transfer(home: Path, given: Namespace) -> Comparison:
    from benchmarks import transfer

    return transfer.in_and_out(home, given.large_samples)


def _network(home: Path, given: Namespace) -> Comparison:
    from benchmarks import network

    return network.pip_install(home, min(given.large_samples, 10))


def _tree(home: Path, given: Namespace) -> Comparison:
    from benchmarks import transfer

    return transfer.tree_in_and_out(home, given.large_samples)


def _ledger(home: Path, given: Namespace) -> Comparison:
    from benchmarks import lifecycle

    return lifecycle.ledger_and_guardian(home, given.samples)


def _killed_owner(home: Path, given: Namespace) -> Comparison:
    from benchmarks import lifecycle

    return lifecycle.killed_owner(home, given.owned)


def _long_ledger(home: Path, given: Namespace) -> list[Comparison]:
    from benchmarks import lifecycle

    return lifecycle.long_ledger(home, given.large_samples)


def _engine(name: str, *, large: bool = False) -> Measure:
    def measure(home: Path, given: Namespace) -> Comparison:
        from benchmarks import engines

        run: Callable[[int], Comparison] = getattr(engines, name)
        return run(given.large_samples if large else given.samples)

    return measure


def _image(home: Path, given: Namespace) -> Comparison:
    from benchmarks import images

    return images.from_image(home, given.samples)


def _hosted(provider: str) -> Measure:
    def measure(home: Path, given: Namespace) -> list[dict[str, Any]]:
        from benchmarks import hosted

        crowd, ending = str(given.sandboxes // 2), str(given.sandboxes)
        return hosted.measured(
            provider, "--samples", str(given.large_samples), "--crowd", crowd, "--ending", ending
        )

    return measure


def _daytona_import(home: Path, given: Namespace) -> Comparison:
    from benchmarks import imports

    return imports.import_beside("daytona", given.samples)


def _actions(name: str, *, large: bool = False) -> Measure:
    def measure(home: Path, given: Namespace) -> Comparison:
        from benchmarks import actions

        run: Callable[[int], Comparison] = getattr(actions, name)
        return run(given.large_samples if large else given.samples)

    return measure


SECTIONS: dict[str, dict[str, Measure]] = {
    "The local provider": {
        "life": _life,
        "life-back-to-back": _back_to_back,
        "exec": _exec,
        "memory": _memory,
        "many": _many,
        "import": _import,
        "transfer": _transfer,
        "tree": _tree,
        "network": _network,
    },
    "Nothing left behind": {
        "ledger": _ledger,
        "killed-owner": _killed_owner,
        "long-ledger": _long_ledger,
    },
    "The agent's view": {
        "action-swerex": _actions("round_trip_swerex", large=True),
        "action-openhands": _actions("round_trip_openhands", large=True),
        "action-launch": _actions("launch", large=True),
        "action-memory": _actions("idle_memory", large=True),
        "action-output": _actions("much_output", large=True),
    },
    "Docker, Kubernetes and images": {
        "docker-life": _engine("docker_life"),
        "docker-exec": _engine("docker_exec"),
        "kubernetes-create": _engine("kubernetes_create", large=True),
        "kubernetes-exec": _engine("kubernetes_exec"),
        "kubernetes-transfer": _engine("kubernetes_transfer", large=True),
        "image": _image,
    },
    "E2B, on the emulator": {"e2b": _hosted("e2b")},
    "Daytona, on the emulator": {"daytona": _hosted("daytona"), "daytona-import": _daytona_import},
    "Modal, on the emulator": {"modal": _hosted("modal")},
    "Runloop, on the emulator": {"runloop": _hosted("runloop")},
    "CoreWeave, on the emulator": {"coreweave": _hosted("coreweave")},
}
NAMES = tuple(name for rows in SECTIONS.values() for name in rows)
