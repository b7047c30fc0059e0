"""The sandboxes this end has used: the SDK's object for each, and what its metadata says about commands."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.providers.e2b.creation import USER, WORKING_DIR
from lowtide.providers.e2b.described import metadata_of

if TYPE_CHECKING:
    from e2b import AsyncSandbox

_MOST = 2048


@dataclass(slots=True)
class Box:
    """What commands in one sandbox need."""

    sdk: AsyncSandbox
    working_dir: str | None = None
    user: str | None = None

    @classmethod
    def of(cls, sdk: type[AsyncSandbox], detail: Any, parameters: dict[str, Any]) -> Box:
        """For one that exists, without the side effects of the SDK's ``connect``."""
        from e2b.connection_config import ConnectionConfig
        from packaging.version import Version

        token = detail.envd_access_token if isinstance(detail.envd_access_token, str) else None
        headers = {"E2b-Sandbox-Id": detail.sandbox_id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if token is not None:
            headers["X-Access-Token"] = token
        metadata = metadata_of(detail)
        return cls(
            sdk(
                sandbox_id=detail.sandbox_id,
                sandbox_domain=detail.domain if isinstance(detail.domain, str) else None,
                envd_version=Version(detail.envd_version),
                envd_access_token=token,
                traffic_access_token=None,
                connection_config=ConnectionConfig(extra_sandbox_headers=headers, **parameters),
            ),
            metadata.get(WORKING_DIR),
            metadata.get(USER),
        )


class Boxes:
    """By id. The oldest is dropped when there are too many; it can be made again."""

    def __init__(self) -> None:
        self._table: OrderedDict[str, Box] = OrderedDict()

    def get(self, sandbox_id: str) -> Box | None:
        return self._table.get(sandbox_id)

    def keep(self, sandbox_id: str, box: Box) -> None:
        self._table[sandbox_id] = box
        while len(self._table) > _MOST:
            self._table.popitem(last=False)

    def drop(self, sandbox_id: str) -> None:
        self._table.pop(sandbox_id, None)

    def clear(self) -> None:
        self._table.clear()
