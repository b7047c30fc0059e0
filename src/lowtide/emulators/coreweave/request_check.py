"""What every call has to pass before its handler: the key, a message that parses, texts that are texts, faults."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from lowtide.emulators.agent.client import AgentError
from lowtide.emulators.coreweave.refusal import Code, Refused, invalid, not_there
from lowtide.emulators.faults import FaultName
from lowtide.errors import LowtideError, ResourceExhaustedError

if TYPE_CHECKING:
    from lowtide.emulators.coreweave import CoreWeaveEmulator

log = logging.getLogger("lowtide.emulators")

LONGEST_TEXT = 64 << 10
_LONG = {"args", "command"}
"""Fields that hold a program's arguments, which may be long."""
LONGEST_ARGUMENT = 128 << 10


def check_message(message: Message, path: str = "") -> None:
    """Raise `Refused` for a text with a null byte or without an end, anywhere in the message."""
    for field, value in message.ListFields():
        name = f"{path}{field.name}"
        many = list(value) if _repeated(field) and not _is_map(field) else [value]
        if _is_map(field):
            for key in value:
                _check_text(key, name, LONGEST_TEXT)
                one = value[key]
                if isinstance(one, str):
                    _check_text(one, name, LONGEST_ARGUMENT)
                elif isinstance(one, Message):
                    check_message(one, f"{name}.")
            continue
        for one in many:
            if isinstance(one, Timestamp | Duration):
                _check_time(one, name)
            elif isinstance(one, Message):
                check_message(one, f"{name}.")
            elif isinstance(one, str):
                _check_text(one, name, LONGEST_ARGUMENT if field.name in _LONG else LONGEST_TEXT)


def _check_time(given: Any, name: str) -> None:
    try:
        given.ToMicroseconds()
    except ValueError:
        raise invalid(name, "is no time") from None


def _repeated(field: Any) -> bool:
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)  # protobuf 5


def _is_map(field: Any) -> bool:
    return bool(field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry)


def _check_text(text: str, name: str, longest: int) -> None:
    if "\0" in text:
        raise invalid(name, "holds a null byte")
    if len(text) > longest:
        raise invalid(name, f"is longer than {longest} characters")


class Checks(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Stands in front of every method of every service."""

    def __init__(self, emulator: CoreWeaveEmulator) -> None:
        self._emulator = emulator

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        call = _Call(self._emulator, details, handler)
        # Bytes come in, so that what does not parse is the caller's mistake and not an internal one.
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                call.both, response_serializer=handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                call.streamed, response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            call.single, response_serializer=handler.response_serializer
        )


class _Call:
    def __init__(self, emulator: CoreWeaveEmulator, details: Any, handler: Any) -> None:
        self._emulator, self._handler = emulator, handler
        self._metadata = {key.lower(): value for key, value in details.invocation_metadata or ()}
        name = details.method.rpartition("/")[2]
        self._operation = re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()

    async def single(self, data: bytes, context: Any) -> Any:
        started, code = time.monotonic(), Code.OK
        try:
            request = self._parse(data)
            self._enter(request)
            return await self._handler.unary_unary(request, context)
        except Exception as error:
            refused = _refusal(error, self._operation)
            code = refused.code
            await refused.abort(context)
        finally:
            self._answered(code, started)

    async def streamed(self, data: bytes, context: Any) -> AsyncIterator[Any]:
        started, code = time.monotonic(), Code.OK
        try:
            request = self._parse(data)
            self._enter(request)
            async for one in self._handler.unary_stream(request, context):
                yield one
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as error:
            refused = _refusal(error, self._operation)
            code = refused.code
            await refused.abort(context)
        finally:
            self._answered(code, started)

    async def both(self, coming: Any, context: Any) -> AsyncIterator[Any]:
        started, code = time.monotonic(), Code.OK

        async def requests() -> AsyncIterator[Any]:
            async for data in coming:
                yield self._parse(data)

        try:
            self._enter(None)
            async for one in self._handler.stream_stream(requests(), context):
                yield one
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except Exception as error:
            refused = _refusal(error, self._operation)
            code = refused.code
            await refused.abort(context)
        finally:
            self._answered(code, started)

    def _parse(self, data: bytes) -> Any:
        try:
            request = self._handler.request_deserializer(data)
        except DecodeError:
            raise Refused(
                Code.INVALID_ARGUMENT, "the message cannot be parsed", "CWSANDBOX_INVALID_REQUEST"
            ) from None
        check_message(request)
        return request

    def _enter(self, request: Any) -> None:
        ground = self._emulator.ground
        sandbox_id = getattr(request, "sandbox_id", "")
        facts = {"operation": self._operation, "sandbox_id": sandbox_id}
        ground.requests.note("coreweave", self._operation, {"sandbox_id": sandbox_id})
        given = str(self._metadata.get("authorization", "")).removeprefix("Bearer ")
        wrong = not hmac.compare_digest(given.encode(), self._emulator.api_key.encode())
        if wrong or ground.faults.take(FaultName.STALE_TOKEN, "coreweave", facts):
            raise Refused(Code.UNAUTHENTICATED, "the API key is missing or wrong")
        if fault := ground.faults.take(FaultName.RATE_LIMIT, "coreweave", facts):
            raise Refused(Code.RESOURCE_EXHAUSTED, "too many requests", retry_seconds=fault.seconds or 1.0)
        if ground.faults.take(FaultName.UNAVAILABLE, "coreweave", facts):
            raise Refused(Code.UNAVAILABLE, "the service is not available", "CWSANDBOX_BACKEND_UNAVAILABLE")

    def _answered(self, code: Any, started: float) -> None:
        status = 200 if code is Code.OK else 500 if code is Code.INTERNAL else 400
        self._emulator.ground.answered("coreweave", self._operation, status, time.monotonic() - started)


def _refusal(error: Exception, operation: str) -> Refused:
    """What the service would say of it."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, NotImplementedError):
        return not_there(operation)
    if isinstance(error, AgentError):
        return Refused(Code.FAILED_PRECONDITION, str(error), "CWSANDBOX_FILE_IO_FAILED")
    if isinstance(error, ResourceExhaustedError):
        return Refused(Code.RESOURCE_EXHAUSTED, str(error), "CWSANDBOX_RUNNER_CAPACITY_EXHAUSTED")
    if isinstance(error, LowtideError):
        return Refused(
            Code.UNAVAILABLE, f"the sandbox does not answer: {error}", "CWSANDBOX_RUNNER_UNAVAILABLE"
        )
    log.error("coreweave %s failed", operation, exc_info=error)
    return Refused(Code.INTERNAL, f"internal error: {type(error).__name__}")
