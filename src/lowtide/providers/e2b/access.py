"""Which E2B account, at which address: from arguments, then the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lowtide.providers import hosted

PROVIDER = "e2b"
KEY, DOMAIN, API_URL, SANDBOX_URL = "E2B_API_KEY", "E2B_DOMAIN", "E2B_API_URL", "E2B_SANDBOX_URL"
TEMPLATE = "LOWTIDE_E2B_TEMPLATE"
DEFAULT_DOMAIN = "e2b.app"

_OPTIONS = {"api_key": KEY, "domain": DOMAIN, "api_url": API_URL, "sandbox_url": SANDBOX_URL}
_OPTIONS |= {"proxy": "", "template": TEMPLATE}
_WAY = ("E2B_HTTP_VERSION", "E2B_MAX_CONNECTIONS", "E2B_CONNECTION_RETRIES")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The key is never shown."""

    api_key: str = field(repr=False)
    domain: str = DEFAULT_DOMAIN
    api_url: str | None = None
    sandbox_url: str | None = None
    proxy: str | None = field(default=None, repr=False)  # it may have a password
    """Only where it is not in this process's own environment, which the SDK reads."""
    template: str | None = None
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a key."""
        found = hosted.chosen_with_key(PROVIDER, "E2B", "e2b", _OPTIONS, options, environ)
        way = hosted.way_of(environ, *_WAY)
        if found["proxy"] is None and any((os.environ.get(name) or "") != way[name] for name in _PROXIES):
            found["proxy"] = next((way[name] for name in _PROXIES if way[name]), None)
        found["domain"] = found["domain"] or DEFAULT_DOMAIN
        return cls(way=way, **found)

    @property
    def account(self) -> str:
        where = self.api_url or f"https://api.{self.domain}"
        return hosted.account(PROVIDER, where, self.api_key)

    @property
    def architecture(self) -> str:
        """Of the sandboxes: E2B's machines have one, and an emulator's are this machine."""
        here = urlsplit(self.sandbox_url or self.api_url or "").hostname in ("127.0.0.1", "::1", "localhost")
        return platform.machine() if here else "x86_64"

    def credentials(self) -> dict[str, str]:
        proxies = {"HTTPS_PROXY": self.proxy, "HTTP_PROXY": self.proxy} if self.proxy is not None else {}
        return {**hosted.credentials_of(self, _OPTIONS), **proxies}

    def parameters(self) -> dict[str, Any]:
        """For every call of the SDK. All of it said, so that a changed environment changes nothing half-way."""
        said: dict[str, Any] = {"api_key": self.api_key, "domain": self.domain, "debug": False}
        said["api_url"] = self.api_url or f"https://api.{self.domain}"
        if self.sandbox_url is not None:
            said["sandbox_url"] = self.sandbox_url
        if self.proxy is not None:
            said["proxy"] = self.proxy
        return said
