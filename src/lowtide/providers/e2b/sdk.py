"""The SDK's sandbox objects, with clients that are made when they are first used.

The SDK's own makes nine HTTP clients for every sandbox, whatever is done with it. Most sandboxes run
commands and nothing else, and those need one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lowtide.providers.base import LABEL_PREFIX
from lowtide.providers.e2b.lookup import metadata_of

WORKING_DIR = LABEL_PREFIX + "cwd"
USER = LABEL_PREFIX + "user"

LazySandbox: TypeAlias = Any
"""What `sandbox_class` makes. The SDK is untyped here, because it is only imported when it is used."""


@functools.cache
def sandbox_class() -> type[LazySandbox]:
    """Imports the SDK. What it makes is an `AsyncSandbox`, as far as this package uses one."""
    from e2b import AsyncSandbox
    from e2b.api.client_async import get_envd_api
    from e2b.envd.client_async import create_rpc_client
    from e2b.envd.process.process_connect import ProcessClient
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.filesystem.filesystem import Filesystem

    def begin(self: Any, **given: Any) -> None:
        super(AsyncSandbox, self).__init__(**given)

    parts: dict[str, Callable[[Any], Any]] = {
        "process_rpc": lambda s: create_rpc_client(ProcessClient, s.envd_api_url, s.connection_config),
        "_envd_api": lambda s: get_envd_api(s.connection_config, s.envd_api_url),
        "_filesystem": lambda s: Filesystem(
            s.envd_api_url, s._envd_version, s.connection_config, s._envd_api
        ),
        "_commands": lambda s: Commands(s.envd_api_url, s.connection_config, s._envd_version, s._envd_api),
    }
    members = {name: functools.cached_property(make) for name, make in parts.items()}
    return type("Lazy", (AsyncSandbox,), {"__init__": begin, **members})


@dataclass(slots=True)
class SdkSandbox:
    """One sandbox as the SDK knows it, and what its metadata says about commands."""

    sdk: LazySandbox
    working_dir: str | None = None
    user: str | None = None
    untouched: bool = False
    """Made here from a template, and nothing was started in it yet: nothing in it is hostile."""
    entered: bool = False
    """Its working directory is there."""

    @classmethod
    def of(cls, detail: Any, parameters: dict[str, Any]) -> SdkSandbox:
        """For one that exists, without the side effects of the SDK's ``connect``."""
        from e2b.connection_config import ConnectionConfig
        from packaging.version import Version

        token = detail.envd_access_token if isinstance(detail.envd_access_token, str) else None
        headers = {"E2b-Sandbox-Id": detail.sandbox_id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if token is not None:
            headers["X-Access-Token"] = token
        metadata = metadata_of(detail)
        return cls(
            sandbox_class()(
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
