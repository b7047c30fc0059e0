"""Deleting and looking below the SDK's models: one request, and of its answer the status and the state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lowtide.providers.daytona.deadline import within

CALL_SECONDS = 20.0


class Refusal(Exception):
    """An answer that is an error; `failures` reads its status as it reads the SDK's own."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


async def delete(api: Any, sandbox_id: str) -> str:
    """The state the delete was answered with. Raises Refusal, and what the transport raises."""
    asking = api.delete_sandbox_without_preload_content(sandbox_id, _request_timeout=CALL_SECONDS)
    return await within(CALL_SECONDS + 1.0, _state(asking), "delete", sandbox_id)


async def state(api: Any, sandbox_id: str) -> str:
    """Daytona's word for what it is now. Raises as `delete` does."""
    asking = api.get_sandbox_without_preload_content(sandbox_id, _request_timeout=CALL_SECONDS)
    return await within(CALL_SECONDS + 1.0, _state(asking), "get", sandbox_id)


async def _state(asking: Any) -> str:
    response = await asking
    body = await response.read()
    try:
        said = json.loads(body) if body else {}
    except ValueError:
        said = {}
    if not isinstance(said, dict):
        said = {}
    if response.status >= 400:
        raise Refusal(response.status, str(said.get("message") or response.reason), response.headers)
    return str(said.get("state") or "unknown")
