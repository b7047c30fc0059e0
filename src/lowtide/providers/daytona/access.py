"""Which Daytona account, at which address: from arguments, then the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import AuthenticationError
from lowtide.providers import hosted

PROVIDER = "daytona"
KEY, JWT, ORGANIZATION = "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID"
API_URL, TARGET, SNAPSHOT = "DAYTONA_API_URL", "DAYTONA_TARGET", "LOWTIDE_DAYTONA_SNAPSHOT"
DEFAULT_URL = "https://app.daytona.io/api"

_OPTIONS = {
    "api_key": KEY,
    "jwt_token": JWT,
    "organization_id": ORGANIZATION,
    "api_url": API_URL,
    "target": TARGET,
    "snapshot": SNAPSHOT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The key is never shown."""

    api_key: str | None = field(default=None, repr=False)
    jwt_token: str | None = field(default=None, repr=False)
    organization_id: str | None = None
    api_url: str = DEFAULT_URL
    target: str | None = None
    snapshot: str | None = None
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a key."""
        found = hosted.chosen(PROVIDER, _OPTIONS, options, environ)
        if not found["api_key"] and not (found["jwt_token"] and found["organization_id"]):
            raise AuthenticationError(
                f"Daytona needs an API key: set {KEY} (or {JWT} and {ORGANIZATION}), or use the emulator"
                " (lowtide emulate daytona)",
                provider=PROVIDER,
            )
        if found["api_key"]:
            found["jwt_token"] = None
        found["api_url"] = (found["api_url"] or DEFAULT_URL).rstrip("/")
        return cls(way={name: environ[name] for name in hosted.WAY if environ.get(name)}, **found)  # type: ignore[arg-type]

    @property
    def account(self) -> str:
        """A key or a token changes, its organisation does not: that counts where it is said."""
        who = f"organization {self.organization_id}" if self.organization_id else self.api_key
        return hosted.account(PROVIDER, self.api_url, str(who))

    def credentials(self) -> dict[str, str]:
        known = {
            KEY: self.api_key,
            JWT: self.jwt_token,
            ORGANIZATION: self.organization_id,
            API_URL: self.api_url,
            TARGET: self.target,
            SNAPSHOT: self.snapshot,
            **self.way,
        }
        return {name: value for name, value in known.items() if value is not None}
