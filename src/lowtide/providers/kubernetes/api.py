"""The way to the API server: plain JSON requests, watches and websockets on one session.

`kubernetes_asyncio` finds and refreshes the credentials and makes the TLS session; its generated
models are left alone, because a Pod is easier to read as the JSON that Kubernetes documents.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from lowtide.engine import children_take_signals
from lowtide.errors import AuthenticationError
from lowtide.providers.kubernetes.access import Access, missing_dependency
from lowtide.providers.kubernetes.failures import ApiError

Json = dict[str, Any]

REQUEST_SECONDS = 30.0
# A watch is asked to end by itself and is taken up again, so that a connection that died without a
# word (a laptop that slept, a lost node) is noticed within this time.
WATCH_SECONDS = 60
PAGE_SIZE = 500
_TOO_OLD = 410

# Sessions of the process this one was forked from: their sockets are the parent's, so they are
# neither used nor closed here.
_parents: list[Any] = []


class Api:
    """One cluster. Everything is tied to the event loop of the first call."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._opening: asyncio.Lock | None = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Json | None = None,
        merge: bool = False,
    ) -> Json:
        session, client = await self._session()
        headers = await self._headers(client)
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/merge-patch+json" if merge else "application/json"
        async with session.request(
            method,
            self._url(client, path),
            params=params,
            data=data,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            **self._route(client),
        ) as answer:
            content = await _content(answer)
            if answer.status >= 400:
                raise _api_error(answer.status, content, answer.headers, f"{method} {_short(path)}")
            return content if isinstance(content, dict) else {}

    async def pages(self, path: str, *, params: Mapping[str, str]) -> AsyncIterator[Json]:
        """Every object of a list, page by page."""
        query = {**params, "limit": str(PAGE_SIZE)}
        seen: set[str] = set()
        while True:
            try:
                page = await self.request("GET", path, params=query)
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

        After a gap the object is read again and comes as a change, or as ("DELETED", {}) when it is gone.
        """
        while True:
            if version is None:
                try:
                    current = await self.request("GET", f"{path}/{name}")
                except ApiError as error:
                    if error.status != 404:
                        raise
                    yield "DELETED", {}
                    return
                version = current["metadata"]["resourceVersion"]
                yield "MODIFIED", current
            try:
                async for kind, thing in self._watch_once(path, f"metadata.name={name}", version):
                    if kind == "ERROR":
                        version = None
                        break
                    version = thing["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield kind, thing
            except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
                version = None  # cut off: read it again, and fail there when the server is away

    async def events(self, namespace: str, name: str) -> AsyncIterator[Json]:
        """What the cluster says about one pod, what it has said first. Never ends by itself."""
        path = f"/api/v1/namespaces/{namespace}/events"
        while True:
            async for kind, event in self._watch_once(path, f"involvedObject.name={name}", None):
                if kind in ("ADDED", "MODIFIED"):
                    yield event

    async def _watch_once(
        self, path: str, selector: str, version: str | None
    ) -> AsyncIterator[tuple[str, Json]]:
        session, client = await self._session()
        params = {
            "watch": "1",
            "fieldSelector": selector,
            "timeoutSeconds": str(WATCH_SECONDS),
            "allowWatchBookmarks": "true",
        }
        if version is not None:
            params["resourceVersion"] = version
        async with session.get(
            self._url(client, path),
            params=params,
            headers=await self._headers(client),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=REQUEST_SECONDS, sock_read=WATCH_SECONDS + 15
            ),
            **self._route(client),
        ) as answer:
            if answer.status == _TOO_OLD:
                yield "ERROR", {}
                return
            if answer.status >= 400:
                raise _api_error(
                    answer.status, await _content(answer), answer.headers, f"watch {_short(path)}"
                )
            async for line in answer.content:
                if line.strip():
                    event = json.loads(line)
                    yield str(event["type"]), event["object"]

    async def websocket(
        self, path: str, *, params: Sequence[tuple[str, str]], protocols: Sequence[str]
    ) -> aiohttp.ClientWebSocketResponse:
        session, client = await self._session()
        try:
            socket: aiohttp.ClientWebSocketResponse = await session.ws_connect(
                self._url(client, path),
                params=list(params),
                headers=await self._headers(client),
                protocols=protocols,
                max_msg_size=0,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
                **self._route(client),
            )
        except aiohttp.WSServerHandshakeError as error:
            raise await self._refusal(path, params, error) from error
        return socket

    async def _refusal(
        self, path: str, params: Sequence[tuple[str, str]], error: aiohttp.WSServerHandshakeError
    ) -> ApiError:
        """The reason behind a refused upgrade: the handshake error drops the body, a plain request has it."""
        session, client = await self._session()
        try:
            async with session.get(
                self._url(client, path),
                params=list(params),
                headers=await self._headers(client),
                timeout=aiohttp.ClientTimeout(total=5),
                **self._route(client),
            ) as answer:
                if answer.status == error.status:
                    return _api_error(
                        answer.status, await _content(answer), answer.headers, f"open {_short(path)}"
                    )
        except (aiohttp.ClientError, TimeoutError):
            pass
        return ApiError(error.status, error.message, what=f"open {_short(path)}")

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._pid != os.getpid() or self._loop is not asyncio.get_running_loop():
            _parents.append(client)
            return
        await client.close()

    async def _session(self) -> tuple[aiohttp.ClientSession, Any]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._pid != os.getpid():
            if self._client is not None:
                _parents.append(self._client)
            self._client, self._loop, self._pid, self._opening = None, loop, os.getpid(), asyncio.Lock()
        if self._client is None:
            assert self._opening is not None
            async with self._opening:
                if self._client is None:
                    self._client = await self._open()
        client = self._client
        return client.rest_client.pool_manager, client

    async def _open(self) -> Any:
        # Half a second of imports: not on the loop that serves everybody else.
        await asyncio.to_thread(_import_client)
        from kubernetes_asyncio import client, config

        settings = client.Configuration()
        settings.connection_pool_maxsize = 0  # every running command holds one connection
        keys = tempfile.mkdtemp(prefix="lowtide-kube-")
        try:
            if self.access.kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            else:
                with children_take_signals():  # it may run a program of the user's for a token
                    await config.load_kube_config(
                        config_file=self.access.kubeconfig,
                        context=self.access.context,
                        client_configuration=settings,
                        temp_file_path=keys,
                    )
            return client.ApiClient(configuration=settings)
        except (config.ConfigException, AssertionError, OSError, ValueError) as error:
            raise AuthenticationError(
                f"the Kubernetes credentials could not be loaded: {error}", provider="kubernetes"
            ) from error
        finally:
            _forget_key_files(keys)

    async def _headers(self, client: Any) -> dict[str, str]:
        headers: dict[str, str] = {"User-Agent": "lowtide"}  # no Accept: streams are not JSON
        await client.update_params_for_auth(headers, [], ["BearerToken"])
        return headers

    def _route(self, client: Any) -> dict[str, Any]:
        route: dict[str, Any] = {}
        if client.rest_client.proxy:
            route["proxy"] = client.rest_client.proxy
        if client.rest_client.proxy_headers:
            route["proxy_headers"] = client.rest_client.proxy_headers
        if client.rest_client.server_hostname:
            route["server_hostname"] = client.rest_client.server_hostname
        return route

    def _url(self, client: Any, path: str) -> str:
        return f"{str(client.configuration.host).rstrip('/')}{path}"


def _import_client() -> None:
    try:
        importlib.import_module("kubernetes_asyncio.client")
        importlib.import_module("kubernetes_asyncio.config")
    except ImportError as error:
        raise missing_dependency() from error


def _forget_key_files(directory: str) -> None:
    """The library writes client keys to files for OpenSSL; once loaded they must not stay on disk."""
    shutil.rmtree(directory, ignore_errors=True)
    known = getattr(importlib.import_module("kubernetes_asyncio.config.kube_config"), "_temp_files", None)
    if isinstance(known, dict):
        for content in [content for content, path in known.items() if path.startswith(directory)]:
            del known[content]


async def _content(answer: aiohttp.ClientResponse) -> Any:
    data = await answer.read()
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _api_error(status: int, content: Any, headers: Mapping[str, str], what: str) -> ApiError:
    wait = headers.get("Retry-After", "")
    return ApiError(status, content, what=what, retry_after_seconds=float(wait) if wait.isdigit() else None)


def _short(path: str) -> str:
    return path.split("/namespaces/", 1)[-1]
