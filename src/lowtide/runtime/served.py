"""Actions through the action server: bring it in, start it, reach it, one deadline for all of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from lowtide import logger
from lowtide.actionserver.models import (
    Action,
    Download,
    DownloadObservation,
    Observation,
    Run,
    RunObservation,
    Upload,
    UploadObservation,
)
from lowtide.actionserver.serve import EDITOR_PORT, PORT
from lowtide.actionserver.shell import HARD_SECONDS
from lowtide.errors import (
    AuthenticationError,
    LowtideError,
    RequestTimeoutError,
    SandboxFailedError,
    SandboxUnavailableError,
)
from lowtide.providers.base import ProcessSpec, Url
from lowtide.runtime.client import ActionClient, Streams
from lowtide.runtime.downloads import new_download
from lowtide.runtime.relay import Relay
from lowtide.sandbox import Sandbox

DIRECTORY = "/tmp/.lowtide-actions"  # noqa: S108 - inside the sandbox
_ATTACH_SECONDS = 5.0
_LOG_BYTES = 4000
_REVIVE_SECONDS = 30.0
_AGAIN = (
    "[The action server had ended and was started again: shells, their variables and directories are new.]\n"
)

log = logger.get("lowtide.runtime")


class Served:
    """One sandbox's action server, as the runtime holds it."""

    def __init__(self, sandbox: Sandbox, key: str, *, transport: str, working_dir: str | None) -> None:
        self._sandbox, self._key = sandbox, key
        self._transport, self._working_dir = transport, working_dir
        self._client: ActionClient | None = None
        self._relay: Relay | None = None
        self._file: str | None = None
        self._doubtful = False
        """An answer did not come: the server may have been ended."""
        self._reviving = asyncio.Lock()

    async def open(self, *, attach: bool) -> None:
        """Returns when actions can run. The caller holds the deadline."""
        if attach and await self._attached():
            return
        await self._launch()
        await self._reach()

    @property
    def client(self) -> ActionClient:
        if self._client is None:
            raise SandboxUnavailableError("the action server has ended; the next action starts it again")
        return self._client

    async def execute(self, action: Action, on_output: Callable[[str], None] | None) -> Observation:
        again = await self._revive() if self._doubtful else ""
        seconds = HARD_SECONDS if action.timeout is None else float(action.timeout)
        try:
            if isinstance(action, Upload):
                return await self._upload(action)
            if isinstance(action, Download):
                return await self._download(action)
            seen = await self.client.execute(
                action, seconds=seconds, on_output=on_output if isinstance(action, Run) else None
            )
            if again and isinstance(seen, RunObservation):
                seen.metadata.prefix = again + seen.metadata.prefix
            return seen
        except SandboxUnavailableError:
            self._doubtful = True
            raise
        except TimeoutError as error:
            if isinstance(error, LowtideError):
                raise
            self._doubtful = True
            raise RequestTimeoutError(
                f"the action server did not answer within {seconds:g} seconds and its grace; the command may "
                "still run: an empty command reads on"
            ) from None

    async def _revive(self) -> str:
        """After an answer that did not come: a server that what runs inside has ended is started again.

        Nothing is sent twice: only what is asked for next goes to the new one. What to tell the agent, or nothing.
        """
        async with self._reviving:
            if not self._doubtful:
                return ""
            try:
                await self.client.alive(_ATTACH_SECONDS)
                self._doubtful = False
                return ""
            except (SandboxUnavailableError, RequestTimeoutError) as error:
                if (await self._sandbox.refresh()).terminal:
                    raise
                log.info("the action server does not answer (%s): starting it again", error)
            try:
                async with asyncio.timeout(_REVIVE_SECONDS):
                    await self.aclose()
                    self._file = None
                    await self._launch()
                    await self._reach()
            except TimeoutError as error:
                if isinstance(error, LowtideError):
                    raise
                raise SandboxUnavailableError(
                    f"the action server has ended and could not be started again within {_REVIVE_SECONDS:g} seconds"
                ) from error
            self._doubtful = False
            return _AGAIN

    async def cancel(self, session: str, grace_seconds: float) -> bool:
        return await self.client.cancel(session, grace_seconds)

    async def url(self) -> Url:
        return await self._sandbox.url(PORT)

    async def editor_url(self) -> str | None:
        token = await self.client.connection_token()
        if token is None:
            return None
        address = await self._sandbox.url(EDITOR_PORT)
        return f"{address.url.rstrip('/')}/?tkn={token}&folder={self._working_dir or '/'}"

    async def stop_inside(self, seconds: float) -> None:
        if self._client is not None:
            await self._client.shutdown(seconds)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        relay, self._relay = self._relay, None
        if client is not None:
            await client.aclose()
        if relay is not None:
            await relay.aclose()

    # The way in.

    async def _attached(self) -> bool:
        """Whether a server is there already, and takes our key."""
        try:
            await self._dial()
            await self.client.alive(_ATTACH_SECONDS)
        except AuthenticationError as error:
            raise AuthenticationError(
                f"the action server in sandbox {self._sandbox.sandbox_id} has a key of another lowtide home; attach "
                "with the LOWTIDE_HOME of the process that made it",
                sandbox_id=self._sandbox.sandbox_id,
            ) from error
        except (SandboxUnavailableError, RequestTimeoutError):
            await self.aclose()
            return False
        return True

    async def _bring(self) -> str:
        """The server's one file, inside. Its name changes with its content."""
        if self._file is None:
            from lowtide.actionserver.bundle import bundle

            made = bundle()
            self._file = f"/tmp/{made.name}"  # noqa: S108
            await self._sandbox.write_file(self._file, made.data)
        return self._file

    async def _launch(self) -> None:
        config = {
            "key": self._key,
            "port": PORT,
            "editor_port": EDITOR_PORT,
            # A preview link or tunnel comes in from the sandbox's own network, the rest by its loopback.
            "host": "127.0.0.1" if self._transport == "inside" or self._loopback_urls else "0.0.0.0",  # noqa: S104
            "directory": DIRECTORY,
            "working_dir": self._working_dir,
        }
        process = self._sandbox.exec(
            ["python3", "-I", await self._bring(), "serve"], stdin=json.dumps(config) + "\n"
        )
        ran = await process
        if ran.returncode == 0:
            return
        if ran.returncode == 127:
            why = "the image has no python3; the action server needs Python 3.9 or later"
        else:
            why = f"exit code {ran.returncode}: {(ran.stderr or ran.stdout).strip()[-1000:]}"
        raise SandboxFailedError(
            f"the action server could not be started: {why}",
            reason="action server",
            sandbox_id=self._sandbox.sandbox_id,
        )

    async def _reach(self) -> None:
        pause = 0.01
        while True:
            try:
                if self._client is None:
                    await self._dial()
                await self.client.alive(10.0)
                return
            except (SandboxUnavailableError, RequestTimeoutError) as error:
                state = await self._sandbox.refresh()
                if state.terminal:
                    raise SandboxFailedError(
                        f"the sandbox ended while its action server was starting{await self.last_log()}",
                        reason=state.value,
                        sandbox_id=self._sandbox.sandbox_id,
                    ) from error
                await self.aclose()
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)

    async def last_log(self) -> str:
        """The server's last lines, for an error; empty where there are none."""
        with contextlib.suppress(Exception):
            # Its end only: what runs inside may have made it as long as it likes.
            tail = ["tail", "-c", str(_LOG_BYTES), f"{DIRECTORY}/log"]
            ran = await self._sandbox.exec(tail, timeout_seconds=5.0)
            said = ran.stdout[-_LOG_BYTES:]
            if said.strip():
                return f"; its last words:\n{said.strip()}"
        return ""

    @property
    def _loopback_urls(self) -> bool:
        """Where `Sandbox.url` is a listener on this machine that ends at the sandbox's loopback."""
        return self._sandbox.provider in ("local", "docker", "kubernetes")

    async def _dial(self) -> None:
        if self._transport == "inside" and not self._loopback_urls:
            await self._dial_relay()
        else:
            await self._dial_url()

    async def _dial_url(self) -> None:
        address = await self._sandbox.url(PORT)
        parts = urlsplit(address.url)
        tls = parts.scheme == "https"
        host, port = parts.hostname or "127.0.0.1", parts.port or (443 if tls else 80)

        async def dial() -> Streams:
            return await asyncio.open_connection(host, port, ssl=tls or None, limit=64 << 20)

        self._client = ActionClient(
            dial, self._key, host=parts.netloc, prefix=parts.path, headers=dict(address.headers)
        )

    async def _dial_relay(self) -> None:
        provider, sandbox_id = await self._sandbox._life.ready()
        spec = ProcessSpec(argv=("python3", "-I", await self._bring(), "relay", str(PORT)), stdin=True)
        relay = Relay(await provider.start_process(sandbox_id, spec))
        try:
            await relay.ready()
        except BaseException:
            await relay.aclose()
            raise
        self._relay = relay
        self._client = ActionClient(relay.open, self._key)

    # Files of this machine.

    async def _upload(self, action: Upload) -> Observation:
        source = Path(action.source)
        if not source.exists():  # noqa: ASYNC240
            raise FileNotFoundError(2, "there is no such file or directory here", action.source)
        if source.is_dir():  # noqa: ASYNC240
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / f"{source.name or 'directory'}.zip"
                await asyncio.to_thread(_zip, source, archive)
                size = await self.client.upload(archive, action.destination, recursive=True)
        else:
            size = await self.client.upload(source, action.destination, recursive=False)
        return UploadObservation(
            content=f"{action.source} is in {action.destination}.", path=action.destination, size=size
        )

    async def _download(self, action: Download) -> Observation:
        destination = Path(action.destination) if action.destination is not None else new_download()
        partial = destination.with_name(f".{secrets.token_hex(6)}.part")
        try:
            size = await self.client.download(action.path, partial)
            partial.replace(destination)
        except BaseException:
            partial.unlink(missing_ok=True)
            if action.destination is None:
                partial.parent.rmdir()
            raise
        return DownloadObservation(
            content=f"{action.path} is in {destination}.",
            path=action.path,
            destination=str(destination),
            size=size,
        )


def _zip(source: Path, archive: Path) -> None:
    from lowtide.actionserver.files import write_zip

    with archive.open("wb") as file:
        write_zip(str(source), file)
