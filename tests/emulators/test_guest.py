"""What an emulated machine has from its first moment: a sandbox takes commands before its first process is done."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowtide.emulators
from lowtide.emulators import handle

SLOW = """
import runpy
from lowtide.emulators import guest
guest._FIRST = "sleep 0.6; " + guest._FIRST
runpy.run_module("lowtide.emulators", run_name="__main__", alter_sys=True)
"""
FIRST_COMMANDS = {
    "daytona": """
from daytona import Daytona
client = Daytona()
box = client.create()
print(box.process.exec("sudo -n whoami").result)
box.delete()
""",
    "e2b": """
from e2b import Sandbox
with Sandbox.create() as box:
    print(box.commands.run("sudo -n whoami").stdout)
""",
    "runloop": """
from runloop_api_client import Runloop
client = Runloop()
box = client.devboxes.create_and_await_running()
print(client.devboxes.execute_sync(box.id, command="sudo -n whoami").stdout)
client.devboxes.shutdown(box.id)
""",
}


@pytest.mark.parametrize("name", FIRST_COMMANDS)
def test_sudo_is_there_for_the_first_command_however_slow_the_machine_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_script: Callable[..., Any]
) -> None:
    pytest.importorskip({"runloop": "runloop_api_client"}.get(name, name))
    monkeypatch.setattr(handle.isolated, "command", lambda _, *words: [sys.executable, "-c", SLOW, *words])
    with lowtide.emulators.start(name, home=tmp_path / "home", plain=True) as running:
        done = run_script(FIRST_COMMANDS[name], running.environment)
        assert done.stdout.strip() == "root", done.stdout + done.stderr
