"""Which CoreWeave account, at which address, and the connections there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.providers import hosted
from lowtide.providers.coreweave.errors import DOMAIN, SERVICE
from lowtide.providers.hosted.grpc_calls import Connections

PROVIDER = "coreweave"
KEY, URL, IMAGE = "CWSANDBOX_API_KEY", "CWSANDBOX_BASE_URL", "LOWTIDE_COREWEAVE_IMAGE"
DEFAULT_URL = "https://api.cwsandbox.com"

_OPTIONS = {"api_key": KEY, "base_url": URL, "image": IMAGE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The key is never shown."""

    api_key: str = field(repr=False)
    base_url: str = DEFAULT_URL
    image: str | None = None
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a key."""
        found = hosted.chosen_with_key(PROVIDER, "CoreWeave", "cwsandbox", _OPTIONS, options, environ)
        url = hosted.url_of(found["base_url"] or DEFAULT_URL, URL, PROVIDER, host_alone=True)
        way = hosted.way_of(environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "grpc_proxy", "no_grpc_proxy")
        return cls(api_key=found["api_key"], base_url=url, image=found["image"], way=way)

    @property
    def account(self) -> str:
        return hosted.account(PROVIDER, self.base_url, self.api_key)

    def credentials(self) -> dict[str, str]:
        return hosted.credentials_of(self, _OPTIONS)

    def inside_key(self, lease_id: str) -> bytes:
        return hosted.inside_key(self.api_key, lease_id)


def messages() -> Any:
    """The service's messages, as the SDK ships them; imported on first use."""
    from cwsandbox._proto import sandbox_pb2

    return sandbox_pb2


def connections(access: Access) -> Connections:
    from cwsandbox._proto.sandbox_pb2_grpc import SandboxServiceStub

    return Connections(access.base_url, access.api_key, SandboxServiceStub, SERVICE, DOMAIN)
