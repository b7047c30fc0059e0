"""The matrix's fixtures, and its table: cases, leaks, wrongly ended, rows lost, slowest clean-up."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SEED
from tests.crash.environments import Clock, Disk, small_disk
from tests.crash.world import World

EMULATED = {
    "e2b": "e2b",
    "daytona": "daytona",
    "modal": "modal",
    "runloop": "runloop_api_client",
    "coreweave": "cwsandbox",
}
"""Providers with an emulator, and the SDK that each needs."""
CHOSEN = os.environ.get("LOWTIDE_CRASH_PROVIDERS")
"""Which providers the whole matrix runs on; unset: on two, and a few cases of it on every one there is."""


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """The case's own dice: its name and the seed of the run decide how they fall."""
    seed = os.environ[SEED]
    print(f"{SEED}={seed} draws the same again")  # shown with a failure
    return random.Random(f"{seed} {request.node.nodeid}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    providers = CHOSEN.split(",") if CHOSEN else ["faulty", "local"]
    if not CHOSEN and metafunc.definition.get_closest_marker("everywhere"):
        providers += ["docker", "kubernetes", *EMULATED]
    if not CHOSEN:
        # A core case on hosted providers' emulators as well; or one that only such a provider can play.
        for marker in metafunc.definition.iter_markers("also"):
            providers += marker.args or EMULATED
        for marker in metafunc.definition.iter_markers("only"):
            providers = list(marker.args or EMULATED)
    for only in ("faulty", "local"):
        if metafunc.definition.get_closest_marker(only):
            providers = [name for name in providers if name == only]
    metafunc.parametrize("world", providers, indirect=True)


def _unavailable(provider: str) -> str | None:
    """Why the matrix cannot run on this provider here."""
    engine = {"docker": "DOCKER_HOST", "kubernetes": "KUBECONFIG"}.get(provider)
    if engine is not None and not os.environ.get(engine):
        return f"{engine} is not set: no {provider} engine here"
    if provider in EMULATED and importlib.util.find_spec(EMULATED[provider]) is None:
        return f"the {provider} SDK is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/crash" in str(item.path):
            item.add_marker(pytest.mark.crash)


@pytest.fixture(scope="session")
def emulated() -> Iterator[Callable[[str], dict[str, str]]]:
    """The environment of an emulator that serves the whole session. Worlds tell theirs apart by their ledgers."""
    from lowtide.testing import emulator

    running: dict[str, dict[str, str]] = {}
    with contextlib.ExitStack() as stack:

        def environment(provider: str) -> dict[str, str]:
            if provider not in running:
                running[provider] = stack.enter_context(emulator(provider, plain=True)).environment
            return running[provider]

        yield environment


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path: Path, emulated: Callable[[str], dict[str, str]]
) -> Iterator[World]:
    reason = _unavailable(request.param)
    if reason is not None:
        pytest.skip(reason)
    environment: dict[str, str] = emulated(request.param) if request.param in EMULATED else {}
    if request.param in ("docker", "kubernetes"):
        environment = {"LOWTIDE_IMAGE": os.environ["LOWTIDE_TEST_IMAGE"]}
    world = World(tmp_path, request.param, environment)
    yield world
    world.close()
    request.node.user_properties.append(
        (
            "crash",
            {
                "group": _group(request.node.path),
                "provider": request.param,
                "slowest": world.slowest,
                "cases": world.cases,
            },
        )
    )


def _group(path: Path) -> str:
    """A file's name in the table."""
    return path.stem.removeprefix("test_").replace("_", " ")


@pytest.fixture
def disk(world: World) -> Iterator[Disk]:
    """The world's home on a disk of its own, from before the first process to after the last."""
    with small_disk(world.home) as disk:
        yield disk
        disk.free()
        world.close()


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    """A wall clock that can be stepped, for what is started with its `environ`."""
    return Clock(tmp_path)


@pytest.fixture
def peer(world: World) -> Iterator[None]:
    """A live neighbour under the same ledger; it must not notice anything."""
    actor = world.start_peer()
    yield
    world.end_peer(actor)
    world.wait_until_clean()


_cases: list[dict[str, Any]] = []
_failures: list[tuple[str, str]] = []
_KINDS = {"leaks": "leaked after", "wrongly ended": "wrongly ended", "rows lost": "rows lost"}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "tests/crash" not in report.nodeid:
        return
    if report.when == "teardown":
        _cases.extend(value for name, value in report.user_properties if name == "crash")
    if report.failed:
        text = str(report.longrepr)
        kind = next((kind for kind, mark in _KINDS.items() if mark in text), "other")
        _failures.append((_group(Path(report.nodeid.split("::")[0])), kind))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(
        lambda: {"cases": 0, **dict.fromkeys(_KINDS, 0), "other": 0, "slowest": 0.0}
    )
    for case in _cases:
        row = rows[case["group"], case["provider"]]
        row["cases"] += case["cases"]
        row["slowest"] = max(row["slowest"], case["slowest"])
    for group, kind in _failures:
        rows[group, "failed"][kind] += 1
    if not rows:
        return
    terminalreporter.section(f"crash matrix ({SEED}={os.environ[SEED]})")
    head = (
        "instants",
        "provider",
        "cases",
        "leaks",
        "wrongly ended",
        "rows lost",
        "other",
        "slowest clean-up",
    )
    terminalreporter.write_line("| " + " | ".join(head) + " |")
    terminalreporter.write_line("|" + "---|" * len(head))
    for (group, provider), row in sorted(rows.items()):
        cells = (
            group,
            provider,
            row["cases"],
            row["leaks"],
            row["wrongly ended"],
            row["rows lost"],
            row["other"],
            f"{row['slowest']:.2f} s",
        )
        terminalreporter.write_line("| " + " | ".join(map(str, cells)) + " |")
    path = os.environ.get("LOWTIDE_CRASH_JSON")
    if path:
        Path(path).write_text(
            json.dumps([{"group": g, "provider": p, **row} for (g, p), row in rows.items()], indent=1)
        )
