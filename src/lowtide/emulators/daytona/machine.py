"""What an emulated Daytona machine looks like from inside, and how commands and files get there.

Daytona's machines have a user `daytona` with uid 1000 and its home, where a local sandbox has a `user`.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowtide.emulators.agent.client import Agent, AgentError
from lowtide.emulators.backing import allowed
from lowtide.emulators.daytona.answers import Refused
from lowtide.emulators.guest import UNTIL_SETTLED, first_process, users_are_real
from lowtide.errors import LowtideError
from lowtide.providers.base import ProcessHandle, TerminalSize

if TYPE_CHECKING:
    from lowtide.emulators.daytona.sandbox import Sandbox
    from lowtide.emulators.ground import Ground

HOMES = {"daytona": "/home/daytona", "root": "/root"}
ACCOUNTS = {"daytona": "1000:1000", "root": "0:0"}

USERS = f"""{UNTIL_SETTLED}
umask 022
chmod 1777 /home
printf '%s\\n' root:x:0:0:root:/root:/bin/bash nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin \
daytona:x:1000:1000:daytona:/home/daytona:/bin/bash > /etc/passwd
printf '%s\\n' root:x:0: tty:x:5: nogroup:x:65534: daytona:x:1000: > /etc/group
"""


def known_user(name: str) -> bool:
    return name in HOMES


_MOST_PRINTED = 64 << 20


class Machine:
    """The inside of one emulated sandbox, as its own user."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    async def boot(self, snapshot: str | None, network: Mapping[str, Any]) -> str:
        """A backing sandbox with Daytona's user and home, and the way out that its lists allow."""
        backing = self.ground.backing
        lists = [network.get(key) or "" for key in ("networkAllowList", "domainAllowList")]
        entries = [entry for text in lists for entry in text.split(",") if entry]
        allow = allowed(entries) if entries else None
        if network.get("networkBlockAll"):
            allow = ()
        made = await backing.create(snapshot=snapshot, command=first_process(), allow=allow)
        if snapshot is not None:  # what it was taken from has them already
            return made
        try:
            await backing.run(
                made, ("/bin/sh", "-c", USERS), user=ACCOUNTS["root"] if users_are_real() else None
            )
            # Made by its owner: the sandbox's root has no capability to give a directory away.
            account = ACCOUNTS["daytona"] if users_are_real() else None
            await backing.run(made, ("/bin/mkdir", "-p", HOMES["daytona"]), user=account)
        except BaseException:
            await backing.destroy(made)
            raise
        return made

    def home(self, sandbox: Sandbox) -> str:
        return HOMES[sandbox.user]

    def work(self, sandbox: Sandbox) -> str:
        """Where commands run and relative paths start: the image's WORKDIR, else the home."""
        return sandbox.workdir or self.home(sandbox)

    def environment(self, sandbox: Sandbox, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {
            "HOME": self.home(sandbox),
            "USER": sandbox.user,
            "LOGNAME": sandbox.user,
            "SHELL": "/bin/bash",
            "DAYTONA_SANDBOX_ID": sandbox.sandbox_id,
            "DAYTONA_SANDBOX_SNAPSHOT": sandbox.snapshot or "",
            "DAYTONA_SANDBOX_USER": sandbox.user,
            "DAYTONA_ORGANIZATION_ID": sandbox.organization_id,
            "DAYTONA_REGION_ID": sandbox.target,
            **sandbox.environment,
            **(more or {}),
        }

    def path(self, sandbox: Sandbox, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.work(sandbox), path))

    async def directory(self, sandbox: Sandbox, cwd: str | None) -> str:
        """Where a command runs. Refused when there is no such directory."""
        if not cwd:
            return self.work(sandbox)
        where = self.path(sandbox, cwd)
        try:
            answer, _ = await (await self.agent(sandbox)).ask("stat", path=where)
        except AgentError as error:
            raise Refused(400, f"chdir {where}: {error}") from None
        if answer["entry"]["kind"] != "directory":
            raise Refused(400, f"chdir {where}: not a directory")
        return where

    async def start(
        self,
        sandbox: Sandbox,
        argv: tuple[str, ...],
        *,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bool = False,
        tty: TerminalSize | None = None,
    ) -> ProcessHandle:
        return await self.ground.backing.start(
            sandbox.backing,
            argv,
            user=self.account(sandbox),
            cwd=await self.directory(sandbox, cwd),
            environment=self.environment(sandbox, environment),
            stdin=stdin,
            tty=tty,
        )

    async def run(
        self,
        sandbox: Sandbox,
        argv: tuple[str, ...],
        data: bytes | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        most_bytes: int = _MOST_PRINTED,
    ) -> tuple[int, bytes, bytes]:
        """A short command of the emulator's own, with `data` on its standard input: code, stdout, stderr.

        One that prints more than `most_bytes` is ended there, with the code -1: the sandbox may have changed it.
        """
        handle = await self.ground.backing.start(
            sandbox.backing,
            argv,
            user=self.account(sandbox),
            cwd=self.home(sandbox),
            environment=self.environment(sandbox, environment),
            stdin=data is not None,
        )
        streams = {1: bytearray(), 2: bytearray()}
        feeding = asyncio.ensure_future(feed(handle, data)) if data is not None else None
        try:
            async for stream, piece in handle.output():
                streams[stream] += piece
                if len(streams[stream]) > most_bytes:
                    await _end(handle)
                    return -1, b"", b"it prints too much"
            return await handle.wait(), bytes(streams[1]), bytes(streams[2])
        except asyncio.CancelledError:  # the caller has left: nobody wants what it would still find
            await asyncio.shield(asyncio.ensure_future(_end(handle)))
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
            await handle.aclose()

    def account(self, sandbox: Sandbox) -> str | None:
        return ACCOUNTS[sandbox.user] if users_are_real() else None

    async def agent(self, sandbox: Sandbox) -> Agent:
        """The file agent of the sandbox's user, started when it is first needed."""
        if sandbox.agent is None or sandbox.agent.ended:
            async with sandbox.agent_lock:
                if sandbox.agent is None or sandbox.agent.ended:
                    sandbox.agent = await Agent.start(
                        self.ground.backing,
                        sandbox.backing,
                        user=self.account(sandbox),
                        home=self.work(sandbox),
                    )
        return sandbox.agent


async def _end(handle: ProcessHandle) -> None:
    with contextlib.suppress(LowtideError):
        await handle.terminate(0.0)


async def feed(handle: ProcessHandle, data: bytes) -> None:
    """Give a command its standard input, as long as it reads."""
    with contextlib.suppress(BrokenPipeError):
        await handle.write_stdin(data)
        await handle.close_stdin()
