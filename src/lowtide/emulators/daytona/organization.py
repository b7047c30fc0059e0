"""The calls about the account: where it can run, what it may use, and the small things SDKs ask on the way."""

from __future__ import annotations

import secrets
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, body_of, rfc3339, text_of, whole_of

if TYPE_CHECKING:
    from lowtide.emulators.daytona.sandboxes import Sandboxes
    from lowtide.emulators.ground import Ground


class Organization:
    def __init__(self, ground: Ground, organization_id: str, sandboxes: Sandboxes) -> None:
        self.ground = ground
        self.organization_id = organization_id
        self.sandboxes = sandboxes
        self._secrets: dict[str, dict[str, Any]] = {}
        self._pools: dict[str, dict[str, Any]] = {}

    def add_routes(self, app: web.Application, prefix: str) -> None:
        add = app.router.add_route
        add("GET", f"{prefix}/health", self.health)
        add("GET", f"{prefix}/config", self.config)
        add("GET", f"{prefix}/regions", self.regions)
        add("GET", f"{prefix}/shared-regions", self.regions)
        add("GET", f"{prefix}/secret", self.list_secrets)
        add("POST", f"{prefix}/secret", self.create_secret)
        add("GET", f"{prefix}/secret/paginated", self.list_secrets_by_page)
        add("GET", f"{prefix}/secret/{{id}}", self.get_secret)
        add("PATCH", f"{prefix}/secret/{{id}}", self.update_secret)
        add("DELETE", f"{prefix}/secret/{{id}}", self.delete_secret)
        add("GET", f"{prefix}/warm-pools", self.list_pools)
        add("POST", f"{prefix}/warm-pools", self.create_pool)
        add("PATCH", f"{prefix}/warm-pools/{{id}}", self.update_pool)
        add("DELETE", f"{prefix}/warm-pools/{{id}}", self.delete_pool)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def config(self, request: web.Request) -> web.Response:
        origin = str(request.url.origin())
        return web.json_response(
            {
                "version": "0.0.0-lowtide",
                "oidc": dict.fromkeys(("clientId", "audience", "provider"), "lowtide") | {"issuer": origin},
                "linkedAccountsEnabled": False,
                "announcements": {},
                "proxyTemplateUrl": origin,
                "proxyToolboxUrl": f"{origin}/toolbox",
                "defaultSnapshot": "daytonaio/sandbox:0.8.0",
                "dashboardUrl": origin,
                "maxAutoArchiveInterval": 43200,
                "maintananceMode": False,
                "environment": "emulator",
            }
        )

    async def regions(self, request: web.Request) -> web.Response:
        moment = rfc3339(self.ground.clock.now())
        return web.json_response(
            [
                {"id": name, "name": name, "regionType": "shared", "createdAt": moment, "updatedAt": moment}
                for name in ("us", "eu")
            ]
        )

    # ------------------------------------------------------------ secrets: names and placeholders only

    async def list_secrets(self, request: web.Request) -> web.Response:
        return web.json_response(list(self._secrets.values()))

    async def list_secrets_by_page(self, request: web.Request) -> web.Response:
        items = list(self._secrets.values())
        return web.json_response({"items": items, "total": len(items), "nextCursor": None})

    async def create_secret(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        name = text_of(body, "name")
        text_of(body, "value")  # asked for, and not kept: nothing leaves these sandboxes
        if any(one["name"] == name for one in self._secrets.values()):
            raise Refused(409, f"Secret with name {name} already exists")
        moment = rfc3339(self.ground.clock.now())
        made: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "name": name,
            "description": str(body.get("description") or ""),
            "placeholder": f"dtn_secret_{secrets.token_hex(8)}",
            "hosts": body.get("hosts") or [],
            "createdAt": moment,
            "updatedAt": moment,
        }
        self._secrets[made["id"]] = made
        return web.json_response(made, status=201)

    def _secret(self, request: web.Request) -> dict[str, Any]:
        found = self._secrets.get(request.match_info["id"])
        if found is None:
            raise Refused(404, f"Secret with ID {request.match_info['id']} not found")
        return found

    async def get_secret(self, request: web.Request) -> web.Response:
        return web.json_response(self._secret(request))

    async def update_secret(self, request: web.Request) -> web.Response:
        secret, body = self._secret(request), await body_of(request)
        secret |= {key: body[key] for key in ("description", "hosts") if body.get(key) is not None}
        secret["updatedAt"] = rfc3339(self.ground.clock.now())
        return web.json_response(secret)

    async def delete_secret(self, request: web.Request) -> web.Response:
        del self._secrets[self._secret(request)["id"]]
        return web.Response(status=204)

    # ------------------------------------------------------------ warm pools: kept, and never filled

    async def list_pools(self, request: web.Request) -> web.Response:
        return web.json_response(list(self._pools.values()))

    async def create_pool(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        moment = rfc3339(self.ground.clock.now())
        made: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "organizationId": self.organization_id,
            "snapshot": text_of(body, "snapshot"),
            "target": str(body.get("target") or "us"),
            "pool": whole_of(body.get("pool"), "pool") or 0,
            "currentSize": 0,
            "cpu": 1,
            "mem": 1,
            "disk": 3,
            "osUser": "daytona",
            "env": {},
            "errorReason": None,
            "createdAt": moment,
            "updatedAt": moment,
        }
        self._pools[made["id"]] = made
        return web.json_response(made, status=201)

    def _pool(self, request: web.Request) -> dict[str, Any]:
        found = self._pools.get(request.match_info["id"])
        if found is None:
            raise Refused(404, f"Warm pool with ID {request.match_info['id']} not found")
        return found

    async def update_pool(self, request: web.Request) -> web.Response:
        pool, body = self._pool(request), await body_of(request)
        wanted = whole_of(body.get("pool"), "pool")
        if wanted is not None:
            pool |= {"pool": wanted, "updatedAt": rfc3339(self.ground.clock.now())}
        return web.json_response(pool)

    async def delete_pool(self, request: web.Request) -> web.Response:
        del self._pools[self._pool(request)["id"]]
        return web.Response(status=204)
