"""Which CoreWeave account, at which address, and the connections there."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lowtide.errors import AuthenticationError, ValidationError
from lowtide.providers import hosted
from lowtide.providers.coreweave.errors import SERVICE, UNAVAILABLE, refusal
from lowtide.providers.hosted import forked_grpc as forked

PROVIDER = "coreweave"
KEY, URL, IMAGE = "CWSANDBOX_API_KEY", "CWSANDBOX_BASE_URL", "LOWTIDE_COREWEAVE_IMAGE"
DEFAULT_URL = "https://api.cwsandbox.com"

_OPTIONS = {"api_key": KEY, "base_url": URL, "image": IMAGE}
_LARGEST_MESSAGE = 100 << 20
_STREAMS = 50
"""On one connection. Servers allow a hundred or so; a stream beyond that would wait until another one ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where and who. The key is never shown."""

    api_key: str = field(repr=False)
    base_url: str = DEFAULT_URL
    image: str | None = None
    way: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """Raises ValidationError for an unknown option, AuthenticationError without a key."""
        found = hosted.chosen(PROVIDER, _OPTIONS, options, environ)
        if not found["api_key"]:
            raise AuthenticationError(
                f"CoreWeave needs an API key: set {KEY}, or use the emulator (lowtide emulate coreweave)",
                provider=PROVIDER,
            )
        url = (found["base_url"] or DEFAULT_URL).rstrip("/")
        parts = urlsplit(url)
        more = parts.path or parts.query or parts.username or parts.password
        if parts.scheme not in ("http", "https") or not parts.hostname or more:
            raise ValidationError(  # not quoted: it may have a password
                f"{URL} is https://HOST or http://HOST:PORT, without a name, a path or anything else",
                argument="base_url",
                provider=PROVIDER,
            )
        way = hosted.way_of(environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "grpc_proxy", "no_grpc_proxy")
        return cls(api_key=found["api_key"], base_url=url, image=found["image"], way=way)

    @property
    def account(self) -> str:
        return hosted.account(PROVIDER, self.base_url, self.api_key)

    def credentials(self) -> dict[str, str]:
        known = {KEY: self.api_key, URL: self.base_url, **self.way}
        return {**known, IMAGE: self.image} if self.image is not None else known

    def inside_key(self, lease_id: str) -> bytes:
        """The key of the program inside: whoever has the account's key and knows the lease has it, too."""
        words = f"lowtide inside {lease_id}".encode()
        return hmac.digest(self.api_key.encode(), words, hashlib.sha256)[:16]


def messages() -> Any:
    """The service's messages, as the SDK ships them; imported on first use."""
    from cwsandbox._proto import sandbox_pb2

    return sandbox_pb2


class Connections:
    """Of one event loop. Requests have one connection; streams have others, and never stand in a request's way."""

    def __init__(self, access: Access) -> None:
        self.loop = asyncio.get_running_loop()
        self._access = access
        self._metadata = (("authorization", f"Bearer {access.api_key}"),)
        self._all: list[Any] = []
        self._requests = self._open()
        self._streams: list[tuple[Any, set[Any]]] = []

    async def pages(self, method: str, request: Any, rows: str, seconds: float) -> AsyncIterator[Any]:
        """The rows of all pages of a list."""
        while True:
            page = await self.call(method, request, seconds)
            for row in getattr(page, rows):
                yield row
            if page.next_page_token in ("", request.page_token):
                return
            request.page_token = page.next_page_token

    async def call(self, method: str, request: Any, seconds: float, sandbox_id: str | None = None) -> Any:
        """One request and its answer. Raises lowtide's errors."""

        async def ask() -> Any:
            # A connection that has just broken fails what is asked next, too. What only looks is asked again.
            delays = [0.05, 0.2, 0.5] if method.startswith(("Get", "List")) else []
            while True:
                try:
                    return await getattr(self._requests, method)(
                        request, metadata=self._metadata, timeout=seconds
                    )
                except forked.rpc_error() as error:
                    found = refusal(error)
                    if not delays or found.status != UNAVAILABLE:
                        raise found from error
                await asyncio.sleep(delays.pop(0))

        # The outer deadline is the later one: it is for a transport that does not keep its own.
        return await SERVICE.call(seconds + 5.0, ask(), method, sandbox_id)

    def stream(self) -> Any:
        """A new stream of `StreamExec`."""
        stub, streams = self._stream_stub()
        call = stub.StreamExec(metadata=self._metadata)
        streams.add(call)
        call.add_done_callback(streams.discard)
        return call

    def _stream_stub(self) -> tuple[Any, set[Any]]:
        for one in self._streams:
            if len(one[1]) < _STREAMS:
                return one
        self._streams.append((self._open(), set()))
        return self._streams[-1]

    async def logs(self, request: Any) -> AsyncIterator[Any]:
        """The entries of `StreamLogs`, on a connection for streams."""
        call = self._stream_stub()[0].StreamLogs(request, metadata=self._metadata)
        with SERVICE.mapped(request.sandbox_id):
            try:
                async for entry in call:
                    yield entry
            except forked.rpc_error() as error:
                raise refusal(error) from error
            finally:
                call.cancel()

    async def aclose(self) -> None:
        for channel in self._all:
            await channel.close()

    def _open(self) -> Any:
        grpc = forked.grpc()
        from cwsandbox._proto.sandbox_pb2_grpc import SandboxServiceStub

        options = (
            ("grpc.max_send_message_length", _LARGEST_MESSAGE),
            ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
            ("grpc.use_local_subchannel_pool", 1),  # else all channels to one address share one connection
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 5000),
        )
        parts = urlsplit(self._access.base_url)
        secure = parts.scheme == "https"
        target = parts.netloc if parts.port else f"{parts.netloc}:{443 if secure else 80}"
        if secure:
            channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=options)
        else:
            channel = grpc.aio.insecure_channel(target, options=options)
        self._all.append(channel)
        return SandboxServiceStub(channel)
