"""What every emulator asks of a request before any handler sees it, and the one reader of its JSON.

A request is hostile until it was read. What the head may not hold is refused here for all services; what
a body may not hold is refused where it is parsed, in the shape of the service's own errors.
"""

from __future__ import annotations

import codecs
import ipaddress
import json
import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.helpers import parse_mimetype

DEEPEST_JSON = 64
LARGEST_WHOLE_NUMBER = 2**63 - 1
ENCODINGS = ("", "identity", "gzip", "deflate")

Refusal = Callable[[web.Request, int, str], web.StreamResponse]
"""How a service says no: the request, the status and the reason, in its own envelope."""


class Malformed(ValueError):
    """A request that no service would take. `status` is what it is refused with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def check_head(request: web.Request) -> None:
    """Raise `Malformed` for a head that no handler should have to think about."""
    for name, value in request.raw_headers:
        try:
            (name + value).decode()
        except UnicodeDecodeError:
            raise Malformed("a header is not UTF-8") from None
    if "\0" in request.path or "\0" in request.query_string:
        raise Malformed("the address holds a null byte")
    if request.headers.get("Content-Encoding", "").strip().lower() not in ENCODINGS:
        raise Malformed(f"the content encoding is none of {', '.join(ENCODINGS[1:])}", 415)
    kind = parse_mimetype(request.headers.get("Content-Type", ""))
    charset = kind.parameters.get("charset")
    if charset is not None and not _is_utf8(charset):
        raise Malformed("the charset is not UTF-8", 415)
    if kind.type == "multipart" and not kind.parameters.get("boundary"):
        raise Malformed("multipart without a boundary")


def check_origin(request: web.Request) -> None:
    """Refuse what a web page makes a browser send.

    By a name it controls (Host) or directly (Origin), a page can reach loopback. Neither gets past here,
    whatever else it knows.
    """
    if not _is_local(request.headers.get("Host", "")):
        raise Malformed("Host is not a loopback name", 403)
    origin = request.headers.get("Origin")
    if origin is not None and not _is_local(origin.partition("://")[2]):
        raise Malformed("Origin is not local", 403)


def parse_json(data: bytes) -> Any:
    """A JSON text, as strict as services are: finite, bounded in depth and size of numbers, real characters."""
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed("the body is not JSON") from None
    _check_value(value)
    return value


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body as an object; without a body, an empty one."""
    data = await request.read()
    value = parse_json(data) if data.strip() else {}
    if not isinstance(value, dict):
        raise Malformed("the body is not an object")
    return value


def whole_number(text: str) -> int | None:
    """What ASCII digits say; None for everything else that Python would take for a number."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def query_number(request: web.Request, name: str, otherwise: int, *, lowest: int, largest: int) -> int:
    """A whole number of the query; `Malformed` where it is none, or outside."""
    given = request.query.get(name)
    if given is None:
        return otherwise
    value = whole_number(given)
    if value is None or not lowest <= value <= largest:
        raise Malformed(f"{name} must be a whole number from {lowest} to {largest}")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_value(value: Any) -> None:
    """Without recursion: the depth is what has to be found out."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST_JSON:
            raise Malformed(f"the body is nested deeper than {DEEPEST_JSON}")
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _check_text(one)
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise Malformed("a number is not finite")
            elif isinstance(one, int):
                if abs(one) > LARGEST_WHOLE_NUMBER:
                    raise Malformed("a number is larger than 64 bits hold")
            elif isinstance(one, dict):
                for key in one:
                    _check_text(key)
                below.extend(one.values())
            elif isinstance(one, list):
                below.extend(one)
        level = below


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a pair, which JSON can write and UTF-8 cannot
            raise Malformed("a text holds a lone surrogate") from None


def _is_utf8(charset: str) -> bool:
    try:
        return codecs.lookup(charset).name in ("utf-8", "ascii")
    except LookupError:
        return False


def _is_local(netloc: str) -> bool:
    try:
        parts = urlsplit(f"//{netloc}")
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
