"""The filtering proxy of one sandbox: takes its connections and queries, and lets out what its policy allows.

It resolves names itself, checks every address, and connects to the address it has checked: what a name means
cannot change in between. A connection to a name carries that name's own traffic: on the way out its SNI or its
Host header has to say the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, ip_address
from typing import cast

from lowtide.providers.network import addresses, inspect, names
from lowtide.providers.network.policy import Address, Policy

MOST_CONNECTIONS = 256
_FIRST_BYTES_SECONDS = 15.0  # for a whole ClientHello or head: slower is nobody's real client
_LOOKUP_SECONDS, _CONNECT_SECONDS = 10.0, 15.0
_REMEMBERED_SECONDS, _MOST_REMEMBERED = 20.0, 1024
_LINGER_SECONDS = 2.0
_CHUNK = 1 << 16
_ORIGINAL_TARGET, _IPV6_LEVEL = 80, 41
_HTTP, _TLS = 80, 443

Resolve = Callable[[str], Awaitable[list[Address]]]
Target = tuple[Address, int]


class _RefusedError(Exception):
    """This connection is not let out."""


_ENDS = (_RefusedError, inspect.RefusedBytesError, OSError, TimeoutError, asyncio.IncompleteReadError)


class Stream:
    """One side of a connection. Nothing piles up in it: whoever writes waits until the kernel has taken it."""

    __slots__ = ("reader", "writer")

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        writer.transport.set_write_buffer_limits(0)

    async def more(self) -> bytes:
        data = await self.reader.read(_CHUNK)
        if not data:
            raise _RefusedError
        return data

    async def linger(self) -> None:
        """Until the other end has closed: what it has not read yet would be lost with an end right now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self.reader.read(_CHUNK):
                    pass

    def abort(self) -> None:
        self.writer.transport.abort()

    def reset(self) -> None:
        """As a connection ends that nobody takes: an error over there, and no end of file."""
        with contextlib.suppress(OSError):
            now = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
        self.abort()


class Proxy:
    def __init__(self, policy: Policy, resolve: Resolve | None = None) -> None:
        self._policy, self._resolve = policy, resolve or addresses.of_system
        self._stand_ins = names.StandIns()
        self._known: OrderedDict[str, tuple[float, list[Address]]] = OrderedDict()
        self._connections = 0
        self._lookups = asyncio.Semaphore(addresses.MOST_LOOKUPS)
        self._waiting_lookups = 0

    # ------------------------------------------------------------ connections

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection out of the sandbox."""
        near = Stream(reader, writer)
        if self._connections >= MOST_CONNECTIONS:
            near.reset()
            return
        self._connections += 1
        try:
            target = original_target(writer.get_extra_info("socket"))
            if target is None:
                raise _RefusedError
            await self.carry(near, *target)
            await near.linger()
            near.abort()
        except _ENDS:
            near.reset()
        finally:
            self._connections -= 1

    async def carry(self, near: Stream, address: Address, port: int) -> None:
        name = self._stand_ins.name(address) if isinstance(address, IPv4Address) else None
        if address == names.NAMESERVER and port == 53:
            await self._queries(near)
        elif name is None:
            if not self._policy.allows_address(address, port):
                raise _RefusedError
            await _join(near, await _connected([address], port), b"")
        elif not self._policy.allows_name(name, port):
            raise _RefusedError
        elif port == _TLS:
            hello = await _hello_for(near, name, b"")
            await _join(near, await self._connected_to(name, port), hello)
        elif port == _HTTP:
            request, rest = await _request_for(near, name, port, b"")
            far = await self._connected_to(name, port)
            await _exchange(near, far, request, rest, asyncio.ensure_future(_pump(far, near)))
        else:
            await self._other(near, name, port)

    async def _other(self, near: Stream, name: str, port: int) -> None:
        """A port somebody has named: any protocol, and TLS and HTTP are held to the name as on their own ports.

        In many protocols the server speaks first, so it is connected before the client has said anything.
        """
        far = await self._connected_to(name, port)
        answering = asyncio.ensure_future(_pump(far, near))
        try:
            first = await near.reader.read(_CHUNK)
            while (http := inspect.looks_like_http(first)) is None and (
                more := await near.reader.read(_CHUNK)
            ):
                first += more
            if http:
                request, rest = await _request_for(near, name, port, first)
                await _exchange(near, far, request, rest, answering)
                return
            if inspect.looks_like_tls(first):
                first = await _hello_for(near, name, first)
            far.writer.write(first)
            await asyncio.gather(_pump(near, far), answering)
        finally:
            answering.cancel()
            far.abort()

    async def _connected_to(self, name: str, port: int) -> Stream:
        allowed = [
            address
            for address in await self._addresses(name)
            if self._policy.may_lead_to(address, port)
            and (self._policy.allows_address(address, port) or not addresses.is_own(address))
        ]
        if not allowed:
            raise _RefusedError
        return await _connected(allowed, port)

    # ------------------------------------------------------------ names

    async def answer(self, data: bytes) -> bytes | None:
        """To one DNS query. A name that is not allowed does not exist, and nobody outside is asked for it."""
        asked = names.query(data)
        if asked is None:
            return None
        if not self._policy.allows_name(asked.name):
            return names.answer(asked, names.NO_SUCH_NAME)
        if not asked.wants_address:
            return names.answer(asked, names.NO_ERROR)
        try:
            found = await self._addresses(asked.name)
        except (OSError, TimeoutError, _RefusedError):
            return names.answer(asked, names.SERVER_FAILURE)
        if not found:
            return names.answer(asked, names.NO_SUCH_NAME)
        return names.answer(asked, names.NO_ERROR, self._stand_ins.of(asked.name))

    async def _queries(self, near: Stream) -> None:
        """DNS by TCP."""
        while True:
            async with asyncio.timeout(_FIRST_BYTES_SECONDS):
                size = int.from_bytes(await near.reader.readexactly(2), "big")
                data = await near.reader.readexactly(size)
            answered = await self.answer(data)
            if answered is None:
                return
            near.writer.write(len(answered).to_bytes(2, "big") + answered)
            await near.writer.drain()

    async def _addresses(self, name: str) -> list[Address]:
        """Every address of a name, a moment old at most. None: there is no such name."""
        now = time.monotonic()
        known = self._known.get(name)
        if known is not None and now < known[0]:
            return known[1]
        if self._waiting_lookups >= 2 * addresses.MOST_LOOKUPS:
            raise _RefusedError
        self._waiting_lookups += 1
        try:
            async with self._lookups, asyncio.timeout(_LOOKUP_SECONDS):
                found = await self._resolve(name)
        finally:
            self._waiting_lookups -= 1
        self._known[name] = (now + _REMEMBERED_SECONDS, found)
        self._known.move_to_end(name)
        if len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)
        return found


class Queries(asyncio.DatagramProtocol):
    """DNS by UDP."""

    _most = 64

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(self._tasks) < self._most:  # one more is lost, as a datagram may be: the client asks again
            task = asyncio.ensure_future(self._serve(data, addr))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, data: bytes, addr: tuple[str, int]) -> None:
        answered = await self._proxy.answer(data)
        if answered is not None:
            self._transport.sendto(answered, addr)


def original_target(connection: socket.socket) -> Target | None:
    """Where a redirected connection was meant to go. None: it came to the listener itself."""
    try:
        if connection.family == socket.AF_INET:
            data = connection.getsockopt(socket.SOL_IP, _ORIGINAL_TARGET, 16)
            address: Address = ip_address(data[4:8])
        else:
            data = connection.getsockopt(_IPV6_LEVEL, _ORIGINAL_TARGET, 28)
            address = ip_address(data[8:24])
    except OSError:
        return None
    return address, struct.unpack_from(">H", data, 2)[0]


async def _connected(addresses: list[Address], port: int) -> Stream:
    last: BaseException = _RefusedError()
    for address in addresses[:4]:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS / min(len(addresses), 4)):
                # An address and no name: nothing is looked up again.
                reader, writer = await asyncio.open_connection(str(address), port, limit=_CHUNK)
        except (OSError, TimeoutError) as error:
            last = error
            continue
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Stream(reader, writer)
    raise last


async def _hello_for(near: Stream, name: str, first: bytes) -> bytes:
    """The ClientHello, when it is meant for this name."""
    async with asyncio.timeout(_FIRST_BYTES_SECONDS):
        while (said := inspect.server_name(first)) is None:
            first += await near.more()
    if said != name:
        raise _RefusedError
    return first


async def _request_for(near: Stream, name: str, port: int, first: bytes) -> tuple[inspect.Request, bytes]:
    """The request, when it is meant for this name, and what came after its head."""
    async with asyncio.timeout(_FIRST_BYTES_SECONDS):
        while (parsed := inspect.request(first)) is None:
            first += await near.more()
    if parsed[0].host != name or (parsed[0].port or _HTTP) != port:
        raise _RefusedError
    return parsed


async def _exchange(
    near: Stream, far: Stream, request: inspect.Request, rest: bytes, answering: asyncio.Future[None]
) -> None:
    """One request and its answer. A second request on the same connection could be meant for anybody."""
    sending = asyncio.ensure_future(_send_request(near, far, request, rest))
    try:
        done, _ = await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if task is not sending or not isinstance(task.exception(), OSError):  # the answer is what counts
                task.result()
        await answering
    finally:
        sending.cancel()
        answering.cancel()
        far.abort()


async def _join(near: Stream, far: Stream, first: bytes) -> None:
    try:
        far.writer.write(first)
        await asyncio.gather(_pump(near, far), _pump(far, near))
    finally:
        far.abort()


async def _pump(source: Stream, to: Stream) -> None:
    while data := await source.reader.read(_CHUNK):
        to.writer.write(data)
        await to.writer.drain()
    to.writer.write_eof()


async def _send_request(near: Stream, far: Stream, request: inspect.Request, rest: bytes) -> None:
    to, body = far.writer, _Body(near, rest)
    to.write(request.head)
    if request.length >= 0:
        await body.copy(to, request.length)
    while request.length < 0:
        size = inspect.chunk_length(await body.line())
        to.write(b"%x\r\n" % size)
        await body.copy(to, size)
        if await body.line():
            raise inspect.RefusedBytesError("a chunk is not as long as it says, or has trailers")
        to.write(b"\r\n")
        if not size:
            break
    await to.drain()


class _Body:
    """The body of a request, from what came with its head and what comes later."""

    def __init__(self, near: Stream, rest: bytes) -> None:
        self._near, self._rest = near, rest

    async def copy(self, to: asyncio.StreamWriter, count: int) -> None:
        while count:
            data = self._rest or await self._near.more()
            self._rest = data[count:]
            count -= len(data[:count])
            to.write(data[: len(data) - len(self._rest)])
            await to.drain()

    async def line(self) -> bytes:
        while b"\r\n" not in self._rest:
            if len(self._rest) > 64:
                raise inspect.RefusedBytesError("a line of a chunk is too long")
            self._rest += await self._near.more()
        line, _, self._rest = self._rest.partition(b"\r\n")
        return line


def allow_descriptors() -> None:
    """Two for each connection, and some."""
    import resource

    wanted = 2 * MOST_CONNECTIONS + 64
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.umask(0o077)
