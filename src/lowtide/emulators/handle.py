"""Starting emulators from Python, in a process of their own, and holding on to them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from lowtide import isolated
from lowtide.emulators import registry
from lowtide.errors import SandboxUnavailableError, ValidationError


def start(
    *names: str,
    port_base: int | None = None,
    limit: int | None = None,
    plain: bool = False,
    network: str = "none",
    packages: str = "check",
    home: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 30.0,
) -> Handle:
    """Start the named emulators on loopback and wait until they serve.

    They run in one process of their own, which ends with `Handle.close`, and by itself when this
    process is gone. `plain` points SDKs at plain URLs instead of the CONNECT proxy.
    `network` is what sandboxes may reach that ask for nothing else: `none`, `internet`, `host` or `allow=HOST,…`.
    `packages` is about builds: with `check` what apt-get and its like are to install must be on this machine, with `skip` a
    build goes on without. Raises
    ValidationError for an unknown name, MissingDependencyError when the extra is not installed.
    """
    names = registry.check(names)
    command = isolated.command("lowtide.emulators.__main__", "--json", "--until-stdin-closes")
    if port_base is not None:
        command += ["--port-base", str(port_base)]
    if limit is not None:
        command += ["--limit", str(limit)]
    if plain:
        command.append("--plain")
    if network != "none":
        command += ["--network", network]
    if packages != "check":
        command += ["--packages", packages]
    if home is not None:
        command += ["--home", str(Path(home).absolute())]
    process = subprocess.Popen(
        [*command, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl+C reaches the owner, who still needs the emulator to clean up
    )
    try:
        line = _first_line(process, time.monotonic() + timeout_seconds)
        described = json.loads(line) if line else {}
    except BaseException:
        process.kill()
        process.wait()
        raise
    if "environment" not in described:
        process.kill()
        process.wait()
        message = described.get("error", "the emulator process ended before it served")
        if described.get("kind") == "validation":
            raise ValidationError(message)
        raise SandboxUnavailableError(message)
    return Handle(process, described)


class Handle:
    """Running emulators. Close it, or use it as a context manager."""

    def __init__(self, process: subprocess.Popen[bytes], described: dict[str, Any]) -> None:
        self.process = process
        self.environment: dict[str, str] = described["environment"]
        """What to set for the provider's SDK to find the emulator."""
        self.urls: dict[str, str] = described["providers"]
        self.certificate: str = described["certificate"]
        self._admin: dict[str, str] = described["admin"]
        self.faults = FaultControl(self)
        self.clock = ClockControl(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def state(self) -> dict[str, Any]:
        """The clock, how many backing sandboxes there are, and what each emulator has."""
        found: dict[str, Any] = self.admin("GET", "/state")
        return found

    def calls(self, operation: str | None = None) -> list[dict[str, Any]]:
        """The calls the emulators have served, oldest first."""
        found = self.admin("GET", "/calls")
        return [call for call in found if operation in (None, call["operation"])]

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """One call of the admin endpoint."""
        request = urllib.request.Request(  # noqa: S310 - our own loopback address
            self._admin["url"] + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._admin['token']}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                data = answer.read()
        except urllib.error.HTTPError as error:
            message = json.loads(error.read() or b"{}").get("message", error.reason)
            raise ValidationError(f"the emulator's admin endpoint refused: {message}") from None
        except OSError as error:
            raise SandboxUnavailableError(f"the emulator does not answer: {error}") from error
        return json.loads(data) if data else None

    def close(self, timeout_seconds: float = 30.0) -> None:
        """End the emulators and every sandbox they hold. Safe to call twice."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)  # its reaper ends what it held
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FaultControl:
    """Faults on demand; see `lowtide.emulators.faults.FaultName` for what there is."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def add(
        self,
        name: str,
        *,
        provider: str | None = None,
        match: dict[str, str] | None = None,
        count: int | None = 1,
        seconds: float | None = None,
        status: int | None = None,
        after_bytes: int | None = None,
    ) -> int:
        """Arm a fault for the next `count` calls that match (None: all). Returns its id."""
        body: dict[str, Any] = {"name": str(name), "count": count, "match": match or {}, "provider": provider}
        body |= {"seconds": seconds, "status": status, "after_bytes": after_bytes}
        return int(self._handle.admin("POST", "/faults", body)["id"])

    def armed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._handle.admin("GET", "/faults")
        return found

    def hits(self, fault_id: int) -> int:
        return next((int(f["hits"]) for f in self.armed() if f["id"] == fault_id), 0)

    def clear(self) -> None:
        self._handle.admin("DELETE", "/faults")


class ClockControl:
    """The emulators' clock: lifetimes, idle timeouts and auto-pause follow it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def now(self) -> float:
        return float(self._handle.state()["now"])

    def advance(self, seconds: float) -> float:
        """Move it forward; returns when everything that became due has been done."""
        return float(self._handle.admin("POST", "/clock", {"advance_seconds": seconds})["now"])


def _first_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert process.stdout is not None
    stream, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise SandboxUnavailableError("the emulator process did not serve in time")
        data = os.read(stream, 65_536)
        if not data:
            break
        line += data
    return line
