"""Harbor: trials of a small task with its own agents oracle and nop, late keep, its page, and a kill -9 in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from lowtide import Sandbox
from lowtide.integrations.harbor import LowtideEnvironment
from tests.integrations.suites.cancels import *  # noqa: F403 - the cases that all adapters share
from tests.integrations.suites.cancels import Adapter
from tests.integrations.suites.kills import READY, killed_in_the_middle, page_runs, shown
from tests.integrations.suites.own_home import PROVIDER

ENVIRONMENT = "lowtide.integrations.harbor:LowtideEnvironment"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    place = tmp_path / "task"
    for name, text in {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 120\n[verifier]\ntimeout_sec = 120\n',
        "instruction.md": "Write 42 into /tmp/answer.\n",
        "environment/note.txt": "part of the environment\n",
        "solution/solve.sh": "#!/bin/bash\necho $((6 * 7)) > /tmp/answer\n",
        "tests/test.sh": "#!/bin/bash\n"
        'if [ "$(cat /tmp/answer)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n',
    }.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return place


@pytest.fixture
def adapter(task: Path) -> Adapter:
    async def make() -> LowtideEnvironment:
        environment = LowtideEnvironment(
            environment_dir=task / "environment",
            environment_name="task",
            session_id="session",
            trial_paths=TrialPaths(task.parent / "trial"),
            task_env_config=EnvironmentConfig(),
            provider=PROVIDER,
        )
        await environment.start(force_build=False)
        return environment

    async def put(environment: LowtideEnvironment, path: str, data: bytes) -> None:
        (task / "file").write_bytes(data)
        await environment.upload_file(task / "file", path)

    return Adapter(
        make=make, run=LowtideEnvironment.exec, put=put, end=lambda environment: environment.stop(delete=True)
    )


def trials(task: Path, agent: str, *arguments: str, provider: str = PROVIDER) -> list[dict[str, Any]]:
    """What a run says of each; one on another provider than the suite's is on that one's emulator."""
    python, jobs = Path(sys.executable), task.parent / f"jobs-{agent}"
    command = (
        [str(python), "-m", "lowtide", "emulate", provider, "--plain", "--"] if provider != PROVIDER else []
    )
    command += [str(python.with_name("harbor")), "run", "-p", str(task), "-a", agent, "-o", str(jobs)]
    command += [
        "--env",
        ENVIRONMENT,
        "--ek",
        f"provider={provider}",
        "--ek",
        "keep_for_seconds=60",
        *arguments,
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "HARBOR_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(result.read_text()) for result in jobs.glob("*/*/result.json")]


def harbor(task: Path, agent: str, *arguments: str, provider: str = PROVIDER) -> list[float]:
    """The rewards of a run."""
    found = trials(task, agent, *arguments, provider=provider)
    assert [trial["exception_info"] for trial in found] == [None] * len(found)
    return [trial["verifier_result"]["rewards"]["reward"] for trial in found]


def test_the_oracle_is_rewarded_and_who_does_nothing_is_not(task: Path) -> None:
    assert harbor(task, "oracle") == [1.0]
    assert shown() == []
    assert harbor(task, "nop") == [0.0]
    assert shown() == []


@pytest.mark.skipif(PROVIDER != "local", reason="it brings its own emulators")
@pytest.mark.parametrize("provider", ["daytona", "modal"])
def test_where_all_commands_have_one_user_what_harbor_does_as_root_is_done(task: Path, provider: str) -> None:
    # the user of Daytona's and Runloop's machines is not root and has sudo; Modal's is root
    solution = "#!/bin/bash\ncat /solution/solve.sh > /dev/null && echo $((6 * 7)) > /tmp/answer\n"
    (task / "solution/solve.sh").write_text(solution)
    assert harbor(task, "oracle", provider=provider) == [1.0]
    assert shown() == []


@pytest.mark.skipif(PROVIDER != "local", reason="nothing is created")
def test_what_a_provider_cannot_limit_is_refused_with_harbors_own_option(task: Path) -> None:
    (task / "task.toml").write_text('version = "1.0"\n[environment]\ncpus = 1\n')
    (trial,) = trials(task, "oracle", "--max-retries", "0", provider="runloop")
    assert "'runloop' cannot do 'cpu-limit'" in trial["exception_info"]["exception_message"]
    assert "--cpus ignore" in trial["exception_info"]["exception_message"]


def test_no_delete_keeps_it(task: Path) -> None:
    assert harbor(task, "oracle", "--no-delete") == [1.0]
    (row,) = shown()
    box = Sandbox.from_id(row["id"], provider=PROVIDER).result()
    assert box.read_file("/tmp/answer").result() == b"42\n"
    Sandbox.delete(row["id"], provider=PROVIDER).result()


def test_the_page_runs(tmp_path: Path) -> None:
    page_runs("harbor", tmp_path)


def test_kill_dash_nine_in_the_middle_of_a_trial_leaves_nothing(task: Path, tmp_path: Path) -> None:
    (task / "solution/solve.sh").write_text(f"#!/bin/bash\n{READY}\n")
    killed_in_the_middle(
        f"""
        import os, sys
        os.environ["HARBOR_TELEMETRY"] = "0"
        sys.argv = ["harbor", "run", "-p", {str(task)!r}, "-a", "oracle", "--env", {ENVIRONMENT!r}, "-o", "jobs"]
        from harbor.cli.main import app
        app()
        """,
        tmp_path,
    )
