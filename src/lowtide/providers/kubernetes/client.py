"""The way to the API server: plain JSON requests, watches and websockets on one session.

A Pod is easier to read as the JSON that Kubernetes documents than as a generated model of it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from lowtide.providers.kubernetes.access import Access
from lowtide.providers.kubernetes.errors import ApiError, may_not
from lowtide.providers.kubernetes.login import Login
from lowtide.providers.kubernetes.pod import Json

REQUEST_SECONDS = 30.0
# A watch is asked to end by itself and is taken up again, so that a connection that died without a
# word (a laptop that slept, a lost node) is noticed within this time.
WATCH_SECONDS = 60
_SHORT_SECONDS = 1.0
_PAUSE_SECONDS = 2.0
PAGE_SIZE = 500
_TOO_OLD, _UNAUTHORIZED = 410, 401
_ONLY_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"

# Sessions of the process this one was forked from: their sockets are the parent's, so they are
# neither used nor closed here.
_parents: list[Any] = []


class Api:
    """One cluster. Everything is tied to the event loop of the first call."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: aiohttp.ClientSession | None = None
        self._login: Login | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._route: dict[str, Any] = {}

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        merge: bool = False,
        only_metadata: bool = False,
    ) -> Json:
        headers = {"Accept": _ONLY_METADATA} if only_metadata else {}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/merge-patch+json" if merge else "application/json"
        total = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with self._asked(
            method, path, params=params, data=data, headers=headers, timeout=total
        ) as answer:
            content = await _content(answer)
            if not isinstance(content, dict):
                raise ApiError(answer.status, content, what=f"{method} {_short(path)}")
            return content

    async def get(self, path: str) -> Json | None:
        """One object; None when it is not there."""
        try:
            found = await self.request("GET", path)
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        if not isinstance(found.get("metadata"), dict):
            raise ApiError(200, found, what=f"GET {_short(path)}")
        return found

    async def pages(
        self, path: str, *, params: Mapping[str, str], only_metadata: bool = False
    ) -> AsyncIterator[Json]:
        """Every object of a list, page by page."""
        query = {**params, "limit": str(PAGE_SIZE)}
        seen: set[str] = set()
        while True:
            try:
                page = await self.request("GET", path, params=query, only_metadata=only_metadata)
            except ApiError as error:
                if error.status != _TOO_OLD or "continue" not in query:
                    raise
                # The list took longer than the server remembers: begin again, without repeating anything.
                query.pop("continue")
                continue
            for item in page.get("items") or []:
                uid = item["metadata"]["uid"]
                if uid not in seen:
                    seen.add(uid)
                    yield item
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return
            query["continue"] = token

    async def watch(self, path: str, *, name: str, version: str | None) -> AsyncIterator[tuple[str, Json]]:
        """Changes of one object after `version`; from its present state where there is none. Never ends by itself.

        After a gap the object is read again and comes as a change, or as ("DELETED", {}) when it is gone. Where nothing can be
        watched, because the role may not or each watch ends at once, it is read again and again, at most every
        `_PAUSE_SECONDS`.
        """
        pause = _Pause()
        while True:
            if version is None:
                current = await self.get(f"{path}/{name}")
                if current is None:
                    yield "DELETED", {}
                    return
                version = current["metadata"]["resourceVersion"]
                yield "MODIFIED", current
            pause.begin()
            try:
                async for kind, thing in self._watch_once(path, f"metadata.name={name}", version):
                    if kind == "ERROR":
                        version = None
                        break
                    version = str(thing["metadata"]["resourceVersion"])
                    if kind != "BOOKMARK":
                        yield kind, thing
            except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError, KeyError, TypeError):
                version = None  # cut off: read it again, and fail there when the server is away
            except ApiError as error:
                if not may_not(error) and not error.elsewhere:
                    raise
                version = None
            if await pause.after_a_short_one():
                version = None

    async def events(self, namespace: str, name: str) -> AsyncIterator[Json]:
        """What the cluster says about one pod, what it has said first. Never ends by itself."""
        path = f"/api/v1/namespaces/{namespace}/events"
        pause = _Pause()
        while True:
            pause.begin()
            try:
                async for kind, event in self._watch_once(path, f"involvedObject.name={name}", None):
                    if kind in ("ADDED", "MODIFIED"):
                        yield event
            except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
                pass  # cut off: they come again from the first
            await pause.after_a_short_one()

    async def _watch_once(
        self, path: str, selector: str, version: str | None
    ) -> AsyncIterator[tuple[str, Json]]:
        params = {
            "watch": "1",
            "fieldSelector": selector,
            "timeoutSeconds": str(WATCH_SECONDS),
            "allowWatchBookmarks": "true",
        }
        if version is not None:
            params["resourceVersion"] = version
        quiet = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=WATCH_SECONDS + 15)
        try:
            async with self._asked("GET", path, params=params, timeout=quiet) as answer:
                async for line in answer.content:
                    if line.strip():
                        event = json.loads(line)
                        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
                            raise ValueError("not an event of a watch")
                        yield str(event.get("type")), event["object"]
        except ApiError as error:
            if error.status != _TOO_OLD:
                raise
            yield "ERROR", {}

    async def text(self, path: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        """An answer that is no JSON, as it comes. Nobody knows when it goes on."""
        quiet = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS)
        async with self._asked("GET", path, params=params, timeout=quiet) as answer:
            async for data in answer.content.iter_any():
                yield data

    async def websocket(
        self, path: str, *, params: Sequence[tuple[str, str]], protocol: str, heartbeat: float
    ) -> aiohttp.ClientWebSocketResponse:
        session, login = self._begin()
        for last in (False, True):
            used = await login.get()
            try:
                socket: aiohttp.ClientWebSocketResponse = await session.ws_connect(
                    f"{self.access.server}{path}",
                    params=list(params),
                    headers=used.headers,
                    protocols=[protocol],
                    max_msg_size=0,
                    heartbeat=heartbeat,
                    timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
                    ssl=used.tls or True,
                    **self._route,
                )
                return socket
            except aiohttp.WSServerHandshakeError as error:
                if error.status == _UNAUTHORIZED and not last and await login.refused(used):
                    continue
                raise await self._refusal(path, params, error) from error
        raise AssertionError("the second try returns or raises")

    async def _refusal(
        self, path: str, params: Sequence[tuple[str, str]], error: aiohttp.WSServerHandshakeError
    ) -> ApiError:
        """The reason behind a refused upgrade: the handshake error drops the body, a plain request has it."""
        try:
            total = aiohttp.ClientTimeout(total=5)
            async with self._asked("GET", path, params=list(params), timeout=total):
                pass
        except ApiError as said:
            if said.status == error.status:
                return said
        except (aiohttp.ClientError, TimeoutError):
            pass
        return ApiError(error.status, error.message, what=f"GET {_short(path)}")

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is no refusal. One for the credentials is tried again with new ones: nothing was done."""
        session, login = self._begin()
        for last in (False, True):
            used = await login.get()
            async with session.request(
                method,
                f"{self.access.server}{path}",
                headers=[*used.headers, *(headers or {}).items()],
                ssl=used.tls or True,
                **more,
                **self._route,
            ) as answer:
                if answer.status < 400:
                    yield answer
                    return
                content = await _content(answer)
            if answer.status != _UNAUTHORIZED or last or not await login.refused(used):
                raise ApiError(
                    answer.status, content, what=f"{method} {_short(path)}", headers=dict(answer.headers)
                )

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if self._loop is not asyncio.get_running_loop() or self._pid != os.getpid():
            _parents.append(session)
            return
        await session.close()

    def _begin(self) -> tuple[aiohttp.ClientSession, Login]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._pid != os.getpid():
            if self._session is not None:
                _parents.append(self._session)
            self._session, self._loop, self._pid = None, loop, os.getpid()
        if self._session is None or self._login is None:
            self._login = Login(self.access)
            name = self.access.cluster.get("tls-server-name")
            self._route = {"proxy": self.access.proxy(), "server_hostname": str(name) if name else None}
            self._session = aiohttp.ClientSession(
                # Every sandbox in use holds one connection: no cap. No cookies: nobody here has a session.
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"User-Agent": "lowtide"},
            )
        return self._session, self._login


class _Pause:
    """Between watches that end at once: each takes longer, so that a proxy that ends them all meets few requests."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    def begin(self) -> None:
        self._began = asyncio.get_running_loop().time()

    async def after_a_short_one(self) -> bool:
        """Whether the watch that began last was one, after a pause."""
        if asyncio.get_running_loop().time() - self._began > _SHORT_SECONDS:
            self._seconds = 0.0
            return False
        self._seconds = min(_PAUSE_SECONDS, self._seconds * 2 or 0.05)
        await asyncio.sleep(self._seconds)
        return True


async def _content(answer: aiohttp.ClientResponse) -> Any:
    data = await answer.read()
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _short(path: str) -> str:
    return path.split("/namespaces/", 1)[-1]
