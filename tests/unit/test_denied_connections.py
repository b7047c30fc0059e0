"""The record of refused connections: bounded, printable, and readable whatever a file holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowtide import Sandbox, UnsupportedError
from lowtide.providers.network.denied import MOST_RECORDS, DeniedFiles, DeniedLog


def _written(path: Path, refusals: list[tuple[str, int | None, str, str]]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        log = DeniedLog(descriptor)
        for one in refusals:
            log.add(*one)
    finally:
        os.close(descriptor)


def test_each_target_is_recorded_once_and_not_without_end(tmp_path: Path) -> None:
    files = DeniedFiles(tmp_path)
    targets = [(f"{n}.{'x' * 300}.example", n % 65536, "tcp", "why " * 200) for n in range(3 * MOST_RECORDS)]
    _written(files.prepare("box"), [*targets, *targets])
    assert len(files.read("box")) == MOST_RECORDS
    assert files.path("box").stat().st_size < 1 << 20


def test_the_end_of_one_sandbox_leaves_the_place_of_another_that_starts(tmp_path: Path) -> None:
    files = DeniedFiles(tmp_path / "denied")
    starting = files.prepare("starting")
    _written(files.prepare("ended"), [])
    files.settle("ended")
    _written(starting, [("10.0.0.1", 80, "tcp", "why")])
    assert [one.host for one in files.read("starting")] == ["10.0.0.1"]


def test_names_from_a_sandbox_are_printable(tmp_path: Path) -> None:
    files = DeniedFiles(tmp_path)
    _written(files.prepare("box"), [("\x1b[2Jevil\n\u202egro", None, "dns", "no\r\n")])
    (one,) = files.read("box")
    assert (one.host, one.reason) == ("?[2Jevil??gro", "no??")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b'{"at": 1e999, "host": "a", "port": 1, "protocol": "tcp", "reason": ""}',
        b'{"at": 1, "host": "a", "port": 99999, "protocol": "tcp", "reason": ""}',
        b'{"at": 1, "host": ["a"], "port": 1, "protocol": "tcp", "reason": ""}',
        b'{"at": 1, "host": "a", "port": 1, "protocol": [], "reason": ""}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_record_is_passed_over(tmp_path: Path, line: bytes) -> None:
    files = DeniedFiles(tmp_path)
    _written(files.prepare("box"), [("10.0.0.1", 80, "tcp", "why")])
    with files.path("box").open("ab") as file:
        file.write(line + b"\n")
    assert [one.host for one in files.read("box")] == ["10.0.0.1"]


def test_a_flood_of_refusals_is_listed_up_to_the_bound() -> None:
    code = """
import socket
for n in range(1500):
    try: socket.create_connection((f"10.1.{n // 250}.{n % 250}", 80), 5).recv(1)
    except OSError: pass
"""
    with Sandbox.run(provider="local", network=["allowed.invalid"]) as box:
        box.exec(["python3", "-c", code], check=True, timeout_seconds=120).result()
        assert len(box.denied_connections().result(20)) == MOST_RECORDS
        box.stop().result(60)
        assert len(box.denied_connections().result(20)) == MOST_RECORDS


def test_a_provider_that_does_not_tell_says_so_before_anything_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RUNLOOP_API_KEY", "none")
    with pytest.raises(UnsupportedError) as caught:
        Sandbox(provider="runloop").denied_connections()
    assert caught.value.feature == "denied-connections"
