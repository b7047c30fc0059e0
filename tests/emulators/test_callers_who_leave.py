"""Whoever hangs up in the middle of a call, or calls twice at once, spoils nothing for the calls after it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from lowtide.emulators.handle import Handle
from tests.emulators.hostile import Sender

pytest.importorskip("daytona")

_LONG = "echo " + "y" * 3_000_000 + " | tail -c 3"


def _sender(daytona: Handle, sandbox: Any) -> Sender:
    key = daytona.environment["DAYTONA_API_KEY"].encode()
    return Sender(
        f"{daytona.urls['daytona']}/toolbox/{sandbox.id}/process", {b"Authorization": b"Bearer " + key}
    )


def _hang_up(send: Sender, path: str, body: dict[str, Any], seconds: float) -> None:
    """Send a whole request, and leave before its answer."""
    parts, data = urlsplit(f"//{send.netloc}"), json.dumps(body).encode()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {send.prefix}{path} HTTP/1.1\r\nHost: {send.netloc}\r\nContent-Length: {len(data)}\r\n"
        head += f"Content-Type: application/json\r\nAuthorization: {send.headers[b'Authorization'].decode()}\r\n\r\n"
        connection.sendall(head.encode() + data)
        threading.Event().wait(seconds)  # there is nothing to see from outside of how far it got


def test_a_session_goes_on_when_callers_hang_up(daytona: Handle, daytona_create: Callable[..., Any]) -> None:
    send = _sender(daytona, daytona_create())
    send.json("POST", "/session", {"sessionId": "s"})
    for turn in range(5):
        _hang_up(send, "/session/s/exec", {"command": _LONG}, 0.02 * turn)
    assert send.json("POST", "/session/s/exec", {"command": "echo fine"})["stdout"] == "fine\n"


def test_commands_of_a_session_that_come_at_once_get_their_own_output(
    daytona: Handle, daytona_create: Callable[..., Any]
) -> None:
    sandbox = daytona_create()
    _sender(daytona, sandbox).json("POST", "/session", {"sessionId": "s"})
    commands = {_LONG: "yy\n", "echo short": "short\n", "echo third": "third\n"}
    printed: dict[str, str] = {}

    def run(command: str) -> None:
        answer = _sender(daytona, sandbox).json("POST", "/session/s/exec", {"command": command})
        printed[command] = answer["stdout"]

    threads = [threading.Thread(target=run, args=(command,)) for command in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert printed == commands
