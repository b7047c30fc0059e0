"""The editor in the browser, on its own port, where the image has one (openvscode-server, code-server)."""

from __future__ import annotations

import os
import shutil

_PROGRAMS = ("openvscode-server", "/openhands/.openvscode-server/bin/openvscode-server")


def start(directory: str, port: int, working_dir: str, environment: dict[str, str]) -> str | None:
    """Its connection token, or None where there is no editor."""
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        return None
    import subprocess

    token = os.urandom(16).hex()
    path = os.path.join(directory, "editor-token")  # in a file, because an argument is everybody's to read
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token)
    with open(os.path.join(directory, "editor.log"), "ab") as log:
        subprocess.Popen(
            [
                program,
                "--host=0.0.0.0",
                f"--port={port}",
                f"--connection-token-file={path}",
                f"--default-folder={working_dir}",
            ],
            cwd=working_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return token
