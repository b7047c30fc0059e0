"""What docs/emulators.md shows: every command line is one that the command takes, every YAML one that parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lowtide.cli.commands.emulate import command
from lowtide.emulators import registry
from lowtide.emulators.backing import network_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "emulators.md"


def test_every_command_line_is_taken() -> None:
    found = re.findall(r"lowtide emulate ([^`\n']+)", DOCUMENT.read_text())
    assert len(found) > 8
    for line in found:
        words = shlex.split(line.partition("#")[0], comments=True)
        words = words[: next((n for n, word in enumerate(words) if word in (">", "&")), len(words))]
        if words[0] == "X":
            continue
        context = command.make_context("emulate", words)
        registry.check(context.params["names"])
        network_of(context.params["network"])


def test_every_yaml_parses_and_has_the_keys_of_its_kind() -> None:
    yaml = pytest.importorskip("yaml")
    actions, compose = (
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    )
    assert all(step.keys() == {"run"} for step in actions["steps"])
    (service,) = compose["services"].values()
    assert service["privileged"] is True
    assert "lowtide emulate e2b -- pytest" in service["command"]
