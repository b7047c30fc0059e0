"""A provider that misbehaves on demand, so that clean-up can be tested where it matters: on the bad day.

It keeps its sandboxes as files in a directory, so that any number of processes see the same "service",
also after one of them was killed. Faults are set from outside, in the same directory::

    with FaultyService(tmp_path) as service:                 # sets LOWTIDE_FAULTY_DIR
        service.fault("create", lose_answer=True)            # committed, then the connection drops
        with pytest.raises(SandboxUnavailableError):
            Sandbox.run(provider="faulty")
        service.wait_until_empty(seconds=10)                 # lowtide found it again and destroyed it

Commands run on this machine without any isolation: use it for tests of clean-up only.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from lowtide.engine import children_take_signals
from lowtide.errors import (
    AuthenticationError,
    MissingDependencyError,
    RateLimitError,
    SandboxFailedError,
    SandboxFileNotFoundError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers import hosted
from lowtide.providers.base import (
    Capability,
    ProcessHandle,
    ProcessSpec,
    Recovery,
    SandboxInfo,
    SandboxSpec,
    Traits,
    nothing_sent,
)
from lowtide.testing import faulty_records as records
from lowtide.testing.faulty_process import FaultyProcess

FAULTS = {
    "create": "lose_answer hold_seconds commit_after_seconds refuse raises rate_limit fail die",
    "destroy": "fail hold_seconds rate_limit stuck die",
    "list": "lag_seconds fail hold_seconds",
    "get": "fail hold_seconds",
    "find": "fail blind",
    "renew": "fail hold_seconds",
}
"""What each call can be made to do; `FaultyService.fault` has the meanings."""

_RAISED: dict[str, type[BaseException]] = {
    "authentication": AuthenticationError,
    "validation": ValidationError,
    "dependency": MissingDependencyError,
    "cancelled": asyncio.CancelledError,
}


class FaultyService:
    """The service behind `FaultyProvider`, seen from a test: what exists, and what goes wrong next."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        (self.directory / "sandboxes").mkdir(parents=True, exist_ok=True)
        (self.directory / "faults").mkdir(exist_ok=True)
        records.now(self.directory)  # its clock begins
        self._before: str | None = None

    def __enter__(self) -> Self:
        self._before = os.environ.get("LOWTIDE_FAULTY_DIR")
        os.environ["LOWTIDE_FAULTY_DIR"] = str(self.directory)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            os.environ.pop("LOWTIDE_FAULTY_DIR", None)
        else:
            os.environ["LOWTIDE_FAULTY_DIR"] = self._before

    def fault(self, call: str, *, times: int = 1, **what: Any) -> None:
        """Make the next `times` calls of `call` go wrong.

        create: ``lose_answer`` (committed, then the connection drops), ``hold_seconds`` (answers late),
        ``commit_after_seconds`` (drops the connection now, commits later; after ``hold_seconds``, if given),
        ``refuse`` (says no before anything is sent), ``raises`` (commits, then raises that: one of
        "authentication", "validation", "dependency", "cancelled"), ``fail`` (error state), ``rate_limit`` (429, retry after that many seconds), ``die``
        (kill -9 of the calling process: "before", "committed").
        destroy: ``fail``, ``hold_seconds``, ``rate_limit``, ``stuck`` (accepted, but it stays), ``die``.
        list: ``lag_seconds`` (what is younger is not shown). get, find, renew: ``fail``; find: ``blind``; get, renew: ``hold_seconds``.
        """
        allowed = FAULTS.get(call, "").split()
        if not what or any(key not in allowed for key in what):
            raise ValueError(f"{call} can be made to: {', '.join(allowed)}")
        path = self.directory / "faults" / f"{call}.json"
        with records.locked(self.directory):
            queue = json.loads(path.read_text()) if path.exists() else []
            path.write_text(json.dumps(queue + [what] * times))

    def pending(self) -> list[str]:
        """The calls of which a fault is still to come: empty when every fault has struck."""
        with records.locked(self.directory):
            paths = sorted((self.directory / "faults").glob("*.json"))
            return [path.stem for path in paths for _ in json.loads(path.read_text())]

    def clear(self) -> None:
        """No more faults."""
        with records.locked(self.directory):
            for path in (self.directory / "faults").glob("*.json"):
                path.unlink()

    def move_clock(self, seconds: float) -> None:
        """Let that much time pass for the service: lifetimes run out, lists catch up."""
        path = self.directory / "clock"
        with records.locked(self.directory):
            path.write_text(str(records.offset(self.directory) + seconds))

    def sandboxes(self) -> list[str]:
        """The ids of everything that exists and has not run out."""
        with records.locked(self.directory):
            return sorted(record["id"] for record in records.existing(self.directory))

    def exchange_key(self, key: str) -> None:
        """From now on only this ``LOWTIDE_FAULTY_KEY`` is valid; before the first call, every one is."""
        (self.directory / "key").write_text(key)

    def make_foreign(self, name: str, labels: Mapping[str, str] | None = None) -> str:
        """A sandbox that somebody else made on the same account."""
        records.write(
            self.directory, {"id": name, "labels": dict(labels or {}), "created": records.now(self.directory)}
        )
        return name

    def wait_until_empty(
        self, seconds: float = 10.0, *, but: frozenset[str] | set[str] = frozenset()
    ) -> float:
        """Wait until nothing exists but these; how long it took. TimeoutError names what is left."""
        started = time.monotonic()
        while left := set(self.sandboxes()) - but:
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"still there after {seconds:g} s: {sorted(left)}")
            time.sleep(0.02)
        return time.monotonic() - started


class FaultyProvider:
    """The provider ``faulty``. Everything about it is real but the sandbox."""

    name: ClassVar[str] = "faulty"
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.STDIN, Capability.SIGNALS, Capability.LIFETIME, Capability.RENEW}
        | {Capability.NETWORK_INTERNET, Capability.COMMAND, Capability.IMAGE}
    )
    traits: ClassVar[Traits] = Traits(recovery=Recovery.BY_LABEL, create_window_seconds=2.0, light=True)
    options_type: ClassVar[type | None] = None

    def __init__(self, directory: Path, key: str = "") -> None:
        self._directory = directory
        self._key = key
        (directory / "sandboxes").mkdir(parents=True, exist_ok=True)
        (directory / "faults").mkdir(exist_ok=True)

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        directory = (options or {}).get("directory") or environ.get("LOWTIDE_FAULTY_DIR")
        if not directory:
            raise ValidationError(
                "the faulty provider needs LOWTIDE_FAULTY_DIR; use lowtide.testing.FaultyService",
                argument="provider",
                provider=cls.name,
            )
        return cls(Path(directory), environ.get("LOWTIDE_FAULTY_KEY", ""))

    @property
    def account(self) -> str:
        where = f"faulty:{self._directory}"
        return hosted.account("faulty", where, self._key) if self._key else where

    def credentials(self) -> dict[str, str]:
        return {"LOWTIDE_FAULTY_DIR": str(self._directory), "LOWTIDE_FAULTY_KEY": self._key}

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        fault = self._next_fault("create")
        with nothing_sent():
            if "refuse" in fault:
                raise ValidationError("refused on demand", provider=self.name)
        if "rate_limit" in fault:
            raise RateLimitError(
                "slow down", provider=self.name, retry_after_seconds=float(fault["rate_limit"])
            )
        _die_if(fault, "before")
        if "commit_after_seconds" in fault:
            held, late = float(fault.get("hold_seconds", 0.0)), float(fault["commit_after_seconds"])
            self._commit(spec, visible_from=records.now(self._directory) + held + late)
            await asyncio.sleep(held)
            raise SandboxUnavailableError("the connection dropped", provider=self.name)
        info = self._commit(spec)
        _die_if(fault, "committed")
        if "hold_seconds" in fault:
            await asyncio.sleep(float(fault["hold_seconds"]))
        if "lose_answer" in fault:
            raise SandboxUnavailableError("the connection dropped", provider=self.name)
        if "raises" in fault:
            raise _RAISED[fault["raises"]]("raised on demand")
        if "fail" in fault:
            raise SandboxFailedError(
                "it went into the error state", provider=self.name, sandbox_id=info.sandbox_id
            )
        return info

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        fault = self._next_fault("find")
        if "fail" in fault:
            raise SandboxUnavailableError("find failed on demand", provider=self.name)
        if "blind" in fault:
            return None
        record = self._read(spec.lease_id)
        return records.info(record) if record else None

    async def get(self, sandbox_id: str) -> SandboxInfo:
        await self._maybe("get")
        record = self._read(sandbox_id)
        if record is None:
            raise SandboxNotFoundError(f"no sandbox {sandbox_id}", provider=self.name, sandbox_id=sandbox_id)
        return records.info(record)

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        try:
            return await self.get(sandbox_id)
        except SandboxNotFoundError as error:
            raise SandboxGone(str(error), provider=self.name, sandbox_id=sandbox_id) from error

    async def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        fault = await self._maybe("list")
        newest = records.now(self._directory) - float(fault.get("lag_seconds", 0.0))
        with records.locked(self._directory):
            shown = records.existing(self._directory)
        for record in shown:
            if labels.items() <= record["labels"].items() and record["created"] <= newest:
                yield records.info(record)

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        fault = self._next_fault("destroy")
        _die_if(fault, "before")
        if "hold_seconds" in fault:
            await asyncio.sleep(float(fault["hold_seconds"]))
        if "rate_limit" in fault:
            raise RateLimitError(
                "slow down", provider=self.name, retry_after_seconds=float(fault["rate_limit"])
            )
        if "fail" in fault or "stuck" in fault:
            raise SandboxUnavailableError(
                "accepted, but it stays" if "stuck" in fault else "destroy failed on demand",
                provider=self.name,
                sandbox_id=sandbox_id,
            )
        with records.locked(self._directory):
            there = any(record["id"] == sandbox_id for record in records.existing(self._directory))
            records.path_of(self._directory, sandbox_id).unlink(missing_ok=True)
        _die_if(fault, "committed")
        return there

    async def renew(self, sandbox_id: str, lifetime_seconds: float) -> datetime | None:
        await self._maybe("renew")
        record = self._read(sandbox_id)
        if record is None:
            raise SandboxNotFoundError(f"no sandbox {sandbox_id}", provider=self.name, sandbox_id=sandbox_id)
        until = records.now(self._directory) + lifetime_seconds
        with records.locked(self._directory):
            records.write(self._directory, {**record, "expires": until})
        return datetime.fromtimestamp(until, UTC)

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        if self._read(sandbox_id) is None:
            raise SandboxGone(f"sandbox {sandbox_id} is gone", provider=self.name, sandbox_id=sandbox_id)
        try:
            with children_take_signals():
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    cwd=spec.cwd,
                    env={**os.environ, **spec.environment},
                    stdin=asyncio.subprocess.PIPE if spec.stdin else asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
        except (FileNotFoundError, PermissionError) as error:
            code = "127" if isinstance(error, FileNotFoundError) else "126"
            return await self.start_process(
                sandbox_id,
                ProcessSpec(
                    argv=(
                        "/bin/sh",
                        "-c",
                        'echo "$1: $2" >&2; exit $3',
                        "sh",
                        spec.argv[0],
                        str(error.strerror),
                        code,
                    )
                ),
            )
        return FaultyProcess(process)

    async def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        record = self._read(sandbox_id) or {}
        if path not in record.get("files", {}):
            raise SandboxFileNotFoundError(f"no file {path}", path=path, sandbox_id=sandbox_id)
        yield bytes.fromhex(record["files"][path])

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        data = b"".join([chunk async for chunk in chunks])
        record = self._read(sandbox_id)
        if record is None:
            raise SandboxGone(f"sandbox {sandbox_id} is gone", provider=self.name, sandbox_id=sandbox_id)
        with records.locked(self._directory):
            records.write(self._directory, {**record, "files": {**record.get("files", {}), path: data.hex()}})
        return len(data)

    async def aclose(self) -> None:
        return None

    # The service.

    def _commit(self, spec: SandboxSpec, *, visible_from: float | None = None) -> SandboxInfo:
        now = records.now(self._directory)
        record = {"id": spec.lease_id, "labels": spec.labels.as_dict(), "created": visible_from or now}
        if spec.lifetime_seconds is not None:
            record["expires"] = now + spec.lifetime_seconds
        with records.locked(self._directory):
            records.write(self._directory, record)
        return records.info(record)

    def _read(self, sandbox_id: str) -> dict[str, Any] | None:
        with records.locked(self._directory):
            return next((r for r in records.existing(self._directory) if r["id"] == sandbox_id), None)

    async def _maybe(self, call: str) -> dict[str, Any]:
        fault = self._next_fault(call)
        if "hold_seconds" in fault:
            await asyncio.sleep(float(fault["hold_seconds"]))
        if "fail" in fault:
            raise SandboxUnavailableError(f"{call} failed on demand", provider=self.name)
        return fault

    def _next_fault(self, call: str) -> dict[str, Any]:
        allowed = self._directory / "key"
        if allowed.exists() and allowed.read_text() != self._key:
            raise AuthenticationError("this key is not valid any more", provider=self.name)
        path = self._directory / "faults" / f"{call}.json"
        if not path.exists():
            return {}
        with records.locked(self._directory):
            queue = json.loads(path.read_text()) if path.exists() else []
            if not queue:
                return {}
            path.write_text(json.dumps(queue[1:]))
            return dict(queue[0])


def _die_if(fault: Mapping[str, Any], instant: str) -> None:
    if fault.get("die") == instant:
        os.kill(os.getpid(), signal.SIGKILL)
