"""The Connect protocol with its JSON codec, server side: unary calls, streams, and their errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from lowtide.emulators.request_check import Malformed, parse_json, whole_number

_HEAD = struct.Struct(">BI")
_LARGEST_MESSAGE = 64 << 20
_END = 2
_STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}


class RpcError(Exception):
    """Ends a call with a Connect error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "message": str(self)}


def is_stream(request: web.Request) -> bool:
    return request.content_type == "application/connect+json"


def unary_answer(message: dict[str, Any]) -> web.Response:
    return web.Response(body=json.dumps(message).encode(), content_type="application/json")


def unary_error(error: RpcError) -> web.Response:
    body = json.dumps(error.as_dict()).encode()
    return web.Response(status=_STATUS.get(error.code, 500), body=body, content_type="application/json")


async def unary_message(request: web.Request) -> dict[str, Any]:
    return _parse(await request.read())


async def messages(request: web.Request) -> AsyncIterator[dict[str, Any]]:
    """The messages of a client's stream, as they come."""
    while True:
        try:
            head = await request.content.readexactly(_HEAD.size)
            flags, size = _HEAD.unpack(head)
            if size > _LARGEST_MESSAGE:
                raise RpcError("resource_exhausted", "message too large")
            body = await request.content.readexactly(size)
        except asyncio.IncompleteReadError:
            return
        if flags & _END:
            return
        yield _parse(body)


async def first_message(request: web.Request) -> dict[str, Any]:
    async for message in messages(request):
        return message
    raise RpcError("invalid_argument", "missing message")


def timeout_seconds(request: web.Request) -> float | None:
    """What the client allows the call to take; None: no limit."""
    given = request.headers.get("Connect-Timeout-Ms", "")
    if not given:
        return None
    number = whole_number(given)
    if number is None or number < 0:
        raise RpcError("invalid_argument", "Connect-Timeout-Ms is not a number")
    return number / 1000 or None


def keepalive_seconds(request: web.Request) -> float:
    given = whole_number(request.headers.get("Keepalive-Ping-Interval", "")) or 0
    return min(float(given), 3600.0) if given > 0 else 90.0


class Stream:
    """A server's stream: messages, then one end frame with or without an error.

    Opened only after the client's message was read: over HTTP/1.1 some clients stop sending theirs as
    soon as an answer begins.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})

    async def open(self) -> None:
        await self._response.prepare(self._request)

    async def send(self, *messages: dict[str, Any]) -> None:
        bodies = [json.dumps(message).encode() for message in messages]
        if bodies:
            await self._response.write(b"".join(_HEAD.pack(0, len(body)) + body for body in bodies))

    async def end(self, error: RpcError | None = None) -> web.StreamResponse:
        body = json.dumps({"error": error.as_dict()} if error else {}).encode()
        await self._response.write(_HEAD.pack(_END, len(body)) + body)
        await self._response.write_eof()
        return self._response


def user_of(request: web.Request) -> str | None:
    """The user of the Basic header (the password does not matter), or None for the default."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value).decode().partition(":")[0] or None
    except (binascii.Error, ValueError):
        raise RpcError("unauthenticated", "invalid authorization header") from None


def decoded(value: Any) -> bytes:
    try:
        return base64.b64decode(value or "")
    except (binascii.Error, ValueError, TypeError):
        raise RpcError("invalid_argument", "not base64") from None


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = parse_json(body or b"{}")
    except Malformed as error:
        raise RpcError("invalid_argument", str(error)) from None
    if not isinstance(message, dict):
        raise RpcError("invalid_argument", "not an object")
    return message
