"""The command line before any sandbox: help, mistakes, exit codes, what is imported."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)

from lowtide.cli import exit_codes
from lowtide.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]


def test_help_lists_every_command_and_imports_none(cli: Cli) -> None:  # noqa: F811
    program = (
        "import sys; sys.argv[1:] = ['--help']\ntry:\n import lowtide.__main__\nexcept SystemExit: pass\n"
    )
    program += "print([m for m in sys.modules if m.startswith('lowtide.cli.commands.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=cli.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_one_file_whose_help_is_the_one_in_the_table(name: str) -> None:
    command = importlib.import_module(f"lowtide.cli.commands.{name}").command
    assert command.name == name
    assert command.short_help == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_documented(name: str) -> None:
    assert f"`lowtide {name}" in (ROOT / "docs" / "cli.md").read_text()


def test_every_exit_code_is_documented() -> None:
    table = (ROOT / "docs" / "cli.md").read_text().partition("## Exit codes")[2]
    for name, value in vars(exit_codes).items():
        if name.isupper():
            assert re.search(rf"\b{value}\b", table), f"{name} = {value}"


def test_ls_starts_without_an_event_loop_a_provider_or_rich(cli: Cli) -> None:  # noqa: F811
    program = "import sys; sys.argv[1:] = ['ls']\ntry:\n import lowtide.__main__\nexcept SystemExit: pass\n"
    program += "print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=cli.environ)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.partition("loaded")[2].split())
    assert "lowtide.cli.commands.ls" in loaded
    assert loaded.isdisjoint({"asyncio", "rich", "ssl", "lowtide.providers.base", "lowtide.providers.local"})


def test_an_unknown_command_is_one_line_with_the_nearest_one(cli: Cli) -> None:  # noqa: F811
    done = cli("lst")
    assert done.returncode == exit_codes.USAGE
    assert "did you mean `lowtide ls`?" in one_line(done)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "--help"),
        (["run", "--memroy", "1Gi", "--", "true"], "--memory"),
        (["run", "--timeout", "soon", "--", "true"], "90s, 15m"),
        (["run", "--keep", "sometimes", "--", "true"], "on-failure"),
        (["run", "--env", "LOWTIDE_NO_SUCH_VARIABLE", "--", "true"], "is not set here"),
        (["run", "--provider", "nowhere", "--", "true"], "nowhere"),
        (["run", "--tag", "bad tag!", "--", "true"], "tag"),
        (["run", "--memory", "much", "--", "true"], "quantity"),
        (["run", "--workdir", "relative", "--", "true"], "working_dir"),
        (["cp", "here", "there"], "exactly one"),
        (["rm"], "--tag"),
        (["ls", "--nope"], "--help"),
        (["shell"], "terminal"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do_and_creates_nothing(
    cli: Cli,  # noqa: F811
    arguments: list[str],
    words: str,
) -> None:
    done = cli(*arguments)
    assert done.returncode == exit_codes.USAGE, done.stderr
    assert words in one_line(done)
    assert done.stdout == b""
    assert cli.json("ls", "--all") == []


def test_a_sandbox_that_does_not_exist_is_an_error_with_the_next_step(cli: Cli) -> None:  # noqa: F811
    for command, code in (("rm", 1), ("stop", 1), ("history", 1), ("adopt", 1), ("exec", 125)):
        done = cli(command, "01zzzzzzzzzzzzzzzzzzzzzzzz", *(["--", "true"] if command == "exec" else []))
        assert done.returncode == code, (command, done.stderr)
        assert "lowtide ls" in one_line(done)


def test_rm_of_a_missing_one_is_fine_when_asked(cli: Cli) -> None:  # noqa: F811
    assert cli("rm", "--missing-ok", "01zzzzzzzzzzzzzzzzzzzzzzzz").returncode == 0


def test_an_unwritable_home_is_an_infrastructure_failure(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "file"
    file.write_text("")
    done = cli("ls", LOWTIDE_HOME=str(file / "below"))
    assert done.returncode == exit_codes.INFRASTRUCTURE
    assert "LOWTIDE_HOME" in one_line(done)


def test_config_says_where_each_value_came_from_and_shows_no_secret(cli: Cli) -> None:  # noqa: F811
    (cli.home / "config.toml").write_text('tags = ["from-file"]\n[environment_variables]\nTOKEN = "s3cret"\n')
    done = cli("config", "--json", LOWTIDE_KEEP="on-failure")
    assert b"s3cret" not in done.stdout
    settings = {one["key"]: one for one in cli.json("config", LOWTIDE_KEEP="on-failure")}
    assert settings["keep"] == {"key": "keep", "value": "on-failure", "source": "LOWTIDE_KEEP"}
    assert settings["tags"]["source"].endswith("config.toml")
    assert settings["home"]["value"] == str(cli.home)
    assert settings["working_dir"]["source"] == "default"
    assert "from-file" in cli("config").stdout.decode()
    assert settings["local.cpu_weight"] == {"key": "local.cpu_weight", "value": 50, "source": "default"}


def test_the_provider_of_the_file_is_the_one_that_commands_without_one_mean(cli: Cli) -> None:  # noqa: F811
    (cli.home / "config.toml").write_text('provider = "docker"\n')
    assert [one["name"] for one in cli.json("providers") if one["default"]] == ["docker"]
    swept = cli("sweep", "--dry-run", "--json", DOCKER_HOST="unix:///nowhere/docker.sock")
    found = [(one["provider"], one["action"]) for one in json.loads(swept.stdout)]
    assert (swept.returncode, found) == (exit_codes.ERROR, [("docker", "failed")])


def test_providers_say_what_each_can_do_or_how_to_install_it(cli: Cli) -> None:  # noqa: F811
    found = {one["name"]: one for one in cli.json("providers")}
    assert {"local", "docker", "kubernetes", "e2b", "daytona"} <= set(found)
    assert found["local"]["installed"]
    assert "tty" in found["local"]["capabilities"]
    for one in found.values():
        assert one["installed"] or one["install"]
    assert "local" in cli("providers").stdout.decode()


def test_guardian_status_of_an_idle_machine(cli: Cli) -> None:  # noqa: F811
    assert cli.json("guardian", "status")["running"] is False
    assert "no guardian runs" in cli("guardian", "status").stdout.decode()


def test_a_reader_that_leaves_early_ends_us_quietly(cli: Cli) -> None:  # noqa: F811
    process = cli.start("providers", "--json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == exit_codes.BROKEN_PIPE
    assert errors == b""
    process.stderr.close()
