"""Entering live sandboxes: what is known of each, commands in it, calls answered from inside."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowtide.errors import ResourceExhaustedError
from lowtide.providers.base import STDERR, STDOUT, NetworkMode, ProcessSpec
from lowtide.providers.inside.program import KEY
from lowtide.providers.local.pause import paused
from lowtide.providers.local.prerequisites import Prerequisites
from lowtide.providers.local.process import LocalProcess, gone
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory
from lowtide.providers.local.spawner_client import CommandStarter, Message, Reply, SpawnerClient

_MARKER = "LOWTIDE_PROCESS"
_COMMAND_STARTER_SECONDS = 3.0
_NULL = os.makedev(1, 3)
_KEPT = b"+"  # as the spawner marks the sandbox's environment
# Namespaces to join: user, pid, mount, ipc, uts, cgroup; and the network where it is the sandbox's own.
_HOST_NETWORKS = (NetworkMode.HOST, "full")  # "full" is in the records of sandboxes from before 0.9
_NAMESPACES, _FILE_NAMESPACES, _NETWORK = 0x3E020000, 0x10020000, 0x40000000


class Known:
    """What entering a live sandbox takes."""

    __slots__ = (
        "command_starter",
        "environment",
        "flags",
        "inner",
        "key",
        "network",
        "owner",
        "pids",
        "procs",
        "used",
        "working_dir",
    )

    def __init__(
        self,
        *,
        inner: ProcessMark,
        environment: dict[str, str],
        working_dir: str,
        pids: int | None,
        network: bool,
        groups: Sequence[str],
        command_starter: CommandStarter | None = None,
        key: bytes | None = None,
    ) -> None:
        self.inner, self.environment, self.working_dir = inner, environment, working_dir
        self.pids, self.network = pids, network
        self.procs = [f"{group}/cgroup.procs" for group in groups]
        self.flags = _flags(network)
        self.used = 0  # how many commands were started in it from here
        self.command_starter = command_starter
        self.key = key  # of the program inside, where gVisor is around the sandbox
        self.owner: int | None = None  # this machine's id for the sandbox's root, once it was needed


class Entrance:
    """The way into the sandboxes of one provider."""

    def __init__(self, prerequisites: Prerequisites, directory_of: Callable[[str], SandboxDirectory]) -> None:
        self._prerequisites, self._directory_of = prerequisites, directory_of
        self._known: dict[str, Known] = {}

    def add(self, sandbox_id: str, known: Known) -> None:
        self._known[sandbox_id] = known
        if known.command_starter is not None:
            dismiss_when_idle(known)

    def forget(self, sandbox_id: str) -> ProcessMark | None:
        """Its process 1, as far as it is known here."""
        known = self._known.pop(sandbox_id, None)
        if known is None:
            return None
        _dismiss(known)
        return known.inner

    def known(self, sandbox_id: str) -> Known:
        """Raises SandboxGone."""
        known = self._known.get(sandbox_id)
        if known is None:
            known = self._known[sandbox_id] = self._learn(sandbox_id)
        return known

    def awake(self, sandbox_id: str) -> Known:
        """The same; SandboxUnavailableError while it is paused."""
        known = self.known(sandbox_id)
        if self._directory_of(sandbox_id).paused():
            raise paused(sandbox_id)
        return known

    def _learn(self, sandbox_id: str) -> Known:
        """A sandbox that another process made."""
        directory = self._directory_of(sandbox_id)
        spec = directory.spec()
        if spec is None:
            raise gone(sandbox_id, f"there is no sandbox {sandbox_id} any more", reason="deleted")
        outer, inner = directory.processes()
        if outer is None or inner is None or not outer.alive() or not directory.alive(spec):
            info = directory.info()
            reason = "deleted" if info is None else info.reason or "it was killed"
            raise gone(sandbox_id, f"the sandbox has ended: {reason}")
        environment = {}
        # Of the outer bwrap, which nothing in the sandbox can reach or make larger.
        with contextlib.suppress(OSError):
            for item in Path(f"/proc/{outer.pid}/environ").read_bytes().split(b"\0"):
                key, equals, value = item.partition(b"=")
                if equals and key.startswith(_KEPT):
                    environment[os.fsdecode(key.removeprefix(_KEPT))] = os.fsdecode(value)
        secret = environment.pop(KEY, None) if spec.get("isolation") else None
        return Known(
            inner=inner,
            key=bytes.fromhex(secret) if secret is not None else None,
            environment=environment,
            working_dir=spec["working_dir"],
            pids=spec["pids"],
            network=spec["network"] in _HOST_NETWORKS,
            groups=spec["cgroups"],
        )

    def inside(self, sandbox_id: str) -> Inside:
        return Inside(self, self._prerequisites, sandbox_id)

    async def start_process(self, sandbox_id: str, spec: ProcessSpec, *, whole: bool = False) -> LocalProcess:
        """`whole`: with every right over the sandbox's namespaces, where gVisor keeps the sandbox itself apart."""
        known = self.known(sandbox_id) if whole else self.awake(sandbox_id)
        client = await self._prerequisites.start()
        pidfd = known.inner.open()
        if pidfd is None:
            raise gone(sandbox_id)
        mark, key = secrets.token_hex(8), client.new_key()
        theirs: list[int] = []
        ours: list[int] = []
        streams: dict[int, int] = {}
        stdin: int | None = None
        try:
            theirs.append(self._place(sandbox_id))
            if spec.tty is None:
                if spec.stdin:
                    stdin_r, stdin = self._pipe(known, write_here=True)
                    theirs.append(stdin_r)
                    ours.append(stdin)
                else:
                    theirs.append(self._null(known))
                for stream in (STDOUT, STDERR):
                    here, there = self._pipe(known, write_here=False)
                    streams[here] = stream
                    theirs.append(there)
                    ours.append(here)
            message: Message = {
                "op": "exec",
                "key": key,
                "argv": spec.argv,
                "cwd": spec.cwd or known.working_dir,
                "mark": mark,
                "whole": whole,
            }
            starter: SpawnerClient | CommandStarter = client
            reply = None
            command_starter = None
            if not whole:
                command_starter = await self._command_starter(client, known, spec, pidfd)
            if command_starter is not None:
                message["env"] = {**known.environment, **spec.environment, _MARKER: mark}
                reply, starter = command_starter.request(message, theirs), command_starter
            if reply is None:
                message |= {
                    "env": known.environment,
                    "own_env": {**spec.environment, _MARKER: mark},
                    "user": spec.user,
                    "tty": [spec.tty.columns, spec.tty.rows] if spec.tty else None,
                    "nproc": self._prerequisites.nproc(known.pids),
                    "cgroups": known.procs,
                    "flags": known.flags,
                }
                if command_starter is not None and command_starter.gone:
                    _dismiss(known)
                reply, starter = await client.request(message, [pidfd, *theirs]), client
        except BaseException as error:
            for fd in ours:
                os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceExhaustedError(
                    f"no descriptor is left for a command's streams ({error.strerror}): raise the limit of this process "
                    "(ulimit -n), or run fewer at once",
                    provider="local",
                    sandbox_id=sandbox_id,
                    retryable=True,
                ) from error
            raise
        finally:
            os.close(pidfd)
            for fd in theirs:
                os.close(fd)
        process = LocalProcess(
            client=client,
            starter=starter,
            reply=reply,
            key=key,
            mark=mark,
            inner=known.inner,
            sandbox_id=sandbox_id,
            streams=streams,
            stdin=stdin,
            drain_seconds=spec.drain_seconds,
        )
        if isinstance(starter, CommandStarter):
            process.count_in(starter)
        if spec.tty is not None:
            await process.terminal_ready()
        return process

    async def _command_starter(
        self, client: SpawnerClient, known: Known, spec: ProcessSpec, pidfd: int
    ) -> CommandStarter | None:
        """Whoever starts this command without the spawner, if it is one of those that can be started so.

        From the second command on where none is ready: one alone is started faster than a command starter. Not
        where a cgroup limits the sandbox: the command starter would use up a part, and could be the one that is
        killed for want of memory. Not for an ordinary user, whose commands are executed by way of a sealed file.
        """
        known.used += 1
        plain = (
            spec.tty is None
            and spec.user is None
            and not known.procs
            and self._prerequisites.owner is not None
        )
        if not plain or (
            known.used == 1 and known.command_starter is None and not client.command_starter_ready
        ):
            return None
        if known.command_starter is None:
            message = command_starter_message(self._prerequisites, network=known.network, pids=known.pids)
            known.command_starter = await client.command_starter(message, pidfd)
            dismiss_when_idle(known)
        return known.command_starter

    def _place(self, sandbox_id: str) -> int:
        """The sandbox's directory, in which the process of a command looks whether the sandbox is paused."""
        try:
            path = self._directory_of(sandbox_id).path
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise gone(sandbox_id) from None

    def _pipe(self, known: Known, *, write_here: bool) -> tuple[int, int]:
        """A pipe; the sandbox's end belongs to its root, so that /dev/stdout can be opened again."""
        read, write = os.pipe()
        os.set_blocking(write if write_here else read, False)
        if self._prerequisites.owner is not None:
            if known.owner is None:
                known.owner = _root_of(known.inner) or self._prerequisites.owner
            os.fchown(read, known.owner, known.owner)
        return read, write

    def _null(self, known: Known) -> int:
        """What a command without input reads: opened anew, because flags that are set on it are seen by all who hold it.

        As root the sandbox's own node: a lock or a watch on this machine's would be seen by other sandboxes.
        """
        if self._prerequisites.owner is not None and known.key is None:
            with contextlib.suppress(OSError):
                path = f"/proc/{known.inner.pid}/root/dev/null"
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
                found = os.fstat(fd)
                if stat.S_ISCHR(found.st_mode) and found.st_rdev == _NULL:
                    os.set_blocking(fd, True)
                    return fd
                os.close(fd)  # the number is another process's by now
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        for known in self._known.values():
            _dismiss(known)


def _root_of(inner: ProcessMark) -> int | None:
    """This machine's id for root in the sandbox of this process 1."""
    try:
        with open(f"/proc/{inner.pid}/uid_map") as file:
            first, outside = file.readline().split()[:2]
    except (OSError, ValueError):
        return None
    return int(outside) if first == "0" and inner.alive() and int(outside) else None


def _flags(network: bool) -> int:
    return _NAMESPACES | (0 if network else _NETWORK)


def command_starter_message(prerequisites: Prerequisites, *, network: bool, pids: int | None) -> Message:
    """What a command starter has to know of its sandbox."""
    return {"flags": _flags(network), "nproc": prerequisites.nproc(pids)}


def _dismiss(known: Known) -> None:
    command_starter, known.command_starter = known.command_starter, None
    if command_starter is not None:
        command_starter.close()


def dismiss_when_idle(known: Known) -> None:
    """It costs a megabyte or two: not for a sandbox in which nothing happens."""
    used = known.used

    def look() -> None:
        if known.command_starter is not None and known.used == used and not known.command_starter.running:
            _dismiss(known)
        elif known.command_starter is not None:
            dismiss_when_idle(known)

    asyncio.get_running_loop().call_later(_COMMAND_STARTER_SECONDS, look)


class Inside:
    """Runs the spawner's calls in one sandbox."""

    def __init__(self, entrance: Entrance, prerequisites: Prerequisites, sandbox_id: str) -> None:
        self._entrance, self._prerequisites, self.sandbox_id = entrance, prerequisites, sandbox_id

    async def __call__(self, call: str, fds: list[int], **details: Any) -> Reply:
        known = self._entrance.known(self.sandbox_id)
        client = await self._prerequisites.start()
        pidfd = known.inner.open()
        if pidfd is None:
            raise gone(self.sandbox_id)
        flags = _FILE_NAMESPACES | (_NETWORK if call == "sockets" and not known.network else 0)
        try:
            message = {"op": "call", "call": call, "cgroups": known.procs, "flags": flags, **details}
            return await client.request(message, [pidfd, *fds])
        finally:
            os.close(pidfd)
