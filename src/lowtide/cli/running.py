"""What `run`, `exec` and `shell` share: a command in a sandbox, and the line between its failures and ours."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import click

from lowtide.cli import exit_codes
from lowtide.cli.addressing import connected, find_sandbox
from lowtide.cli.failures import explain
from lowtide.cli.refused import print_hint
from lowtide.cli.streaming import shell_exit_code, stream, terminal_size
from lowtide.errors import CommandTimeoutError, LowtideError, ValidationError
from lowtide.providers.base import ProcessSpec


def run_in_new_sandbox(
    creation: dict[str, Any],
    cmd: tuple[str, ...],
    *,
    stdin: bool,
    tty: bool,
    timeout_seconds: float | None = None,
) -> int:
    """Create, run, end. A non-zero exit code counts as a failure for the keep policy."""
    from lowtide.sandbox import Sandbox

    if tty:
        require_terminal()
    with _not_the_commands_fault():
        try:
            with Sandbox.run(**creation) as sandbox:
                provider, sandbox_id = connected(sandbox)
                spec = _spec(cmd, stdin=stdin, tty=tty)
                code = shell_exit_code(stream(provider, sandbox_id, spec, timeout_seconds=timeout_seconds))
                if code:
                    offline = creation.get("network") == "none" or (
                        creation.get("network") is None and provider.traits.offline
                    )
                    print_hint(provider, sandbox_id, cmd, offline=offline)
                    raise _CommandFailed(code)
        except _CommandFailed as failed:
            return failed.code
    return exit_codes.OK


def run_in_sandbox(
    text: str,
    cmd: tuple[str, ...],
    *,
    provider: str | None,
    stdin: bool,
    tty: bool,
    timeout_seconds: float | None = None,
    workdir: str | None = None,
    user: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run in a sandbox that somebody else owns and goes on owning."""
    if tty:
        require_terminal()
    with _not_the_commands_fault():
        place, sandbox_id = connected(find_sandbox(text, provider))
        spec = _spec(cmd, stdin=stdin, tty=tty, workdir=workdir, user=user, environment=environment)
        began = time.time()
        code = shell_exit_code(stream(place, sandbox_id, spec, timeout_seconds=timeout_seconds))
        if code:
            print_hint(place, sandbox_id, cmd, since=began)
        return code


def require_terminal() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(
            "standard input is no terminal; `lowtide exec` and `lowtide run` work without one"
        )


class _CommandFailed(Exception):
    """Leaves the `with` block as a failure, so that `--keep on-failure` keeps the sandbox."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _spec(
    cmd: tuple[str, ...],
    *,
    stdin: bool,
    tty: bool,
    workdir: str | None = None,
    user: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> ProcessSpec:
    if workdir is not None and not workdir.startswith("/"):
        raise ValidationError(f"--workdir must be absolute, not {workdir!r}", argument="workdir")
    chosen = dict(environment or {})
    if tty:
        chosen.setdefault("TERM", os.environ.get("TERM", "xterm"))
    return ProcessSpec(
        argv=cmd,
        cwd=workdir,
        environment=chosen,
        user=user,
        stdin=stdin or tty,
        tty=terminal_size() if tty else None,
    )


@contextlib.contextmanager
def _not_the_commands_fault() -> Iterator[None]:
    """A failure of ours must not look like an exit code of the command: 125, unless it is usage or a timeout."""
    try:
        yield
    except (ValidationError, CommandTimeoutError, BrokenPipeError):
        raise
    except (LowtideError, OSError) as error:
        print(f"lowtide: {explain(error)[0]}", file=sys.stderr)
        raise click.exceptions.Exit(exit_codes.INFRASTRUCTURE) from error
