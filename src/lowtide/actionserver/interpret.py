"""Interpreters over standard input and output, one JSON object for each line: what `Sandbox.run_code` talks to."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading

from lowtide.actionserver.interpreter import Interpreters, Missing, load_drivers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main() -> int:
    """``{"id", "code", "language", "context", "timeout"}`` in, ``{"id", "result"}`` or ``{"id", "missing"}`` out.

    ``{"given_up": [id, …]}`` interrupts that code, or takes it out of the queue.
    """
    load_drivers()  # while the file that holds them is there
    directory = tempfile.mkdtemp(prefix=".lowtide-code-")
    interpreters = Interpreters(directory, dict(os.environ))
    lock = threading.Lock()
    cwd = os.getcwd()
    wanted: dict[int, int] = {}
    """By id: closing it says that nobody waits for the answer."""

    def answer(request: dict[str, Any], given_up: int) -> None:
        try:
            told: dict[str, Any] = {
                "result": interpreters.run(
                    request["code"],
                    language=request["language"],
                    context=request["context"],
                    cwd=cwd,
                    seconds=request["timeout"],
                    given_up=given_up,
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
            os.close(given_up)
            if request["id"] in wanted:
                os.close(wanted.pop(request["id"]))

    for line in sys.stdin:
        request = json.loads(line)
        with lock:
            if "given_up" in request:
                for number in request["given_up"]:
                    if number in wanted:
                        os.close(wanted.pop(number))
                continue
            given_up, wanted[request["id"]] = os.pipe()
        threading.Thread(target=answer, args=(request, given_up), daemon=True).start()
    interpreters.close()
    return 0
