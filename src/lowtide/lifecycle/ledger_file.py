"""The ledger's file: opened, set up, followed when somebody replaces it, and written in whole transactions."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lowtide import logger
from lowtide.errors import LedgerError
from lowtide.lifecycle import lease_rows
from lowtide.lifecycle.lease import Lease

log = logger.get("lowtide.lifecycle")

T = TypeVar("T")

_FULL, _NORMAL = "PRAGMA synchronous=FULL", "PRAGMA synchronous=NORMAL"


class LedgerFile:
    """One SQLite file, many processes. Used from one event loop; never blocks it while another process writes."""

    busy_seconds = 30.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._damaged: set[Any] = set()
        self.damaged = False
        """The last failure was that the file is damaged. See `set_aside`."""
        self.replaced: Callable[[list[Lease] | None], None] = lambda _: None
        """Called when somebody has removed the file or put another in its place, once the new one is open: with
        what was not settled in the old one, which is still there for whoever has it open; None if it is damaged."""
        self.ledger_id = self._open(secrets.token_hex(8))

    def close(self) -> None:
        # A forked child must not close its parent's connection: SQLite would tidy up the parent's log.
        if os.getpid() == self._pid:
            self._db.close()

    def _open(self, new_id: str) -> str:
        try:
            _make_if_missing(self.path)
            self._db = sqlite3.connect(self.path, timeout=0.02, isolation_level=None, check_same_thread=False)
            os.chmod(self.path, 0o600)
            ledger_id = self._set_up(new_id)
            self._file, self._logs = _file(self.path), self._log_files()
            self.damaged = False
        except sqlite3.Error as error:
            raise self._error("open", error) from error
        except OSError as error:
            raise LedgerError(f"cannot open the ledger {self.path}: {error.strerror}") from error
        return ledger_id

    def follow(self) -> None:
        """Open what is at our path now, where that is another file than ours. One that is new keeps our id.

        A file whose log was deleted is put aside: processes that have the log open would write to one that no later
        process reads, and at last over each other.
        """
        if os.getpid() != self._pid:
            return
        if _file(self.path) == self._file:
            if None in self._logs or self._log_files() == self._logs:
                return
            self._put_aside()
        self._open_again()

    def set_aside(self) -> Path | None:
        """Keep a damaged file under another name and begin a new one with our id. Returns the new name.

        None where it is not damaged after all, or another process was first. Raises LedgerError.
        """
        if os.getpid() != self._pid:
            return None
        aside = None
        if _file(self.path) == self._file and not self._is_sound():
            aside = self._put_aside()
        self._open_again()
        return aside

    def suspect(self, why: str) -> None:
        """Another process failed with that: what it says of this file is reason enough to look. See `set_aside`."""
        if str(self.path) in why and any(words in why for words in _DAMAGED):
            self.damaged = True

    def unsettled(self) -> list[Lease] | None:
        """What the file says last, also if it was removed since. None where it cannot be read.

        Who kept, released or adopted what is known there better than in any memory.
        """
        try:
            rows = self._db.execute(f"{lease_rows.SELECT} WHERE state!='gone'").fetchall()
        except sqlite3.Error:
            return None
        return self._readable(rows)

    def _open_again(self) -> None:
        unsettled = self.unsettled()
        before, mine = self._file, self._db
        self.ledger_id = self._open(self.ledger_id)
        # Never closed: SQLite would remove the log of the new file, which has the same name.
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mine))
        if self._file != before:
            self.replaced(unsettled)

    def _is_sound(self) -> bool:
        """Whether another connection can read it: then only ours is broken."""
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=1.0)) as other:
                other.execute("SELECT value FROM meta WHERE key='ledger_id'").fetchone()
                return bool(other.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.Error as error:
            return _busy(error)

    def _put_aside(self) -> Path | None:
        """Rename our file with what there is of its log, and make an empty one. None: another process was first."""
        aside = Path(f"{self.path}.damaged-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}")
        try:
            with _locked(self.path):
                if _file(self.path) != self._file:
                    return None
                for rest in ("", "-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(f"{self.path}{rest}", f"{aside}{rest}")
                _make(self.path)
        except OSError as error:
            raise LedgerError(f"cannot put the ledger {self.path} aside: {error.strerror}") from error
        log.warning("the ledger %s was damaged, or its log was deleted: it is kept as %s", self.path, aside)
        return aside

    def _log_files(self) -> tuple[tuple[int, int] | None, ...]:
        return _file(Path(f"{self.path}-wal")), _file(Path(f"{self.path}-shm"))

    def _set_up(self, new_id: str) -> str:
        deadline = time.monotonic() + self.busy_seconds
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute(_NORMAL)
                found = self._db.execute("SELECT name FROM sqlite_master WHERE name='meta'").fetchone()
                if not found:
                    self._db.execute("BEGIN IMMEDIATE")
                    for statement in lease_rows.SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute("INSERT OR IGNORE INTO meta VALUES ('ledger_id', ?)", (new_id,))
                    self._db.execute(
                        "INSERT OR IGNORE INTO meta VALUES ('version', ?)", (lease_rows.VERSION,)
                    )
                    self._db.execute("COMMIT")
                meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
                if meta.get("version") in lease_rows.UPGRADES:
                    self._upgrade()
                    continue
                if "ledger_id" in meta:
                    break
            except sqlite3.OperationalError as error:
                self._roll_back()
                if not _busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.005)
        if meta["version"] != lease_rows.VERSION:
            raise LedgerError(
                f"the ledger {self.path} was written by another version of lowtide (format {meta['version']}, "
                f"this one reads {lease_rows.VERSION}); use that version, or another LOWTIDE_HOME"
            )
        return str(meta["ledger_id"])

    def _upgrade(self) -> None:
        """From an earlier version's tables. Rows and ids stay; processes of that version go on using it."""
        self._db.execute("BEGIN IMMEDIATE")
        (version,) = self._db.execute("SELECT value FROM meta WHERE key='version'").fetchone()
        for statement in lease_rows.UPGRADES.get(version, ()):  # none: another process was first
            self._db.execute(statement)
        self._db.execute("UPDATE meta SET value=? WHERE key='version'", (lease_rows.VERSION,))
        self._db.execute("COMMIT")

    def _readable(self, rows: Iterable[tuple[Any, ...]]) -> list[Lease]:
        """Without those that are damaged: one such row is no reason to look after none of the others."""
        leases = []
        for row in rows:
            try:
                leases.append(lease_rows.from_row(row, self.ledger_id))
            except (ValueError, TypeError) as error:
                if row[0] not in self._damaged:
                    self._damaged.add(row[0])
                    log.warning("lease %s: its row in %s cannot be read: %s", row[0], self.path, error)
        return leases

    async def _write(self, work: Callable[[], T], *, durable: bool = False) -> T:
        def transaction() -> T:
            if durable:
                self._db.execute(_FULL)
            try:
                self._db.execute("BEGIN IMMEDIATE")
                result = work()
                self._db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
            finally:
                if durable:
                    self._db.execute(_NORMAL)
            return result

        return await self._retry("write", transaction)

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    async def _retry(self, what: str, work: Callable[[], T]) -> T:
        deadline = time.monotonic() + self.busy_seconds
        delay = 0.002
        while True:
            try:
                self.follow()
                return work()
            except LedgerError:
                raise
            except OSError as error:  # the directory cannot be looked at now: permissions, a file server
                raise LedgerError(f"cannot {what} the ledger {self.path}: {error.strerror}") from error
            except sqlite3.Error as error:
                if not _busy(error) or time.monotonic() > deadline:
                    raise self._error(what, error) from error
            import asyncio  # late: `lowtide ls` reads the ledger without a loop and has to start fast

            await asyncio.sleep(delay * random.uniform(0.5, 1.5))  # noqa: S311
            delay = min(delay * 2, 0.1)

    def _error(self, what: str, error: sqlite3.Error) -> LedgerError:
        text = str(error)
        self.damaged = any(words in text for words in _DAMAGED)
        if "full" in text or "disk I/O" in text:
            advice = "free some disk space, or set LOWTIDE_HOME to another disk"
        elif "readonly" in text or "unable to open" in text:
            advice = "make it writable, or set LOWTIDE_HOME to a directory you can write"
        elif self.damaged:
            advice = "it is damaged: keep it, set LOWTIDE_HOME to a new directory, and run there for each provider: lowtide sweep --all-ledgers --provider NAME"
        else:
            advice = "if another process holds it, end that process"
        return LedgerError(f"cannot {what} the ledger {self.path}: {text}; {advice}", retryable=_busy(error))


_DAMAGED = ("not a database", "malformed", "no such table", "no such column", "unsupported file format")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Else one process would remove what another has just made."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _make_if_missing(path: Path) -> None:
    if path.exists():
        return
    with _locked(path):
        if not path.exists():
            _make(path)


def _make(path: Path) -> None:
    """An empty file, without the log of one that was removed: processes that still hold that one share its log."""
    for rest in ("-wal", "-shm"):
        Path(f"{path}{rest}").unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _file(path: Path) -> tuple[int, int] | None:
    """Which file is at that path."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _busy(error: sqlite3.Error) -> bool:
    return isinstance(error, sqlite3.OperationalError) and ("locked" in str(error) or "busy" in str(error))
