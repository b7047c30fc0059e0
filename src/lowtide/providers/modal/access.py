"""Which Modal workspace, and the SDK's client for it: made on first use, one for each event loop and process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.engine import at_the_very_end
from lowtide.providers import hosted
from lowtide.providers.modal.errors import PROVIDER, WORKSPACE

ID, SECRET, ENVIRONMENT, URL = "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_ENVIRONMENT", "MODAL_SERVER_URL"
APP = "LOWTIDE_MODAL_APP"
PROFILE, CONFIG = "MODAL_PROFILE", "MODAL_CONFIG_PATH"
DEFAULT_APP = "lowtide"
_OPTIONS = {"token_id": ID, "token_secret": SECRET, "environment": ENVIRONMENT, "server_url": URL, "app": APP}
_LOOKUP_SECONDS = 30.0
_CLOSING_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The secret is never shown."""

    token_id: str
    token_secret: str = field(repr=False)
    environment: str | None = None
    server_url: str | None = None
    app: str = DEFAULT_APP
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a token."""
        found = hosted.chosen(PROVIDER, _OPTIONS, options, environ)
        token_id, token_secret = found["token_id"], found["token_secret"]
        if not token_id or not token_secret:
            missing = [name for name in ("token_id", "token_secret") if not found[name]]
            raise hosted.needs_key("Modal", PROVIDER, *(_OPTIONS[name] for name in missing))
        profile = _profile(environ)
        return cls(
            token_id=token_id,
            token_secret=token_secret,
            environment=found["environment"] or profile.get("environment"),
            server_url=found["server_url"] or profile.get("server_url"),
            app=found["app"] or DEFAULT_APP,
            way=hosted.way_of(environ),
        )

    @property
    def account(self) -> str:
        """The app counts: a name is unique in it, and a list shows its sandboxes only."""
        where = f"{self.server_url or ''}|{self.environment or ''}|{self.app}"
        return hosted.account(PROVIDER, where, self.token_id)

    def credentials(self) -> dict[str, str]:
        # All of it said: a file that is another one by then must not lead the guardian elsewhere.
        return {**hosted.credentials_of(self, _OPTIONS), CONFIG: os.devnull, PROFILE: ""}

    def key(self, lease_id: str) -> bytes:
        return hosted.inside_key(self.token_secret, lease_id)


def _profile(environ: Mapping[str, str]) -> dict[str, str]:
    """What the SDK's own file says, as the SDK reads it; nothing where there is none, or where it makes no sense."""
    try:
        with open(environ.get(CONFIG) or os.path.expanduser("~/.modal.toml"), "rb") as file:
            profiles = {name: one for name, one in tomllib.load(file).items() if isinstance(one, dict)}
    except (OSError, ValueError):
        return {}
    active = next((name for name, one in profiles.items() if one.get("active") is True), "default")
    said = profiles.get(environ.get(PROFILE) or active, {})
    return {name: value for name, value in said.items() if isinstance(value, str) and value}


class Connection:
    """The SDK's client and the app, of one event loop in one process: a forked child gets its own."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._making: asyncio.Task[tuple[Any, Any]] | None = None

    @property
    def fresh(self) -> bool:
        """Whether nothing of it can be used here: it is new, or from another loop or process."""
        return self._owner != (os.getpid(), asyncio.get_running_loop())

    async def app(self) -> tuple[Any, Any]:
        """The client and the app. Looked up once; a failure is asked for again."""
        if self.fresh:
            self._owner, self._making = (os.getpid(), asyncio.get_running_loop()), None
        making = self._making
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making = asyncio.get_running_loop().create_task(self._make())
            making.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(making)

    async def _make(self) -> tuple[Any, Any]:
        access = self._access
        modal = await asyncio.to_thread(_sdk)
        url = access.server_url or modal.config.config["server_url"]
        # Not from the environment: the SDK reads that when it is imported, and keeps one client for all.
        client = modal.Client(url, 1, (access.token_id, access.token_secret))

        async def looked_up() -> Any:
            await client.__aenter__()  # connects, and tries that again for a minute
            return await modal.App.lookup.aio(
                access.app, create_if_missing=True, environment_name=access.environment, client=client
            )

        try:
            app = await WORKSPACE.call(_LOOKUP_SECONDS, looked_up(), "app")
        except BaseException:
            await _close(client)
            raise
        return client, app

    async def aclose(self) -> None:
        making, mine = self._making, not self.fresh
        self._making = self._owner = None
        if making is not None and mine:
            with contextlib.suppress(Exception):
                client, _ = await making
                await _close(client)


async def _close(client: Any) -> None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_CLOSING_SECONDS):
            await client.__aexit__(None, None, None)


def _sdk() -> Any:
    """The import alone takes a quarter of a second; in a thread, so that the loop goes on."""
    try:
        import modal
    except ModuleNotFoundError as error:
        raise hosted.missing_dependency(PROVIDER, "modal") from error
    with contextlib.suppress(ImportError, AttributeError):
        from modal._utils.async_utils import synchronizer

        # It would end the thread that all calls go through before lowtide's exit has ended its sandboxes.
        at_the_very_end(synchronizer._close_loop)
    return modal
