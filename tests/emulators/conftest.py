"""One emulator per worker for the tests that can share it, and the SDK's arguments that lead to it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator

pytest.importorskip("aiohttp")
pytest.importorskip("trustme")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("e2b", plain=True, home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle
        left = handle.state()["sandboxes"]["e2b"]
        assert not left, f"tests left sandboxes behind: {left}"


@pytest.fixture
def e2b(shared: Handle) -> Iterator[Handle]:
    """The shared emulator, with no fault armed before and after."""
    shared.faults.clear()
    yield shared
    shared.faults.clear()


def options_of(handle: Handle) -> dict[str, Any]:
    """What points the SDK at an emulator by arguments, without touching this process's environment."""
    url = handle.urls["e2b"]
    return {"api_key": handle.environment["E2B_API_KEY"], "api_url": url, "sandbox_url": url}


@pytest.fixture
def options(e2b: Handle) -> dict[str, Any]:
    return options_of(e2b)


@pytest.fixture
def create(options: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Make sandboxes through the real SDK; they are killed afterwards."""
    sdk = pytest.importorskip("e2b")
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        sandbox = sdk.Sandbox.create(*args, **{**options, **kwargs})
        made.append(sandbox)
        return sandbox

    yield make
    for sandbox in made:
        sandbox.kill(**options)


@pytest.fixture(scope="session")
def shared_daytona(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("daytona", home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle
        left = handle.state()["sandboxes"]["daytona"]
        assert not left, f"tests left sandboxes behind: {left}"


@pytest.fixture
def daytona(shared_daytona: Handle) -> Iterator[Handle]:
    """The shared emulator, with no fault armed before and after."""
    shared_daytona.faults.clear()
    yield shared_daytona
    shared_daytona.faults.clear()


@pytest.fixture(scope="session")
def daytona_client(shared_daytona: Handle) -> Any:
    """The real SDK. One for all: it has no close, and keeps a thread for events."""
    sdk = pytest.importorskip("daytona")
    return sdk.Daytona(daytona_config(shared_daytona))


@pytest.fixture(scope="session")
def daytona_settings(shared_daytona: Handle) -> Any:
    """What points the SDK at the emulator, without touching this process's environment."""
    pytest.importorskip("daytona")
    return daytona_config(shared_daytona)


def daytona_config(handle: Handle) -> Any:
    sdk = pytest.importorskip("daytona")
    found = handle.environment
    return sdk.DaytonaConfig(
        api_key=found["DAYTONA_API_KEY"], api_url=found["DAYTONA_API_URL"], target=found["DAYTONA_TARGET"]
    )


@pytest.fixture
def daytona_create(daytona: Handle, daytona_client: Any) -> Iterator[Callable[..., Any]]:
    """Make sandboxes through the real SDK; they are deleted afterwards, and waited for."""
    sdk = pytest.importorskip("daytona")
    mark = uuid.uuid4().hex

    def make(**kwargs: Any) -> Any:
        kwargs["labels"] = {"test": mark, **kwargs.get("labels", {})}
        kind = sdk.CreateSandboxFromImageParams if "image" in kwargs else sdk.CreateSandboxFromSnapshotParams
        # Without a timeout the SDK leaves SIGALRM, and so pytest's own timeout, alone.
        return daytona_client.create(kind(**kwargs), timeout=0)

    make.mark = mark  # type: ignore[attr-defined]
    yield make
    daytona.faults.clear()
    until = time.monotonic() + 60
    while left := [s for s in daytona.state()["sandboxes"]["daytona"] if s["labels"].get("test") == mark]:
        assert time.monotonic() < until, f"not deleted: {left}"
        for one in left:
            with contextlib.suppress(sdk.DaytonaError):
                daytona_client.get(one["sandbox_id"]).delete(timeout=0)
        time.sleep(0.05)


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python text as somebody's program: a fresh interpreter with the given environment on top."""

    def run(text: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "their_script.py"
        script.write_text(text)
        return subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


def processes_with(mark: str) -> list[int]:
    """Processes of this machine whose command line carries `mark`."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                line = (path / "cmdline").read_bytes()
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in line and state != "Z" and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found
