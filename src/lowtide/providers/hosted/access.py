"""Which account of a service, and the way there: from arguments, then the environment."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lowtide import errors

WAY = (
    *("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("https_proxy", "http_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The way to the service. SDKs read these themselves; the guardian's worker needs them to go the same way."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_LONGEST_ID = 200
_SECRET = re.compile("key|token|secret|password")
"""In the name of an option."""


def chosen(
    provider: str,
    known: Mapping[str, str],
    options: Mapping[str, Any] | None,
    environ: Mapping[str, str],
    *,
    sent: bool = True,
) -> dict[str, str | None]:
    """Every known option: as given, else from its environment variable. ValidationError for a wrong one.

    `sent`: they go to the service. Not where they only say where it is: a path on this machine has any character.
    """
    given = dict(options or {})
    for name, value in given.items():
        if name not in known:
            raise errors.ValidationError(
                f"unknown option {name!r} for {provider}; known: {', '.join(sorted(known))}",
                argument=name,
                provider=provider,
            )
        if value is not None and not (isinstance(value, str) and value):
            raise errors.ValidationError(f"{name} must be a string", argument=name, provider=provider)
    found = {name: given.get(name) or environ.get(variable) or None for name, variable in known.items()}
    for name, value in found.items():
        if _SECRET.search(name):
            errors.keep_secret(value)
        # Refused here, because what cannot be sent is quoted by those who are to send it: keys, too.
        if sent and value is not None and not (value.isascii() and value.isprintable()):
            where = name if given.get(name) else known[name]
            raise errors.ValidationError(
                f"{where} has a character that cannot be sent (a line end, perhaps, from the file it was read from): "
                "set it without",
                argument=name,
                provider=provider,
            )
    return found


def chosen_with_key(
    provider: str,
    service: str,
    module: str,
    known: Mapping[str, str],
    options: Mapping[str, Any] | None,
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """As `chosen`, where all that a service needs is its ``api_key`` and its SDK, which is `module`."""
    found = chosen(provider, known, options, environ)
    if not found["api_key"]:
        raise needs_key(service, provider, known["api_key"])
    needs_sdk(provider, service, module)
    return found


def url_of(text: str, variable: str, provider: str, *, host_alone: bool = False) -> str:
    """An address of a service, without its last slash. ValidationError where it is none; not quoted: it may have a password."""
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        more = parts.path or parts.query or parts.fragment or parts.username or parts.password
    except ValueError:  # a port that is none, a bracket that is not closed
        fine, more = False, ""
    if not fine or " " in text or (host_alone and more):
        words = f"{variable} is https://HOST or http://HOST:PORT"
        if host_alone:
            words += ", without a name, a path or anything else"
        raise errors.ValidationError(words, argument="base_url", provider=provider)
    return url


def account(provider: str, where: str, who: str) -> str:
    """A stable name for an account. A key is long and random, so nothing follows from a short digest of it."""
    return hashlib.sha256(f"lowtide {provider}|{where}|{who}".encode()).hexdigest()[:16]


def needs_key(service: str, provider: str, *variables: str) -> errors.AuthenticationError:
    return errors.AuthenticationError(
        f"{service} needs {' and '.join(variables)}: set them, or use the emulator (lowtide emulate {provider})",
        provider=provider,
    )


def needs_sdk(provider: str, service: str, module: str) -> None:
    """Raises MissingDependencyError. Nothing is imported."""
    if importlib.util.find_spec(module) is None:
        raise missing_dependency(provider, f"{service}'s SDK")


def missing_dependency(provider: str, sdk: str) -> errors.MissingDependencyError:
    install = f'pip install "lowtide[{provider}]"'
    return errors.MissingDependencyError(
        f"provider {provider!r} needs {sdk}; run: {install}", install=install, provider=provider
    )


def way_of(environ: Mapping[str, str], *more: str) -> dict[str, str]:
    """The variables of the way there, for `Provider.credentials`.

    What is not set here is said as empty: elsewhere it may be, and would lead to another account.
    """
    for name in WAY:
        with contextlib.suppress(ValueError):
            errors.keep_secret(urlsplit(environ.get(name) or "").password)
    return {name: environ.get(name) or "" for name in (*WAY, *more)}


def credentials_of(access: Any, known: Mapping[str, str]) -> dict[str, str]:
    """What `chosen` would choose the same from, elsewhere: every known option, empty where it is not set, and the way."""
    values = {variable: getattr(access, name) or "" for name, variable in known.items() if variable}
    return {**values, **access.way}


def inside_key(secret: str, lease_id: str) -> bytes:
    """Of the program inside, where it has to follow from the account: whoever has its key can come in."""
    return hmac.digest(secret.encode(), f"lowtide inside {lease_id}".encode(), hashlib.sha256)[:16]


def is_word(sandbox_id: str) -> bool:
    """Ids and names are plain words. Anything else must not become part of a path."""
    return _WORD.fullmatch(sandbox_id) is not None


def is_id(sandbox_id: object) -> bool:
    """Whether an answer's id can be one: a plain word of a bounded length. It becomes part of paths and host names."""
    return isinstance(sandbox_id, str) and len(sandbox_id) <= _LONGEST_ID and is_word(sandbox_id)
