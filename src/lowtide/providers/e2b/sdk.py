"""The SDK's sandbox objects, with clients that are made when they are first used.

The SDK's own makes nine HTTP clients for every sandbox, whatever is done with it. Most sandboxes run
commands and nothing else, and those need one.
"""

from __future__ import annotations

import functools
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
    """Imports the SDK. What it makes is an `AsyncSandbox` in every way."""
    from e2b import AsyncSandbox
    from e2b.api.client_async import get_envd_api
    from e2b.envd.client_async import create_rpc_client
    from e2b.envd.process import process_connect
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.commands.pty import Pty
    from e2b.sandbox_async.filesystem.filesystem import Filesystem
    from e2b.sandbox_async.git import Git

    class Lazy(AsyncSandbox):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super(AsyncSandbox, self).__init__(**given)

        @functools.cached_property
        def process_rpc(self) -> Any:
            """The generated client of envd's process service."""
            return create_rpc_client(process_connect.ProcessClient, self.envd_api_url, self.connection_config)

        @functools.cached_property
        def _envd_api(self) -> Any:
            return get_envd_api(self.connection_config, self.envd_api_url)

        @functools.cached_property
        def _filesystem(self) -> Any:
            return Filesystem(self.envd_api_url, self._envd_version, self.connection_config, self._envd_api)

        @functools.cached_property
        def _commands(self) -> Any:
            return Commands(self.envd_api_url, self.connection_config, self._envd_version, self._envd_api)

        @functools.cached_property
        def _pty(self) -> Any:
            return Pty(self.envd_api_url, self.connection_config, self._envd_version, self._envd_api)

        @functools.cached_property
        def _git(self) -> Any:
            return Git(self._commands)

    return Lazy


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
