"""What to paste into a client so that it finds the server, and the token of the one over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lowtide.errors import ValidationError
from lowtide.machine import home

TOKEN_VARIABLE = "LOWTIDE_MCP_TOKEN"  # noqa: S105 - a name


def stdio_config(arguments: Sequence[str]) -> str:
    """For clients that start the server themselves, as most do."""
    words = ["-m", "lowtide", "mcp", *arguments]
    # A client passes on next to nothing of its own environment.
    env = {name: os.environ[name] for name in ("LOWTIDE_HOME", "LOWTIDE_PROVIDER") if os.environ.get(name)}
    server = {"command": sys.executable, "args": words, **({"env": env} if env else {})}
    set_here = [f"--env {name}={shlex.quote(value)} " for name, value in env.items()]
    in_toml = "".join(f"\nenv.{name} = {json.dumps(value)}" for name, value in env.items())
    toml = (
        f"[mcp_servers.lowtide]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(words)}{in_toml}"
    )
    return "\n\n".join(
        [
            "# Claude Desktop (claude_desktop_config.json), Cursor (~/.cursor/mcp.json), Windsurf, Cline, Gemini CLI\n"
            + _json({"mcpServers": {"lowtide": server}}),
            "# VS Code (.vscode/mcp.json)\n" + _json({"servers": {"lowtide": {"type": "stdio", **server}}}),
            f"# Claude Code\nclaude mcp add {''.join(set_here)}lowtide -- {shlex.join([sys.executable, *words])}",
            f"# Codex (~/.codex/config.toml)\n{toml}",
        ]
    )


def http_config(port: int, token: str, source: str) -> str:
    """For clients that connect to a server that runs already: files with the token in them, and for a command line
    where it is read from, so that it is in no shell's history."""
    read = f"${TOKEN_VARIABLE}" if source == TOKEN_VARIABLE else f"$(cat {shlex.quote(source)})"
    at = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": f"Bearer {token}"}}
    return "\n\n".join(
        [
            "# Cursor, Windsurf, Gemini CLI\n" + _json({"mcpServers": {"lowtide": at}}),
            "# VS Code (.vscode/mcp.json)\n" + _json({"servers": {"lowtide": {"type": "http", **at}}}),
            f'# Claude Code\nclaude mcp add --transport http lowtide {at["url"]} --header "Authorization: Bearer {read}"',
        ]
    )


def own_token() -> tuple[str, str]:
    """The token and where it is from: the environment, or a private file that is made once and stays."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given:
        return _said(given, TOKEN_VARIABLE), TOKEN_VARIABLE
    path = Path(home()) / "mcp-token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".mcp-token-{os.getpid()}")
    fresh.touch(mode=0o600)
    try:
        fresh.write_text(secrets.token_urlsafe(32))
        with contextlib.suppress(FileExistsError):  # whoever comes second takes the first one's
            os.link(fresh, path)
    finally:
        fresh.unlink()
    return _said(path.read_text(errors="replace"), str(path)), str(path)


def _said(token: str, source: str) -> str:
    """Without the newline that a file or a secret's store adds. An empty one would let everybody in."""
    if not (token := token.strip()) or not token.isascii():
        raise ValidationError(f"the token of {source} is empty, or not ASCII: remove it, or set another")
    return token


def _json(value: object) -> str:
    return json.dumps(value, indent=2)
