"""What E2B says about sandboxes, by id and by metadata, in lowtide's words. Looking changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from lowtide import errors
from lowtide.providers import hosted
from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.e2b.access import Access
from lowtide.providers.e2b.errors import SERVICE

CALL_SECONDS = 30.0


async def detail(access: Access, sandbox_id: str) -> Any:
    """Everything about one, by a plain GET: the SDK's ``connect`` resumes and extends. SandboxNotFoundError."""
    from e2b.api import handle_api_exception
    from e2b.api.client.api.sandboxes import get_sandboxes_sandbox_id
    from e2b.api.client_async import get_api_client
    from e2b.connection_config import ConnectionConfig

    if not hosted.is_word(sandbox_id):
        raise SERVICE.missing(sandbox_id)
    client = get_api_client(ConnectionConfig(**access.parameters()))
    asking = get_sandboxes_sandbox_id.asyncio_detailed(sandbox_id, client=client)
    try:
        res = await SERVICE.call(CALL_SECONDS, asking, "get", sandbox_id)  # `res`: see `errors.retry_after`
    except LookupError as error:  # the SDK cannot read it, so it is not E2B's
        if isinstance(error, errors.LowtideError):
            raise
        raise SERVICE.elsewhere(sandbox_id) from error
    if res.status_code == 404:
        raise SERVICE.missing(sandbox_id) if hosted.is_own(res.content) else SERVICE.elsewhere(sandbox_id)
    with SERVICE.mapped(sandbox_id):
        if res.status_code >= 300 or not hasattr(res.parsed, "sandbox_id"):
            raise handle_api_exception(res)
    return res.parsed


async def listed(sdk: Any, access: Access, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
    """All pages, running and paused, with these labels and a lease's full set."""
    from e2b import SandboxQuery
    from e2b import SandboxState as State

    query = SandboxQuery(metadata=dict(labels) or None, state=[State.RUNNING, State.PAUSED])
    with SERVICE.mapped():
        pages = sdk.list(query=query, limit=100, **access.parameters())
    while pages.has_next:
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
