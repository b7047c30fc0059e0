"""The owner's line to its guardian, when that dies in an unlucky moment."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from lowtide.lifecycle import guardian_link
from lowtide.lifecycle.guardian_link import GuardianLink
from lowtide.providers import registry


async def test_a_guardian_that_dies_as_it_is_told_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    dead, gone = socket.socketpair()
    gone.close()
    answers: list[socket.socket | None] = [dead, None, ours]
    launches = []
    monkeypatch.setattr(guardian_link, "connect", lambda path: answers.pop(0))
    monkeypatch.setattr(guardian_link, "launch", launches.append)
    link = GuardianLink(tmp_path)
    link.wanted(registry.provider("faulty", directory=str(tmp_path / "service")))
    theirs.settimeout(10)
    said = await asyncio.to_thread(theirs.recv, 65536)
    assert b'"name": "faulty"' in said
    assert launches == [tmp_path]
    assert dead.fileno() == -1
    link.forget()
    theirs.close()
