"""A proxy between a provider's real SDK and its emulator that passes everything on, except what a test has it say instead.

Tests speak of operations (create, get, list, destroy), and each `Dialect` knows what they are on its service's wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of a service. `status` is HTTP's, or gRPC's number for it."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


CLOSE_DELIMITED = 0
"""The status, of HTTP, of an answer without a length that ends with its connection."""
Forward = Callable[[], Awaitable[Answer]]
Lie = Callable[[Forward], Awaitable[Answer]]
"""What is answered in place of the service, which `Forward` asks."""


def committed(answer: Answer) -> Lie:
    """The service does what it was asked for, and this is what is heard of it."""

    async def lie(forward: Forward) -> Answer:
        await forward()
        return answer

    return lie


def undone(answer: Answer) -> Lie:
    """The service never hears of it."""

    async def lie(forward: Forward) -> Answer:
        return answer

    return lie


def changed(change: Callable[[Answer], Answer]) -> Lie:
    async def lie(forward: Forward) -> Answer:
        return change(await forward())

    return lie


class Dialect:
    """One service's wire."""

    provider: ClassVar[str]
    address: ClassVar[tuple[str, ...]]
    """The variables that say where it is."""
    grpc: ClassVar[bool] = False
    refusals: ClassVar[tuple[int, ...]] = (400, 401, 403, 404, 409, 422, 429)
    unreadable: ClassVar[Mapping[str, Answer]] = {
        "page": Answer(status=200, body=b"<html>sign in</html>", headers={"Content-Type": "text/html"}),
        "nothing": Answer(status=200),
        "empty": Answer(status=200, body=b"{}", headers={"Content-Type": "application/json"}),
        "list": Answer(status=200, body=b"[]", headers={"Content-Type": "application/json"}),
        "null": Answer(status=200, body=b"null", headers={"Content-Type": "application/json"}),
        "cut": Answer(status=200, body=b'{"id": "abc', headers={"Content-Type": "application/json"}),
    }

    def operation(self, method: str, path: str) -> str:
        raise NotImplementedError

    def refused(self, status: int) -> Answer:
        return self._json(status, {"code": status, "statusCode": status, "message": "not by this proxy"})

    def missing(self, sandbox_id: str) -> Answer:
        """The service's own word for a sandbox that is not there."""
        raise NotImplementedError

    def with_id(self, answer: Answer, sandbox_id: str) -> Answer:
        raise NotImplementedError

    def without_labels(self, answer: Answer) -> Answer:
        raise NotImplementedError

    @staticmethod
    def _json(status: int, body: object) -> Answer:
        return Answer(
            status=status, body=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )

    def _edited(self, answer: Answer, **fields: Any) -> Answer:
        return self._json(answer.status, {**json.loads(answer.body), **fields})


class E2B(Dialect):
    provider = "e2b"
    address = ("E2B_API_URL", "E2B_SANDBOX_URL")

    def operation(self, method: str, path: str) -> str:
        path = path.removeprefix("/v2")
        if path == "/sandboxes":
            return "create" if method == "POST" else "list"
        if re.fullmatch(r"/sandboxes/[^/]+", path):
            return {"GET": "get", "DELETE": "destroy"}.get(method, "")
        if path == "/files" and method == "GET":
            return "read"
        return "start" if path.endswith("Process/Start") else ""

    def missing(self, sandbox_id: str) -> Answer:
        return self._json(404, {"code": 404, "message": f"sandbox {sandbox_id!r} not found"})

    def with_id(self, answer: Answer, sandbox_id: str) -> Answer:
        return self._edited(answer, sandboxID=sandbox_id)

    def without_labels(self, answer: Answer) -> Answer:
        return answer  # it never has any


class Daytona(Dialect):
    provider = "daytona"
    address = ("DAYTONA_API_URL",)

    def operation(self, method: str, path: str) -> str:
        path = path.removeprefix("/api")
        if path == "/sandbox":
            return "create" if method == "POST" else "list"
        if re.fullmatch(r"/sandbox/[^/]+", path):
            return {"GET": "get", "DELETE": "destroy"}.get(method, "")
        return "start" if path.endswith(("/process/execute", "/pty/create-connect")) else ""

    def missing(self, sandbox_id: str) -> Answer:
        words = f"Sandbox with ID or name {sandbox_id} not found"
        return self._json(404, {"statusCode": 404, "error": "Not Found", "message": words})

    def with_id(self, answer: Answer, sandbox_id: str) -> Answer:
        return self._edited(answer, id=sandbox_id)

    def without_labels(self, answer: Answer) -> Answer:
        return self._edited(answer, labels={})


class Runloop(Dialect):
    provider = "runloop"
    address = ("RUNLOOP_BASE_URL",)

    def operation(self, method: str, path: str) -> str:
        if path == "/v1/devboxes":
            return "create" if method == "POST" else "list"
        if re.fullmatch(r"/v1/devboxes/[^/]+", path) and method == "GET":
            return "get"
        if path.endswith("/execute_async"):
            return "start"
        return "destroy" if path.endswith("/shutdown") else ""

    def missing(self, sandbox_id: str) -> Answer:
        return self._json(404, {"message": f"Devbox {sandbox_id} not found"})

    def with_id(self, answer: Answer, sandbox_id: str) -> Answer:
        return self._edited(answer, id=sandbox_id)

    def without_labels(self, answer: Answer) -> Answer:
        return self._edited(answer, metadata={})


class Modal(Dialect):
    provider = "modal"
    address = ("MODAL_SERVER_URL",)
    grpc = True
    refusals = (3, 5, 7, 8, 9, 16)
    unreadable: ClassVar[Mapping[str, Answer]] = {
        "nothing": Answer(status=0),
        "noise": Answer(status=0, body=b"\xff\xff"),
    }
    _OPERATIONS: ClassVar[Mapping[str, str]] = {
        "SandboxCreate": "create",
        "SandboxTagsGet": "get",
        "SandboxGetFromName": "list",
        "SandboxTerminate": "destroy",
        "TaskExecStart": "start",
    }

    def operation(self, method: str, path: str) -> str:
        return self._OPERATIONS.get(path.rpartition("/")[2].removesuffix("V2"), "")

    def refused(self, status: int) -> Answer:
        return Answer(status=status, body=b"not by this proxy")

    def missing(self, sandbox_id: str) -> Answer:
        return Answer(status=5, body=f"Sandbox {sandbox_id} not found".encode())

    def with_id(self, answer: Answer, sandbox_id: str) -> Answer:
        from modal_proto import api_pb2

        message = api_pb2.SandboxCreateResponse.FromString(answer.body)
        message.sandbox_id = sandbox_id
        return Answer(status=0, body=message.SerializeToString())

    def without_labels(self, answer: Answer) -> Answer:
        return answer  # it never has any


class CoreWeave(Dialect):
    provider = "coreweave"
    address = ("CWSANDBOX_BASE_URL",)
    grpc = True
    refusals = (3, 5, 6, 7, 8, 9, 16)
    unreadable = Modal.unreadable
    _OPERATIONS: ClassVar[Mapping[str, str]] = {
        "CreateSandbox": "create",
        "GetSandbox": "get",
        "ListSandboxes": "list",
        "DeleteSandbox": "destroy",
        "StreamExec": "start",
    }

    def operation(self, method: str, path: str) -> str:
        return self._OPERATIONS.get(path.rpartition("/")[2], "")

    def refused(self, status: int) -> Answer:
        return Answer(status=status, body=b"not by this proxy")

    def missing(self, sandbox_id: str) -> Answer:
        """As the provider sees it: the reason, too, that the service sends in the details."""
        return Answer(status=5, body=f"sandbox {sandbox_id} not found (CWSANDBOX_SANDBOX_NOT_FOUND)".encode())

    def with_id(self, answer: Answer, sandbox_id: str) -> Answer:
        return self._message(answer, sandbox_id=sandbox_id)

    def without_labels(self, answer: Answer) -> Answer:
        return self._message(answer, tags=False)

    def _message(self, answer: Answer, *, sandbox_id: str = "", tags: bool = True) -> Answer:
        from cwsandbox._proto import sandbox_pb2

        message = sandbox_pb2.Sandbox.FromString(answer.body)
        message.sandbox_id = sandbox_id or message.sandbox_id
        if not tags:
            del message.spec.tags[:]
        return Answer(status=0, body=message.SerializeToString())


DIALECTS: dict[str, Dialect] = {
    one.provider: one for one in (E2B(), Daytona(), Runloop(), Modal(), CoreWeave())
}


class Proxy:
    """What passes, by operation, and what is said instead."""

    def __init__(self, dialect: Dialect, service: str) -> None:
        self.dialect, self.service = dialect, service
        self.url = ""
        self.lies: dict[str, Lie] = {}
        self.answers: dict[str, list[Answer]] = {}
        """What the service answered itself, by operation."""
        self.paths: list[str] = []

    async def answer(self, operation: str, forward: Forward) -> Answer:
        async def asked() -> Answer:
            answer = await forward()
            self.answers.setdefault(operation, []).append(answer)
            return answer

        lie = self.lies.get(operation)
        return await (lie(asked) if lie is not None else asked())


@asynccontextmanager
async def proxying(
    provider: str, environment: Mapping[str, str]
) -> AsyncIterator[tuple[Proxy, dict[str, str]]]:
    """A proxy before the emulator, and the environment that leads through it."""
    dialect = DIALECTS[provider]
    address = environment[dialect.address[0]]
    origin = re.match(r"https?://[^/]+", address)
    assert origin is not None
    proxy = Proxy(dialect, origin[0])
    serving = _serving_grpc(proxy) if dialect.grpc else _serving_http(proxy)
    async with serving as url:
        proxy.url = url
        through = {name: environment[name].replace(proxy.service, url) for name in dialect.address}
        yield proxy, {**environment, **through}


_STREAMED = ("", "start")
"""Operations whose answers may go on for as long as a command does."""
_HOPS = ("connection", "transfer-encoding", "content-length", "host", "keep-alive", "content-encoding")


@asynccontextmanager
async def _serving_http(proxy: Proxy) -> AsyncIterator[str]:
    from aiohttp import ClientError, ClientSession, ClientTimeout, web

    session = ClientSession(timeout=ClientTimeout(), auto_decompress=False)

    async def handle(request: web.Request) -> web.StreamResponse:
        proxy.paths.append(request.raw_path)
        operation = proxy.dialect.operation(request.method, request.path)
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOPS}

        async def forward() -> Answer:
            url = proxy.service + request.raw_path
            async with session.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as got:
                kept = {name: value for name, value in got.headers.items() if name.lower() not in _HOPS}
                return Answer(status=got.status, body=await got.read(), headers=kept)

        if operation in _STREAMED and operation not in proxy.lies:
            return await stream(request, body, headers)
        answer = await proxy.answer(operation, forward)
        if answer.status == CLOSE_DELIMITED:
            assert request.transport is not None
            request.transport.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer.body)
            request.transport.close()
            return web.Response()
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async def stream(request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        url = proxy.service + request.raw_path
        async with session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as got:
            kept = {name: value for name, value in got.headers.items() if name.lower() not in _HOPS}
            response = web.StreamResponse(status=got.status, headers=kept)
            await response.prepare(request)
            with contextlib.suppress(ClientError):  # a sandbox that ends cuts its streams
                async for chunk in got.content.iter_any():
                    await response.write(chunk)
            return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await session.close()


@asynccontextmanager
async def _serving_grpc(proxy: Proxy) -> AsyncIterator[str]:
    import grpc

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    options.append(("grpc.use_local_subchannel_pool", 1))
    channel = grpc.aio.insecure_channel(proxy.service.removeprefix("http://"), options=options)
    codes = {code.value[0]: code for code in grpc.StatusCode}

    def metadata(context: Any) -> list[tuple[str, Any]]:
        ours = ("user-agent", "grpc-accept-encoding", "te", "content-type")
        return [(name, value) for name, value in context.invocation_metadata() if name not in ours]

    def handler(path: str) -> Any:
        operation = proxy.dialect.operation("", path)

        async def one(request: bytes, context: Any) -> bytes:
            proxy.paths.append(path)
            details: Any = ()

            async def forward() -> Answer:
                nonlocal details
                try:
                    return Answer(
                        status=0, body=await channel.unary_unary(path)(request, metadata=metadata(context))
                    )
                except grpc.aio.AioRpcError as error:
                    details = error.trailing_metadata()
                    return Answer(status=error.code().value[0], body=(error.details() or "").encode())

            answer = await proxy.answer(operation, forward)
            if answer.status:
                await context.abort(codes[answer.status], answer.body.decode(), tuple(details))
            return answer.body

        async def many(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            proxy.paths.append(path)
            if operation in proxy.lies:
                await proxy.lies[operation](_never)
            call = channel.stream_stream(path)(requests, metadata=metadata(context))
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await context.abort(
                    error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                )

        if operation and operation != "start":
            return grpc.unary_unary_rpc_method_handler(one)
        return grpc.stream_stream_rpc_method_handler(many)

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return handler(details.method)

    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(Exception):
            await server.stop(0)
        await channel.close()


async def _never() -> Answer:
    await asyncio.Event().wait()
    raise AssertionError
