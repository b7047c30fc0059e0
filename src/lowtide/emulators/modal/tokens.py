"""The short-lived tokens the service hands out: signed, with an end, for one purpose."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from typing import Any

_SECONDS = 3600.0


class Tokens:
    """Signs and checks. Their end is in real time: clients compare it with their own clock."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def issue(self, purpose: str) -> str:
        head = _encode(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
        claims = {"sub": purpose, "exp": int(time.time() + _SECONDS)}
        body = _encode(json.dumps(claims).encode())
        return f"{head}.{body}.{self._sign(f'{head}.{body}')}"

    def holds(self, token: str, purpose: str) -> bool:
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(signed).encode()):
            return False
        claims: dict[str, Any] = json.loads(_decode(signed.partition(".")[2]))
        return bool(claims["sub"] == purpose and claims["exp"] > time.time())

    def _sign(self, text: str) -> str:
        return _encode(hmac.new(self._key, text.encode(), hashlib.sha256).digest())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
