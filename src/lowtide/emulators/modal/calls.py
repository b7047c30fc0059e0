"""The gRPC server: every call of the installed stubs, checked before its handler, answered in the service's way."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpclib import GRPCError, Status
from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.const import Handler as Method
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import StreamTerminatedError
from grpclib.metadata import decode_metadata, decode_timeout, encode_timeout
from grpclib.protocol import H2Protocol
from grpclib.server import Handler, _abort
from h2.config import H2Configuration
from h2.settings import SettingCodes
from modal_proto import api_pb2, task_command_router_pb2

from lowtide.emulators.faults import FaultName
from lowtide.emulators.modal.refusal import Details, Refused, invalid, not_there
from lowtide.errors import LowtideError, ResourceExhaustedError

if TYPE_CHECKING:
    from lowtide.emulators.modal import ModalEmulator

log = logging.getLogger("lowtide.emulators")

LARGEST_MESSAGE = 100 << 20
LONGEST_TEXT = 1 << 20
CONTROL = api_pb2.DESCRIPTOR.services_by_name["ModalClient"]
ROUTER = task_command_router_pb2.DESCRIPTOR.services_by_name["TaskCommandRouter"]
_PYTHON = "1"
_SHORTEST_SECONDS = 0.05  # a deadline that is over before a call began is not answered as one by grpclib


class Call:
    """What a handler may know of the call beside its message."""

    def __init__(self, stream: Any, operation: str) -> None:
        self.operation = operation
        self._stream = stream
        self._metadata = {str(key).lower(): str(value) for key, value in (stream.metadata or {}).items()}

    def header(self, name: str) -> str:
        return self._metadata.get(name, "")

    @property
    def from_python(self) -> bool:
        return self.header("x-modal-client-type") == _PYTHON

    def drop(self) -> None:
        """Reset the connection without an answer, as a crashed server or a lost network does."""
        transport = self._stream._stream._transport
        found: socket.socket | None = transport.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


class Server:
    """A connection factory: HTTP/2 with all methods of both services, those without a handler refused by name."""

    def __init__(self, emulator: ModalEmulator, control: Any, router: Any) -> None:
        self._emulator = emulator
        self._open: set[_Checked] = set()
        self._methods: dict[str, Method] = {}
        for service, handlers in ((CONTROL, control), (ROUTER, router)):
            for method in service.methods:
                self._methods[f"/{service.full_name}/{method.name}"] = self._method(method, handlers)
        self._config = Configuration(
            http2_connection_window_size=16 << 20, http2_stream_window_size=16 << 20
        ).__for_server__()
        self._h2 = H2Configuration(client_side=False, header_encoding="latin-1")  # takes any bytes

    def connection(self) -> asyncio.Protocol:
        handler = _Checked(
            self._methods, ProtoCodec(), Details(), _DispatchServerEvents(), self._emulator, self._open
        )
        self._open.add(handler)
        return _Connection(handler, self._config, self._h2)

    async def aclose(self) -> None:
        for handler in list(self._open):
            handler.close()
        for handler in list(self._open):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(handler.wait_closed(), 2)

    def _method(self, method: Any, handlers: Any) -> Method:
        cardinality = {
            (False, False): Cardinality.UNARY_UNARY,
            (False, True): Cardinality.UNARY_STREAM,
            (True, False): Cardinality.STREAM_UNARY,
            (True, True): Cardinality.STREAM_STREAM,
        }[method.client_streaming, method.server_streaming]
        kind = GetMessageClass(method.input_type)
        serve = _Serve(self._emulator, method, getattr(handlers, method.name, None), kind)
        return Method(serve, cardinality, kind, GetMessageClass(method.output_type))


class _Connection(H2Protocol):
    """Takes more calls at once than HTTP/2's usual hundred: each client waits for all its sandboxes over one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connection._connection.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 10_000})
        self.connection.flush()


class _Checked(Handler):
    """Refuses what did not come from this machine, before anything is read."""

    def __init__(
        self,
        methods: Any,
        codec: Any,
        details: Any,
        dispatch: Any,
        emulator: ModalEmulator,
        open_: set[_Checked],
    ) -> None:
        super().__init__(methods, codec, details, dispatch)
        self._emulator, self._open = emulator, open_

    def accept(self, stream: Any, headers: Any, release_stream: Any) -> None:
        found = dict(headers)
        foreign = not self._emulator.ground.settings.allow_remote and (
            not _is_local(found.get(":authority", "")) or "origin" in found
        )
        if foreign:
            refused = Refused(Status.PERMISSION_DENIED, "only this machine may call")
            self._tasks[stream] = self.loop.create_task(_turn_away(stream, release_stream, 403, refused))
            return
        try:
            headers = _checked(headers)
        except Refused as error:
            self._tasks[stream] = self.loop.create_task(_turn_away(stream, release_stream, 200, error))
            return
        if found.get(":path") not in self.mapping:
            log.info("modal: no call %.200s", found.get(":path"))
        super().accept(stream, headers, release_stream)

    def close(self) -> None:
        super().close()
        self._open.discard(self)


def _checked(headers: Any) -> Any:
    """The headers as grpclib can take them: it answers some never, and some as if it had failed itself."""
    try:
        decode_metadata(headers)
    except ValueError:
        raise invalid("metadata", "cannot be decoded") from None
    try:
        seconds = min(
            (decode_timeout(value) for name, value in headers if name == "grpc-timeout"), default=None
        )
    except (ValueError, OverflowError):
        raise invalid("grpc-timeout", "is no time") from None
    if seconds is None:
        return headers
    if seconds <= 0:
        raise Refused(Status.DEADLINE_EXCEEDED, "the deadline is over")
    kept = [(name, value) for name, value in headers if name != "grpc-timeout"]
    return [*kept, ("grpc-timeout", encode_timeout(min(max(seconds, _SHORTEST_SECONDS), 1e9)))]


async def _turn_away(stream: Any, release_stream: Any, code: int, refused: Refused) -> None:
    try:
        await _abort(stream, code, refused.status, str(refused))
    finally:
        release_stream()


class _Serve:
    """One method, from the bytes of its request to its answer."""

    def __init__(self, emulator: ModalEmulator, method: Any, handler: Any, kind: type[Message]) -> None:
        self._emulator, self._method, self._handler, self._kind = emulator, method, handler, kind
        self._router = method.containing_service.full_name == ROUTER.full_name
        self._operation = re.sub(r"(?<!^)(?=[A-Z])", "-", method.name.removesuffix("V2")).lower()

    async def __call__(self, stream: Any) -> None:
        started, status = time.monotonic(), Status.OK
        try:
            await self._answer(stream)
        except (asyncio.CancelledError, StreamTerminatedError, GRPCError):
            raise
        except Exception as error:
            refused = _refusal(error, self._method.name)
            status = refused.status
            raise refused.as_grpc() from None
        finally:
            code = 200 if status is Status.OK else 500 if status is Status.INTERNAL else 400
            self._emulator.ground.answered(
                "modal", self._method.name, code, round(time.monotonic() - started, 6)
            )

    async def _answer(self, stream: Any) -> None:
        call = Call(stream, self._operation)
        self._check_key(call)
        if self._handler is None:
            log.info("modal: %s is not there", self._method.name)
            raise not_there(self._method.name)
        if self._method.client_streaming:
            self._enter(None, call)
            await stream.send_message(await self._handler(self._requests(stream), call))
            return
        request = await self._receive(stream)
        if request is None:
            raise Refused(Status.INVALID_ARGUMENT, "the request holds no message")
        self._enter(request, call)
        if self._method.server_streaming:
            async with contextlib.aclosing(self._handler(request, call)) as answers:
                async for answer in answers:
                    await stream.send_message(answer)
            return
        await stream.send_message(await self._handler(request, call))

    async def _requests(self, stream: Any) -> AsyncIterator[Any]:
        while (request := await self._receive(stream)) is not None:
            yield request

    async def _receive(self, stream: Any) -> Any:
        """The next message. grpclib's own reading takes any length, and fails without a reason at bad bytes."""
        head = await _recv(stream, 5)
        if not head:
            return None
        if head[0]:
            raise Refused(Status.UNIMPLEMENTED, "compressed messages are not taken")
        size = int.from_bytes(head[1:], "big")
        if size > LARGEST_MESSAGE:
            raise Refused(Status.RESOURCE_EXHAUSTED, f"the message is larger than {LARGEST_MESSAGE} bytes")
        data = await _recv(stream, size) if size else b""
        if len(data) != size:
            raise _cut_off()
        try:
            request = self._kind.FromString(data)
        except (DecodeError, UnicodeDecodeError):
            raise Refused(Status.INVALID_ARGUMENT, "the message cannot be parsed") from None
        for name, value in _scalars(request):
            if isinstance(value, float):
                if not math.isfinite(value):
                    raise invalid(name, "is not a number")
            elif "\0" in value:
                raise invalid(name, "holds a null byte")
            elif len(value) > LONGEST_TEXT:
                raise invalid(name, f"is longer than {LONGEST_TEXT} characters")
        return request

    def _check_key(self, call: Call) -> None:
        emulator = self._emulator
        if self._router:
            return  # its token is for one task: the router checks it
        given = f"{call.header('x-modal-token-id')}:{call.header('x-modal-token-secret')}"
        right = f"{emulator.token_id}:{emulator.token_secret}"
        if not hmac.compare_digest(given.encode(), right.encode()):
            raise Refused(Status.UNAUTHENTICATED, "token missing or wrong")
        token = call.header("x-modal-auth-token")
        if token and not emulator.tokens.holds(token, "client"):
            raise Refused(Status.UNAUTHENTICATED, "the auth token is wrong or over")

    def _enter(self, request: Any, call: Call) -> None:
        ground = self._emulator.ground
        sandbox_id = getattr(request, "sandbox_id", "") or self._emulator.boxes.id_of_task(
            getattr(request, "task_id", "")
        )
        facts = {"operation": self._operation, "sandbox_id": sandbox_id}
        ground.requests.note("modal", self._operation, {"sandbox_id": sandbox_id})
        if self._router and request is not None:
            self._emulator.check_router_token(call, request.task_id)
        if ground.faults.take(FaultName.STALE_TOKEN, "modal", facts):
            raise Refused(Status.UNAUTHENTICATED, "the token is over")
        if fault := ground.faults.take(FaultName.RATE_LIMIT, "modal", facts):
            raise Refused(Status.RESOURCE_EXHAUSTED, "too many requests", retry_seconds=fault.seconds or 1.0)
        if ground.faults.take(FaultName.UNAVAILABLE, "modal", facts):
            raise Refused(Status.UNAVAILABLE, "the service is not available")


async def _recv(stream: Any, size: int) -> bytes:
    """So many bytes, or none at the end of the stream."""
    try:
        found: bytes = await stream._stream.recv_data(size)
    except AssertionError:  # what grpclib says of an end in the middle
        raise _cut_off() from None
    return found


def _cut_off() -> Refused:
    return Refused(Status.INVALID_ARGUMENT, "the message is cut off")


def _refusal(error: Exception, operation: str) -> Refused:
    if isinstance(error, Refused):
        return error
    if isinstance(error, ResourceExhaustedError):
        return Refused(Status.RESOURCE_EXHAUSTED, str(error))
    if isinstance(error, LowtideError):
        return Refused(Status.UNAVAILABLE, f"the sandbox does not answer: {error}")
    log.error("modal %s failed", operation, exc_info=error)
    return Refused(Status.INTERNAL, f"internal error: {type(error).__name__}")


def _scalars(message: Message, path: str = "") -> Iterator[tuple[str, str | float]]:
    """Every text and every number that may be none in a message, with the name of its field."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        many = [value]
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            many = [*value.keys(), *value.values()]
        elif not isinstance(value, str | bytes | Message) and hasattr(value, "__iter__"):
            many = value
        for one in many:
            if isinstance(one, Message):
                yield from _scalars(one, f"{name}.")
            elif isinstance(one, str | float):
                yield name, one


def _is_local(authority: str) -> bool:
    try:
        host = urlsplit(f"//{authority}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
