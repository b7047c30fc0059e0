"""Signatures of version 4, as object stores ask for them: who signed a request, and over what. No I/O."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([A-Za-z0-9]{1,128})/(\d{8})/([a-z0-9-]{1,64})/s3/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]{1,4096}), ?Signature=([0-9a-f]{64})"
)
_MOMENT = re.compile(r"\d{8}T\d{6}Z")
_NEEDED = {"host", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"}
_OFF_BY_SECONDS = 15 * 60


class WrongSignature(Exception):
    """Not signed, or not by who was given the key; `code` is what a store calls it."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Given out for a while: a request shows the key and the token, and is signed with the secret."""

    access_key: str
    secret: str
    session_token: str
    expires_at: float


def check(
    method: str,
    raw_path: str,
    headers: Mapping[str, str],
    known: Callable[[str], Credentials | None],
    *,
    region: str,
    now: float,
) -> str:
    """What the signer says of the body (its SHA-256 or a word). WrongSignature for everything that is not proven."""
    found = _AUTHORIZATION.fullmatch(headers.get("Authorization", ""))
    if found is None:
        raise WrongSignature("AccessDenied")
    access_key, day, signed_region, names, signature = found.groups()
    given = known(access_key)
    if given is None or given.expires_at < now:
        raise WrongSignature("InvalidAccessKeyId" if given is None else "ExpiredToken")
    token = headers.get("x-amz-security-token", "").encode(errors="surrogateescape")
    if not hmac.compare_digest(token, given.session_token.encode()):
        raise WrongSignature("InvalidToken")
    moment = headers.get("x-amz-date", "")
    listed = names.split(";")
    if not _MOMENT.fullmatch(moment) or not moment.startswith(day) or not set(listed) >= _NEEDED:
        raise WrongSignature("AccessDenied")
    try:
        at = datetime.strptime(moment, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise WrongSignature("AccessDenied") from None
    if abs(at - now) > _OFF_BY_SECONDS:
        raise WrongSignature("RequestTimeTooSkewed")
    if signed_region != region:
        raise WrongSignature("AuthorizationHeaderMalformed")
    body = headers.get("x-amz-content-sha256", "")
    path, _, query = raw_path.partition("?")
    lines = [method, path, _canonical(query)]
    lines += [f"{name}:{' '.join(headers.get(name, '').split())}" for name in listed]
    request = "\n".join([*lines, "", names, body])
    scope = f"{day}/{region}/s3/aws4_request"
    key = f"AWS4{given.secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    hashed = hashlib.sha256(request.encode(errors="surrogateescape")).hexdigest()
    wanted = hmac.digest(key, f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashed}".encode(), "sha256").hex()
    if not hmac.compare_digest(wanted, signature):
        raise WrongSignature("SignatureDoesNotMatch")
    return body


def _canonical(query: str) -> str:
    pairs = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
    )
    return "&".join(f"{name}={value}" for name, value in pairs)
