"""What belongs to the account and not to a devbox: secrets, network policies, objects. Kept and reported."""

from __future__ import annotations

import hmac
import secrets
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.backing import allowed
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
from lowtide.emulators.request_check import json_object
from lowtide.emulators.runloop.listing import page
from lowtide.emulators.runloop.model import Refused, milliseconds, new_id

if TYPE_CHECKING:
    from lowtide.emulators.runloop import RunloopEmulator

_KINDS = ("unspecified", "text", "binary", "gzip", "tar", "tgz")
_LARGEST_OBJECT = 1 << 30
_RULES: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "allow_agent_gateway",
            "allow_all",
            "allow_devbox_to_devbox",
            "allow_mcp_gateway",
            "allow_runloop_mirrors",
        ),
        FLAG,
    ),
    "allowed_hostnames": LIST_OF_TEXT,
    "allowed_cidrs": LIST_OF_OBJECTS,
}


class Account:
    def __init__(self, emulator: RunloopEmulator) -> None:
        self.emulator = emulator
        self.ground = emulator.ground
        self._secrets: dict[str, dict[str, Any]] = {}
        self._values: dict[str, str] = {}
        self._policies: dict[str, dict[str, Any]] = {}
        self._objects: dict[str, dict[str, Any]] = {}
        self._contents: dict[str, Any] = {}
        self._tokens: dict[str, str] = {}

    def add_routes(self, app: web.Application) -> None:
        add = app.router.add_route
        add("POST", "/v1/secrets", self.create_secret)
        add("GET", "/v1/secrets", self.list_secrets)
        for path in ("/v1/secrets/{name}", "/v1/secrets/id/{id}"):
            add("GET", path, self.get_secret)
            add("POST", f"{path}/delete", self.delete_secret)
        add("POST", "/v1/secrets/{name}", self.update_secret)
        add("POST", "/v1/secrets/id/{id}/update", self.update_secret)
        add("POST", "/v1/network-policies", self.create_policy)
        add("GET", "/v1/network-policies", self.list_policies)
        add("GET", "/v1/network-policies/{id}", self.get_policy)
        add("POST", "/v1/network-policies/{id}", self.update_policy)
        add("POST", "/v1/network-policies/{id}/delete", self.delete_policy)
        add("POST", "/v1/objects", self.create_object)
        add("GET", "/v1/objects", self.list_objects)
        add("GET", "/v1/objects/list_public", self.list_public_objects)
        add("GET", "/v1/objects/{id}", self.get_object)
        add("POST", "/v1/objects/{id}/complete", self.complete_object)
        add("GET", "/v1/objects/{id}/download", self.download_object)
        add("POST", "/v1/objects/{id}/delete", self.delete_object)
        add("PUT", "/storage/{id}", self.put_content)
        add("GET", "/storage/{id}", self.get_content)

    def _now(self) -> int:
        return milliseconds(self.ground.clock.now())

    # ------------------------------------------------------------ secrets

    async def create_secret(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"name": TEXT, "value": TEXT}, required=("name", "value"))
        if asked["name"] in self._secrets:
            raise Refused(400, f"secret {asked['name']} already exists")
        now = self._now()
        made = {"id": new_id("sec"), "name": asked["name"], "create_time_ms": now, "update_time_ms": now}
        self._secrets[asked["name"]], self._values[asked["name"]] = made, asked["value"]
        return web.json_response(made)

    def _secret(self, request: web.Request) -> dict[str, Any]:
        wanted = request.match_info
        for secret in self._secrets.values():
            if secret["name"] == wanted.get("name") or secret["id"] == wanted.get("id"):
                return secret
        raise Refused(404, "secret not found")

    async def get_secret(self, request: web.Request) -> web.Response:
        return web.json_response(self._secret(request))

    async def list_secrets(self, request: web.Request) -> web.Response:
        return _listed(request, "secrets", self._secrets.values())

    async def update_secret(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"value": TEXT}, required=("value",))
        secret = self._secret(request)
        self._values[secret["name"]] = asked["value"]
        secret["update_time_ms"] = self._now()
        return web.json_response(secret)

    async def delete_secret(self, request: web.Request) -> web.Response:
        secret = self._secret(request)
        del self._secrets[secret["name"]], self._values[secret["name"]]
        return web.json_response(secret)

    def secret_value(self, name: str) -> str:
        try:
            return self._values[name]
        except KeyError:
            raise Refused(400, f"secret {name} not found") from None

    def known_secrets(self, wanted: dict[str, str]) -> dict[str, str]:
        """The values behind the names that there are."""
        return {name: self._values[secret] for name, secret in wanted.items() if secret in self._values}

    # ------------------------------------------------------------ network policies

    async def create_policy(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"name": TEXT, "description": TEXT, **_RULES}, required=("name",))
        now = self._now()
        made = {
            "id": new_id("np"),
            "name": asked["name"],
            "description": asked.get("description"),
            "create_time_ms": now,
            "update_time_ms": now,
            "egress": _egress(asked, {}),
        }
        self._policies[made["id"]] = made
        return web.json_response(made)

    def _policy(self, request: web.Request) -> dict[str, Any]:
        found = self._policies.get(request.match_info["id"])
        if found is None:
            raise Refused(404, "network policy not found")
        return found

    def ways_out(self, policy_id: str | None) -> tuple[str, ...] | None:
        """The allow-list of a policy; None where none is asked for, or it allows all. Refused for one that is not there."""
        if not policy_id:
            return None
        policy = self._policies.get(policy_id)
        if policy is None:
            raise Refused(400, f"network policy {policy_id} not found")
        if policy["egress"]["allow_all"]:
            return None
        entries = list(policy["egress"]["allowed_hostnames"])
        for one in policy["egress"]["allowed_cidrs"]:
            ports = one.get("ports") if isinstance(one.get("ports"), list) else None
            for port in ports or [None]:
                number = port.get("port") if isinstance(port, dict) else None
                entries.append(f"{one.get('cidr')}" + (f":{number}" if number is not None else ""))
        return allowed(entries)

    async def get_policy(self, request: web.Request) -> web.Response:
        return web.json_response(self._policy(request))

    async def list_policies(self, request: web.Request) -> web.Response:
        name = request.query.get("name")
        return _listed(
            request, "network_policies", self._policies.values(), lambda one: name in (None, one["name"])
        )

    async def update_policy(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        check_fields(asked, {"name": TEXT, "description": TEXT, **_RULES})
        policy = self._policy(request)
        policy |= {key: asked[key] for key in ("name", "description") if asked.get(key) is not None}
        policy |= {"egress": _egress(asked, policy["egress"]), "update_time_ms": self._now()}
        return web.json_response(policy)

    async def delete_policy(self, request: web.Request) -> web.Response:
        return web.json_response(self._policies.pop(self._policy(request)["id"]))

    # ------------------------------------------------------------ objects

    async def create_object(self, request: web.Request) -> web.Response:
        asked = await json_object(request)
        kinds = {"name": TEXT, "content_type": TEXT, "metadata": TEXTS, "ttl_ms": whole(1, 2**53)}
        check_fields(asked, kinds, required=("name", "content_type"))
        if asked["content_type"] not in _KINDS:
            raise Refused(400, f"content_type must be one of {', '.join(_KINDS)}")
        object_id = new_id("obj")
        made = {
            "id": object_id,
            "name": asked["name"],
            "content_type": asked["content_type"],
            "create_time_ms": self._now(),
            "state": "UPLOADING",
            "metadata": dict(asked.get("metadata") or {}),
        }
        if asked.get("ttl_ms") is not None:
            made["delete_after_time_ms"] = self._now() + asked["ttl_ms"]
        self._objects[object_id] = made
        return web.json_response({**made, "upload_url": self._signed(object_id)})

    def _signed(self, object_id: str) -> str:
        token = self._tokens.setdefault(object_id, secrets.token_hex(24))
        return f"{self.emulator.url}/storage/{object_id}?token={token}"

    def _object(self, request: web.Request) -> dict[str, Any]:
        found = self._objects.get(request.match_info["id"])
        if found is None or self._is_over(found):
            raise Refused(404, "object not found")
        return found

    def _is_over(self, one: dict[str, Any]) -> bool:
        return "delete_after_time_ms" in one and one["delete_after_time_ms"] <= self._now()

    async def get_object(self, request: web.Request) -> web.Response:
        return web.json_response(self._object(request))

    async def list_objects(self, request: web.Request) -> web.Response:
        query = request.query

        def fits(one: dict[str, Any]) -> bool:
            return (
                one["state"] != "DELETED"
                and not self._is_over(one)
                and all(query.get(key) in (None, one[key]) for key in ("name", "content_type", "state"))
                and query.get("search", "") in one["name"] + one["id"]
            )

        return _listed(request, "objects", self._objects.values(), fits)

    async def list_public_objects(self, request: web.Request) -> web.Response:
        return _listed(request, "objects", ())

    async def complete_object(self, request: web.Request) -> web.Response:
        found = self._object(request)
        if found["id"] not in self._contents:
            raise Refused(400, "nothing was uploaded")
        found["state"] = "READ_ONLY"
        return web.json_response(found)

    async def download_object(self, request: web.Request) -> web.Response:
        found = self._object(request)
        if found["state"] != "READ_ONLY":
            raise Refused(400, f"the object is {found['state']}")
        return web.json_response({"download_url": self._signed(found["id"])})

    async def delete_object(self, request: web.Request) -> web.Response:
        found = self._object(request)
        found["state"] = "DELETED"
        if content := self._contents.pop(found["id"], None):
            content.close()
        return web.json_response(found)

    def object_content(self, object_id: str) -> bytes:
        """What a devbox that mounts it finds."""
        if self._objects.get(object_id, {}).get("state") != "READ_ONLY":
            raise Refused(400, f"object {object_id} is not there, or not complete")
        file = self._contents[object_id]
        file.seek(0)
        content: bytes = file.read()
        return content

    # ------------------------------------------------------------ contents, by a signed address

    def _may(self, request: web.Request) -> dict[str, Any]:
        token = self._tokens.get(request.match_info["id"], "")
        given = request.query.get("token", "")
        if not token or not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
            raise Refused(403, "the address is not signed")
        return self._object(request)

    async def put_content(self, request: web.Request) -> web.Response:
        found = self._may(request)
        if found["state"] != "UPLOADING":
            raise Refused(400, f"the object is {found['state']}")
        file = tempfile.TemporaryFile(dir=self.ground.state.directory)  # noqa: SIM115 - lives with the object
        size = 0
        async for piece in request.content.iter_chunked(1 << 20):
            size += len(piece)
            if size > _LARGEST_OBJECT:
                file.close()
                raise Refused(413, "an object holds at most a gibibyte")
            file.write(piece)
        self._contents[found["id"]] = file
        found["size_bytes"] = size
        return web.Response()

    async def get_content(self, request: web.Request) -> web.StreamResponse:
        found = self._may(request)
        file = self._contents.get(found["id"])
        if file is None:
            raise Refused(404, "nothing was uploaded")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        at = 0
        while file.seek(at) is not None and (piece := file.read(1 << 20)):
            at += len(piece)
            await response.write(piece)
        await response.write_eof()
        return response

    def close(self) -> None:
        for content in self._contents.values():
            content.close()


def _egress(asked: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    lists = ("allowed_hostnames", "allowed_cidrs")
    return {
        key: asked[key] if asked.get(key) is not None else before.get(key, [] if key in lists else False)
        for key in _RULES
    }


def _listed(
    request: web.Request,
    name: str,
    found: Iterable[dict[str, Any]],
    fits: Callable[[dict[str, Any]], bool] = lambda one: True,
) -> web.Response:
    chosen = [one for one in reversed(list(found)) if fits(one)]
    shown, more = page(request, [(one["id"], one) for one in chosen])
    return web.json_response({name: shown, "has_more": more, "total_count": len(chosen)})
