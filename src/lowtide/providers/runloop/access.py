"""Which Runloop account, and the SDK's client for it: from arguments, then the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.providers import hosted

if TYPE_CHECKING:
    import httpx
    from runloop_api_client import AsyncRunloop

PROVIDER = "runloop"
KEY, BASE_URL, BLUEPRINT = "RUNLOOP_API_KEY", "RUNLOOP_BASE_URL", "LOWTIDE_RUNLOOP_BLUEPRINT"
DEFAULT_URL = "https://api.runloop.ai"
_HEADERS = "RUNLOOP_CUSTOM_HEADERS"
_OPTIONS = {"api_key": KEY, "base_url": BASE_URL, "blueprint": BLUEPRINT}
_CONNECT_SECONDS = 5.0
_CALL_SECONDS = 60.0
_CONNECTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The key is never shown."""

    api_key: str = field(repr=False)
    base_url: str = DEFAULT_URL
    blueprint: str | None = None
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a key."""
        found = hosted.chosen_with_key(PROVIDER, "Runloop", "runloop_api_client", _OPTIONS, options, environ)
        return cls(
            api_key=found["api_key"],
            base_url=hosted.url_of(found["base_url"] or DEFAULT_URL, BASE_URL, PROVIDER),
            blueprint=found["blueprint"],
            way=hosted.way_of(environ, _HEADERS),
        )

    @property
    def account(self) -> str:
        return hosted.account(PROVIDER, self.base_url, self.api_key)

    def credentials(self) -> dict[str, str]:
        return hosted.credentials_of(self, _OPTIONS)

    def client(self) -> AsyncRunloop:
        """A client of the running loop. It sends everything once: the SDK would send six times, for half a minute.

        Its connections are its own and end with it. HTTP/1.1, because every sandbox in use holds one answer
        open, and a connection of HTTP/2 carries about a hundred at most and lets all others wait.
        """
        import httpx
        from runloop_api_client import AsyncRunloop, DefaultAioHttpClient

        timeout = httpx.Timeout(_CALL_SECONDS, connect=_CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=_CONNECTIONS)
        return AsyncRunloop(
            bearer_token=self.api_key,
            base_url=self.base_url,
            max_retries=0,
            timeout=timeout,
            http_client=DefaultAioHttpClient(
                base_url=self.base_url,
                timeout=timeout,
                limits=limits,
                # Whoever redirects is not Runloop: a create would be sent elsewhere, with all that is in it.
                follow_redirects=False,
                event_hooks={"response": [_not_a_page]},
            ),
        )


async def _not_a_page(response: httpx.Response) -> None:
    """Runloop never answers with a page or a redirect; who does, answers in its place. The SDK would take a page for a success."""
    if response.is_redirect:
        raise ConnectionError("a redirect came in place of an answer, and was not followed")
    if response.is_success and "html" in response.headers.get("Content-Type", ""):
        raise ConnectionError("a page came in place of an answer")
