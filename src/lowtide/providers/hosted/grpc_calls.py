"""A service over gRPC: its requests, its streams, and what its refusals say (AIP-193)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from lowtide.errors import SandboxUnavailableError
from lowtide.providers.hosted import forked_grpc as forked
from lowtide.providers.hosted.service import Service

DEADLINE_EXCEEDED, ALREADY_EXISTS, INTERNAL, UNAVAILABLE = 4, 6, 13, 14
_DETAILS = "grpc-status-details-bin"
_LARGEST_MESSAGE = 100 << 20
_PAGES = 1000
"""Of a list: one that has more has no end."""
_STREAMS = 50
"""On one connection. Servers allow a hundred or so; a stream beyond that would wait until another one ends."""


class Refusal(Exception):
    """An answer that is not a success, or none at all: gRPC's number for it, and the service's own reason."""

    def __init__(self, text: str, *, status: int, reason: str, retry_seconds: float | None) -> None:
        super().__init__(f"{text} ({reason})" if reason else text)
        self.status, self.reason, self.retry_seconds = status, reason, retry_seconds


def refusal(error: Any, domain: str) -> Refusal:
    """From what gRPC raised, with the details that the service sends along: those of its own domain."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    reason, retry = "", None
    for name, value in error.trailing_metadata() or ():
        # Where the details are not what they should be, the status says enough.
        with suppress(DecodeError):
            details = status_pb2.Status.FromString(value).details if name == _DETAILS else ()
            for detail in details:
                info, again = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(info) and info.domain == domain:
                    reason = info.reason
                elif detail.Unpack(again):
                    retry = max(0.0, again.retry_delay.ToMilliseconds() / 1000)
    text = str(error.details() or error.code().name)[:2000]
    return Refusal(text, status=int(error.code().value[0]), reason=reason[:100], retry_seconds=retry)


def unreadable() -> Refusal:
    """For an answer that is no message of this service: gRPC logs that, and answers None."""
    return Refusal("the answer cannot be read", status=INTERNAL, reason="", retry_seconds=None)


def reason_of(error: BaseException) -> str:
    """The service's own word for it, or ""."""
    return error.__cause__.reason if isinstance(error.__cause__, Refusal) else ""


def has_status(error: BaseException, status: int) -> bool:
    return isinstance(error.__cause__, Refusal) and error.__cause__.status == status


class _Connection:
    """One, and what is under way on it."""

    def __init__(self, channel: Any, stub: Any) -> None:
        self.channel, self._stub = channel, stub
        self.calls: set[Any] = set()
        self._left = False
        self._closing: asyncio.Task[None] | None = None

    def begin(self, method: str, *request: Any, **more: Any) -> Any:
        call = getattr(self._stub, method)(*request, **more)
        self.calls.add(call)
        call.add_done_callback(self._over)
        return call

    def leave(self) -> None:
        """Nothing begins on it any more: it is closed with the last that did."""
        self._left = True
        self._over(None)

    @property
    def closed(self) -> bool:
        return self._closing is not None and self._closing.done()

    def _over(self, call: Any) -> None:
        self.calls.discard(call)
        if self._left and not self.calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.channel.close())


class Connections:
    """Of one event loop. Requests have one connection; streams have others, and never stand in a request's way."""

    def __init__(self, url: str, key: str, stub: Callable[[Any], Any], service: Service, domain: str) -> None:
        """`stub` makes the service's own from a channel; `domain` is that of its reasons."""
        self.loop = asyncio.get_running_loop()
        self._url, self._stub, self._service, self._domain = url, stub, service, domain
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._requests = self._open()
        self._streams: list[_Connection] = []
        self._silent: list[_Connection] = []

    async def pages(self, method: str, request: Any, rows: str, seconds: float) -> AsyncIterator[Any]:
        """The rows of all pages of a list."""
        for _ in range(_PAGES):
            page = await self.call(method, request, seconds)
            for row in getattr(page, rows):
                yield row
            if page.next_page_token in ("", request.page_token):
                return
            request.page_token = page.next_page_token
        words = f"{method} of {self._service.name} has no end: {_PAGES} pages and more"
        raise SandboxUnavailableError(words, retryable=False, provider=self._service.provider)

    async def call(self, method: str, request: Any, seconds: float, sandbox_id: str | None = None) -> Any:
        """One request and its answer. Raises lowtide's errors."""

        async def ask() -> Any:
            # A connection that has just broken fails what is asked next, too. What only looks is asked again.
            delays = [0.05, 0.2, 0.5] if method.startswith(("Get", "List")) else []
            while True:
                connection = self._requests
                try:
                    answer = await connection.begin(method, request, metadata=self._metadata, timeout=seconds)
                    if answer is None:
                        raise unreadable()
                    return answer
                except forked.rpc_error() as error:
                    found = refusal(error, self._domain)
                    if found.status == DEADLINE_EXCEEDED:
                        self._leave(connection)
                    if not delays or found.status != UNAVAILABLE:
                        raise found from error
                await asyncio.sleep(delays.pop(0))

        # The outer deadline is the later one: it is for a transport that does not keep its own.
        return await self._service.call(seconds + 5.0, ask(), method, sandbox_id)

    def stream(self, method: str) -> Any:
        """A new stream, both ways."""
        return self._stream_connection().begin(method, metadata=self._metadata)

    def _stream_connection(self) -> _Connection:
        for one in self._streams:
            if len(one.calls) < _STREAMS:
                return one
        self._streams.append(self._open())
        return self._streams[-1]

    def give_up(self, call: Any) -> None:
        """A stream on which nothing came: those that begin from now on have another connection."""
        for one in self._streams:
            if call in one.calls:
                return self._leave(one)

    def _leave(self, silent: _Connection) -> None:
        """Its other end may have vanished (a router forgot it, this machine was elsewhere meanwhile), which shows in a
        quarter of an hour. It may also be slow: what is under way on it is left to come to its end."""
        if silent is self._requests:
            self._requests = self._open()
        elif silent in self._streams:
            self._streams.remove(silent)
        else:
            return
        self._silent = [one for one in self._silent if not one.closed] + [silent]
        silent.leave()

    async def entries(self, method: str, request: Any, silence: float | None) -> AsyncIterator[Any]:
        """What an answer that is a stream says, on a connection for streams. `silence`: the most between two entries."""
        call = self._stream_connection().begin(method, request, metadata=self._metadata)
        with self._service.mapped(request.sandbox_id):
            try:
                while True:
                    async with asyncio.timeout(silence):
                        entry = await call.read()
                    if entry is forked.grpc().aio.EOF:
                        return
                    if entry is None:
                        raise unreadable()
                    yield entry
            except forked.rpc_error() as error:
                raise refusal(error, self._domain) from error
            finally:
                call.cancel()

    async def aclose(self) -> None:
        for one in (self._requests, *self._streams, *self._silent):
            await one.channel.close()

    def _open(self) -> _Connection:
        grpc = forked.grpc()
        options = (
            ("grpc.max_send_message_length", _LARGEST_MESSAGE),
            ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels to one address share one connection
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 5000),
            # Servers end connections that ask more often than every five minutes. This also has the kernel give up
            # what nobody acknowledges for so long, instead of after a quarter of an hour.
            ("grpc.keepalive_time_ms", 330_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        )
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        target = parts.netloc if parts.port else f"{parts.netloc}:{443 if secure else 80}"
        if secure:
            channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=options)
        else:
            channel = grpc.aio.insecure_channel(target, options=options)
        return _Connection(channel, self._stub(channel))
