"""Asking the guardian how it is, over its private socket."""

from __future__ import annotations

import json
from typing import Any

from lowtide.lifecycle.guardian_link import connect
from lowtide.machine import home

_ANSWER_SECONDS = 5.0


def ask_guardian() -> dict[str, Any]:
    """`running`, `pid`, `owners`, `ending`, `notes`, `version`, `installation`, `log`. No guardian is the normal state of an idle machine."""
    path = home()
    found: dict[str, Any] = {
        "running": False,
        "pid": None,
        "owners": [],
        "ending": [],
        "notes": [],
        "version": None,
        "installation": None,
        "log": str(path / "guardian.log"),
    }
    link = connect(path)
    if link is None:
        return found
    with link:
        link.settimeout(_ANSWER_SECONDS)
        try:
            link.sendall(b'{"status": true}\n')
            answer = link.makefile("rb").readline()
        except OSError:  # it left between our question and its answer
            return found
    if answer:
        found.update(json.loads(answer), running=True)
    return found
