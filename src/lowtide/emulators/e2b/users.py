"""The users of an emulated sandbox: their homes, and the agents that work as them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from lowtide.emulators.agent.client import Agent, AgentError
from lowtide.emulators.e2b.model import Sandbox, UnknownUser
from lowtide.emulators.guest import users_are_real

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground


class Users:
    """A part of `Sandboxes`."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    async def home(self, sandbox: Sandbox, user: str) -> str:
        """The user's home directory. UnknownUser when the sandbox has no such user."""
        if user in ("user", "root"):
            return "/home/user" if user == "user" else "/root"
        if user not in sandbox.homes:
            code, line = await self.ground.backing.run(sandbox.backing, ("getent", "passwd", "--", user))
            fields = line.decode("utf-8", "replace").strip().split(":")
            # By name: to getent a number is the id of an account, and nobody here can become it.
            if code != 0 or len(fields) < 7 or fields[0] != user:
                raise UnknownUser(f"user '{user}' not found")
            sandbox.homes[user] = fields[5]
        return sandbox.homes[user]

    @staticmethod
    def account(user: str) -> str | None:
        """What the backing provider calls that user."""
        return user if users_are_real() else None

    async def agent(self, sandbox: Sandbox, user: str) -> Agent:
        """The file agent that works as `user`, started when it is first needed."""
        agent = sandbox.agents.get(user)
        if agent is None or agent.ended:
            home = await self.home(sandbox, user)
            async with sandbox.lock:
                agent = sandbox.agents.get(user)
                if agent is None or agent.ended:
                    agent = await Agent.start(
                        self.ground.backing, sandbox.backing, user=self.account(user), home=home
                    )
                    sandbox.agents[user] = agent
        return agent

    async def make_directory(self, sandbox: Sandbox, user: str, path: str) -> tuple[dict[str, Any], bytes]:
        """For `user`, also where only root may make one (`/workspace`).

        The service's daemon is root, makes what is missing and gives it to the user. Nobody in a local
        sandbox can give a file away, so root makes only the first directory, open to all.
        """
        agent = await self.agent(sandbox, user)
        try:
            return await agent.ask("mkdir", path=path)
        except AgentError as error:
            if error.kind != "EACCES" or user == "root" or not users_are_real():
                raise
        root = await self.agent(sandbox, "root")
        await root.ask("open_way", path=path, home=await self.home(sandbox, user))
        with contextlib.suppress(AgentError):  # it was the first that was missing
            return await agent.ask("mkdir", path=path)
        return await agent.ask("stat", path=path)
