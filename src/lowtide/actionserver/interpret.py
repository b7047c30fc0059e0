"""Interpreters over standard input and output, one JSON object for each line: what `Sandbox.run_code` talks to."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading

from lowtide.actionserver.interpreter import Interpreters, Missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> int:
    """``{"id", "code", "language", "context", "timeout"}`` in, ``{"id", "result"}`` or ``{"id", "missing"}`` out."""
    directory = tempfile.mkdtemp(prefix=".lowtide-code-")
    interpreters = Interpreters(directory, dict(os.environ))
    lock = threading.Lock()
    cwd = os.getcwd()

    def answer(request: dict[str, Any]) -> None:
        try:
            told: dict[str, Any] = {
                "result": interpreters.run(
                    request["code"],
                    language=request["language"],
                    context=request["context"],
                    cwd=cwd,
                    seconds=request["timeout"],
                )
            }
        except Missing as error:
            told = {"missing": str(error)}
        except Exception as error:
            told = {"failed": f"{type(error).__name__}: {error}"}
        line = json.dumps({"id": request["id"], **told}) + "\n"
        with lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    interpreters.close()
    return 0
