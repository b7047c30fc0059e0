"""How the service says no: one error type, and the two envelopes it travels in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from aiohttp import web

from lowtide.emulators.fields import (
    FLAG,
    LIST_OF_OBJECTS,
    LIST_OF_TEXT,
    TEXT,
    TEXTS,
    Kind,
    check_fields,
    whole,
)
from lowtide.emulators.request_check import Malformed, json_object, whole_number

LARGEST = 2**31 - 1
"""The largest whole number of the service's fields."""
_DAEMON_CODES = {
    400: "BAD_REQUEST",
    401: "UNAUTHORIZED",
    403: "FORBIDDEN",
    404: "NOT_FOUND",
    408: "REQUEST_TIMEOUT",
    409: "CONFLICT",
    410: "GONE",
    422: "UNPROCESSABLE_ENTITY",
}


_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "branch",
            "commit_id",
            "contextId",
            "cwd",
            "description",
            "email",
            "id",
            "imageName",
            "language",
            "linkedSandbox",
            "message",
            "mode",
            "name",
            "path",
            "remote",
            "scope",
            "sessionId",
            "snapshot",
            "source",
            "target",
            "unsetValuePrefix",
            "url",
            "user",
            "username",
        ),
        TEXT,
    ),
    **dict.fromkeys(("argv", "entrypoint", "hosts", "unset"), LIST_OF_TEXT),
    **dict.fromkeys(("env", "envs", "labels", "set"), TEXTS),
    **dict.fromkeys(("networkBlockAll", "public", "runAsync", "suppressInputEcho"), FLAG),
    **dict.fromkeys(("networkAllowList", "domainAllowList"), TEXT),
    "depth": whole(1, LARGEST),
    "volumes": LIST_OF_OBJECTS,
}
"""A field of one name is of one type, in whatever call it comes."""


class Refused(Exception):
    """An answer that is not a success. `code` is the daemon's own word for it, where it has one."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def not_found(name: str) -> Refused:
    return Refused(404, f"Sandbox with ID or name {name} not found")


def control_error(
    request: web.Request, status: int, message: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The control plane's envelope."""
    body = {
        "path": request.path,
        "timestamp": rfc3339(datetime.now(UTC).timestamp()),
        "statusCode": status,
        "error": _phrase(status),
        "message": message,
        "source": "DAYTONA_API",
    }
    return web.json_response(body, status=status, headers=headers)


def daemon_envelope(request: web.Request, status: int, message: str, code: str | None) -> dict[str, Any]:
    return {
        "statusCode": status,
        "message": message,
        "code": code or _DAEMON_CODES.get(status, "INTERNAL_SERVER_ERROR"),
        "source": "DAYTONA_DAEMON",
        "timestamp": rfc3339(datetime.now(UTC).timestamp()),
        "path": request.path,
        "method": request.method,
    }


def daemon_error(request: web.Request, status: int, message: str, code: str | None = None) -> web.Response:
    return web.json_response(daemon_envelope(request, status, message, code), status=status)


def proxy_error(request: web.Request, status: int, message: str) -> web.Response:
    """What stands between the caller and the daemon says: who may not come in, and where nobody is."""
    body = {
        "statusCode": status,
        "message": message,
        "source": "DAYTONA_PROXY",
        "timestamp": rfc3339(datetime.now(UTC).timestamp()),
        "path": request.path,
        "method": request.method,
    }
    return web.json_response(body, status=status)


async def body_of(request: web.Request) -> dict[str, Any]:
    try:
        body = await json_object(request)
        check_fields(body, _FIELDS)
        return body
    except Malformed as error:
        raise Refused(error.status, str(error), code="INVALID_REQUEST_BODY") from None


def text_of(body: Mapping[str, Any], name: str) -> str:
    """A string the request must have."""
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"{name} is required", code="INVALID_REQUEST_BODY")
    if "\0" in value:
        raise Refused(400, f"{name} holds a null byte", code="INVALID_REQUEST_BODY")
    return value


def strings_of(given: Any, name: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(v, str) for pair in given.items() for v in pair):
        raise Refused(400, f"{name} must be an object of strings", code="INVALID_REQUEST_BODY")
    return dict(given)


def whole_of(given: Any, name: str, *, lowest: int | None = 0) -> int | None:
    """A whole number, or None where none is given."""
    if given is None:
        return None
    least = -LARGEST if lowest is None else lowest
    if type(given) is not int or not least <= given <= LARGEST:
        raise Refused(400, f"{name} must be a whole number from {least} to {LARGEST}")
    return given


def number_in(text: str, name: str, *, lowest: int = 1, largest: int = LARGEST) -> int:
    """A whole number of an address or a query."""
    value = whole_number(text)
    if value is None or not lowest <= value <= largest:
        raise Refused(400, f"{name} must be a whole number from {lowest} to {largest}")
    return value


def rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def timestamp(text: str, name: str) -> float:
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError:
        raise Refused(400, f"{name} is not a time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


async def stream_log(request: web.Request, lines: list[str], over: Callable[[], bool]) -> web.StreamResponse:
    """The log of a build; followed where that is asked for, until the build is over."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
    await response.prepare(request)
    sent = 0
    while True:
        last = over() or request.query.get("follow") != "true"
        for line in lines[sent:]:
            await response.write(line.encode(errors="replace"))
            sent += 1
        if last:
            break
        await asyncio.sleep(0.05)
    await response.write_eof()
    return response
