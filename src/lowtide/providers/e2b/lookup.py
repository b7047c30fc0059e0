"""What E2B says about sandboxes, by id and by metadata, in lowtide's words. Looking changes nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.errors import SERVICE

CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Answer:
    """As much of an answer as the SDK's own reading of errors needs."""

    status_code: int
    content: bytes
    headers: Any


class Requests:
    """About one sandbox, by its id. They go over the SDK's own connections, but not through its HTTP client, which
    is made anew for every call: these are on the way of everybody who waits for an end."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._headers: dict[str, str] | None = None
        self._base = ""
        self._pool: dict[str, Any] = {}
        self._once: dict[str, Any] = {}

    async def send(self, method: str, sandbox_id: str, *, patient: bool = False) -> bytes | None:
        """The answer's body; None: there is no such sandbox. Raises what the SDK raises.

        `patient`: with the SDK's own retries of connecting. They cost more than the request: an end that could
        not be asked for is asked for again by whoever wants it.
        """
        from e2b.api import handle_api_exception
        from e2b.api.client_async import get_pyqwest_transport
        from pyqwest import Client

        headers = self._headers or self._prepare()
        # From the SDK's table each time: it has new connections after a fork, and after the last `aclose`.
        client = Client(get_pyqwest_transport(**self._pool, **({} if patient else self._once)))
        answer = await client.execute(method, f"{self._base}/sandboxes/{quote(sandbox_id, safe='')}", headers)
        # `res`: see `errors.retry_after`.
        res = _Answer(answer.status, bytes(answer.content), answer.headers)
        if res.status_code == 404:
            if not hosted.is_own(res.content, "sandbox", sandbox_id):
                raise SERVICE.elsewhere(sandbox_id)
            return None
        if res.status_code >= 300:
            raise handle_api_exception(res)
        return res.content

    def _prepare(self) -> dict[str, str]:
        from e2b.api import proxy_to_config
        from e2b.api.metadata import default_headers
        from e2b.connection_config import ConnectionConfig

        config = ConnectionConfig(**self._access.parameters())
        self._base = config.api_url.rstrip("/")
        self._pool = {"proxy": proxy_to_config(config.proxy)}
        if hasattr(config, "http_version"):
            self._pool |= {"http_version": config.http_version}
            self._once = {"retry_connect": False}
        self._headers = {**default_headers, **(config.headers or {}), "X-API-KEY": self._access.api_key}
        return self._headers


async def detail(requests: Requests, sandbox_id: str) -> Any:
    """Everything about one, by a plain GET: the SDK's ``connect`` resumes and extends. SandboxNotFoundError."""
    from e2b.api.client.models import SandboxDetail

    if not hosted.is_word(sandbox_id):
        raise SERVICE.missing(sandbox_id)
    asking = requests.send("GET", sandbox_id, patient=True)
    found = await SERVICE.call(CALL_SECONDS, asking, "get", sandbox_id)
    if found is None:
        raise SERVICE.missing(sandbox_id)
    try:
        read = SandboxDetail.from_dict(json.loads(found))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        words = f"what came in place of E2B's answer about {sandbox_id} cannot be read"
        raise SERVICE.error(errors.SandboxUnavailableError, words, sandbox_id) from error
    SERVICE.check_about(sandbox_id, read.sandbox_id)
    return read


async def listed(sdk: Any, access: Access, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
    """All pages, running and paused, with these labels and a lease's full set."""
    from e2b import SandboxQuery
    from e2b import SandboxState as State

    query = SandboxQuery(metadata=dict(labels) or None, state=[State.RUNNING, State.PAUSED])
    with SERVICE.mapped():
        pages = sdk.list(query=query, limit=100, **access.parameters())
    for _ in hosted.pages(SERVICE):
        if not pages.has_next:
            return
        for one in await SERVICE.call(CALL_SECONDS, pages.next_items(), "list"):
            matches = all(one.metadata.get(key) == value for key, value in labels.items())
            if matches and Labels.from_dict(one.metadata) is not None:
                yield info_of(one)


def info_of(found: Any) -> SandboxInfo:
    paused = str(getattr(found.state, "value", found.state)) == "paused"
    return SandboxInfo(
        sandbox_id=found.sandbox_id,
        state=SandboxState.PAUSED if paused else SandboxState.RUNNING,
        labels=metadata_of(found),
        created_at=found.started_at,
        expires_at=None if paused else found.end_at,
    )


def metadata_of(found: Any) -> dict[str, str]:
    given = found.metadata
    if isinstance(given, dict):
        return dict(given)
    kept = getattr(given, "additional_properties", None)
    return dict(kept) if isinstance(kept, dict) else {}
