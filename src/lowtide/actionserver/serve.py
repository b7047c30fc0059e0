"""Launch: read the configuration, take the port, stay behind in the background, say "ready"."""

from __future__ import annotations

import json
import os
import socket
import sys

from lowtide.actionserver import http
from lowtide.actionserver.app import App

PORT, EDITOR_PORT = 4444, 4445


def main() -> int:
    """The configuration is one line of JSON on standard input: no argument and no variable holds the key.

    Returns when the port is taken, so that whoever launched it can send requests at once.
    """
    config = json.loads(sys.stdin.readline())
    os.umask(0o022)
    directory = config["directory"]
    os.makedirs(directory, mode=0o700, exist_ok=True)
    working_dir = config.get("working_dir") or os.getcwd()
    os.makedirs(working_dir, exist_ok=True)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.get("host", "127.0.0.1"), config.get("port", PORT)))
    except OSError as error:
        sys.stderr.write(f"port {config.get('port', PORT)} cannot be taken: {error.strerror}\n")
        return 1
    listener.listen(128)
    log = os.open(os.path.join(directory, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    pid = os.fork()
    if pid:
        sys.stdout.write(json.dumps({"pid": pid, "port": listener.getsockname()[1]}) + "\n")
        return 0
    os.setsid()
    _detach(log)
    _hide()
    app = App(config["key"], directory, working_dir, config.get("editor_port", EDITOR_PORT))
    config.clear()
    _load()
    http.serve(listener, app.handle)
    return 0


def _detach(log: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _load() -> None:
    """Everything that this file holds, while it is there: commands that tidy up /tmp take it away."""
    from lowtide.actionserver import editor, interpreter, oneoff, resources, terminal  # noqa: F401

    interpreter.load_drivers()


def _hide() -> None:
    """No process of the same user may read this one's memory, where the key is."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError):
        sys.stderr.write(
            "no ctypes in this Python: processes of the same user could read the server's memory\n"
        )
