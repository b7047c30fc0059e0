"""The admin endpoint: move the clock, arm faults, see what exists. Its own token, never a provider's key.

``GET /_lowtide/state``, ``POST /_lowtide/clock {"advance_seconds": n}``,
``GET|POST|DELETE /_lowtide/faults``, ``DELETE /_lowtide/faults/ID``, ``GET|DELETE /_lowtide/calls``;
header ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from aiohttp import web

from lowtide.emulators.faults import Fault
from lowtide.emulators.request_check import json_object, whole_number
from lowtide.errors import ValidationError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground
    from lowtide.emulators.web import Handler


FARTHEST_SECONDS = 100 * 365 * 86_400.0
"""How far one move of the clock may go: a century, so that every time stays one that can be written down."""


def refused(request: web.Request, status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


def admin_app(ground: Ground) -> web.Application:
    @web.middleware
    async def with_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), ground.admin_token.encode()):
            return web.json_response({"message": "the admin token is missing or wrong"}, status=401)
        try:
            return await handler(request)
        except ValidationError as error:
            return refused(request, 400, str(error))

    async def state(request: web.Request) -> web.Response:
        return web.json_response(
            {
                "now": ground.clock.now(),
                "backing": ground.backing.count,
                "limit": ground.backing.limit,
                "sandboxes": {name: emulator.sandboxes() for name, emulator in ground.emulators.items()},
            }
        )

    async def clock(request: web.Request) -> web.Response:
        seconds = (await json_object(request)).get("advance_seconds")
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 <= seconds <= FARTHEST_SECONDS
        ):
            raise ValidationError(
                f"advance_seconds is a number from 0 to {FARTHEST_SECONDS:g}: the clock only moves forward",
                argument="advance_seconds",
            )
        if seconds > ground.clock.room_seconds():
            raise ValidationError(
                "the clock goes to the year 5000 and no further", argument="advance_seconds"
            )
        return web.json_response({"now": await ground.clock.advance(seconds)})

    async def add_fault(request: web.Request) -> web.Response:
        fault = ground.faults.add(Fault.from_dict(await json_object(request)))
        return web.json_response(fault.as_dict(), status=201)

    async def list_faults(request: web.Request) -> web.Response:
        return web.json_response([fault.as_dict() for fault in ground.faults.armed()])

    async def clear_faults(request: web.Request) -> web.Response:
        ground.faults.clear()
        return web.Response(status=204)

    async def remove_fault(request: web.Request) -> web.Response:
        number = whole_number(request.match_info["id"])
        return web.Response(status=204 if number is not None and ground.faults.remove(number) else 404)

    async def calls(request: web.Request) -> web.Response:
        return web.json_response(ground.requests.calls)

    async def clear_calls(request: web.Request) -> web.Response:
        ground.requests.calls.clear()
        return web.Response(status=204)

    app = web.Application(middlewares=[with_token])
    app.router.add_get("/_lowtide/state", state)
    app.router.add_post("/_lowtide/clock", clock)
    app.router.add_get("/_lowtide/faults", list_faults)
    app.router.add_post("/_lowtide/faults", add_fault)
    app.router.add_delete("/_lowtide/faults", clear_faults)
    app.router.add_delete("/_lowtide/faults/{id}", remove_fault)
    app.router.add_get("/_lowtide/calls", calls)
    app.router.add_delete("/_lowtide/calls", clear_calls)
    return app
