"""Which Daytona account, at which address: from arguments, then the environment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.errors import AuthenticationError, MissingDependencyError, ValidationError

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
# The way to the service. The SDK reads these itself; the guardian's worker needs them to go the same way.
_WAY = (
    *("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("https_proxy", "http_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)


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
        given = dict(options or {})
        for name, value in given.items():
            if name not in _OPTIONS:
                known = ", ".join(sorted(_OPTIONS))
                raise ValidationError(
                    f"unknown option {name!r} for daytona; known: {known}", argument=name, provider=PROVIDER
                )
            if value is not None and not (isinstance(value, str) and value):
                raise ValidationError(f"{name} must be a string", argument=name, provider=PROVIDER)
        found = {
            name: given.get(name) or environ.get(variable) or None for name, variable in _OPTIONS.items()
        }
        if not found["api_key"] and not (found["jwt_token"] and found["organization_id"]):
            raise AuthenticationError(
                f"Daytona needs an API key: set {KEY} (or {JWT} and {ORGANIZATION}), or use the emulator"
                " (lowtide emulate daytona)",
                provider=PROVIDER,
            )
        if found["api_key"]:
            found["jwt_token"] = None
        found["api_url"] = (found["api_url"] or DEFAULT_URL).rstrip("/")
        return cls(way={name: environ[name] for name in _WAY if environ.get(name)}, **found)  # type: ignore[arg-type]

    @property
    def account(self) -> str:
        """A key is long and random, so nothing follows from a short digest of it; a token changes, its organisation does not."""
        who = self.api_key if self.api_key is not None else f"organization {self.organization_id}"
        return hashlib.sha256(f"lowtide daytona|{self.api_url}|{who}".encode()).hexdigest()[:16]

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


def missing_dependency() -> MissingDependencyError:
    install = 'pip install "lowtide[daytona]"'
    return MissingDependencyError(
        f"provider 'daytona' needs Daytona's SDK; run: {install}", install=install, provider=PROVIDER
    )
