"""The filtering proxy of one sandbox: takes its connections and queries, and lets out what its policy allows.

It checks every address and connects to the address it has checked: what a name means cannot change in between.
With an allow-list it also resolves names itself, and a connection to a name carries that name's own traffic: its
SNI or its Host header has to say the same name. With the public internet, names have their own addresses, and
any protocol passes.

A sandbox decides how many bytes come and in how many pieces. Heads are read in linear time, a head that comes in
pieces is looked at after growing pauses, and the process runs in the sandbox's own control groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import IPv4Address, ip_address
from typing import cast

from lowtide.providers.network import addresses, inspect, names, namespace
from lowtide.providers.network.denied import DeniedLog
from lowtide.providers.network.policy import Address, Policy, host_name, plain, public

MOST_CONNECTIONS = 256
_FIRST_BYTES_SECONDS = 15.0  # for a whole ClientHello or head: slower is nobody's real client
_LOOKUP_SECONDS, _CONNECT_SECONDS = 10.0, 15.0
_REMEMBERED_SECONDS, _MOST_REMEMBERED = 20.0, 1024
_LINGER_SECONDS = 2.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.064
_MOST_TAPPED, _TAP_PAUSE_SECONDS = 64, 0.25
_CHUNK = 1 << 18
_ORIGINAL_TARGET, _IPV6_LEVEL = 80, 41
_HTTP, _TLS = 80, 443

Resolve = Callable[[str], Awaitable[list[Address]]]
Target = tuple[Address, int]


class _RefusedError(Exception):
    """This connection is not let out. With a reason it is recorded; without one, the other end has just left."""


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

    async def pieces(self) -> AsyncIterator[bytes]:
        """What comes, for a reader that waits for a whole head. Few wake-ups, however small the pieces are."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            yield await self.more()
            self.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(pause)
            self.writer.transport.resume_reading()  # type: ignore[attr-defined]
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

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
    def __init__(self, policy: Policy, denied: DeniedLog, resolve: Resolve | None = None) -> None:
        self._policy, self._denied, self._resolve = policy, denied, resolve or addresses.of_system
        self._stand_ins = names.StandIns()
        self._known: OrderedDict[str, tuple[float, list[Address]]] = OrderedDict()
        self._connections = 0
        self._lookups = asyncio.Semaphore(addresses.MOST_LOOKUPS)
        self._waiting_lookups = 0

    # ------------------------------------------------------------ connections

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection out of the sandbox."""
        near = Stream(reader, writer)
        target = original_target(writer.get_extra_info("socket"))
        if target is None:
            near.reset()
            return
        if self._connections >= MOST_CONNECTIONS:
            self._deny(*target, f"more than {MOST_CONNECTIONS} connections at a time")
            near.reset()
            return
        self._connections += 1
        try:
            await self.carry(near, *target)
            await near.linger()
            near.abort()
        except _ENDS as error:
            if isinstance(error, _RefusedError | inspect.RefusedBytesError) and error.args:
                self._deny(*target, str(error))
            near.reset()
        finally:
            self._connections -= 1

    def _deny(self, address: Address, port: int, reason: str, protocol: str = "tcp") -> None:
        name = self._stand_ins.name(address) if isinstance(address, IPv4Address) else None
        self._denied.add(name or str(address), port, protocol, reason)

    async def carry(self, near: Stream, address: Address, port: int) -> None:
        name = self._stand_ins.name(address) if isinstance(address, IPv4Address) else None
        if address == names.NAMESERVER and port == 53:
            await self._queries(near)
        elif name is None:
            self._check_address(address, port)
            await _join(near, await _connected([plain(address)], port), b"")
        elif not self._policy.allows_name(name, port):
            raise _RefusedError(f"port {port} of this name is not on the allow-list")
        elif port == _TLS:
            hello = await _hello_for(near, name, b"")
            await _join(near, await self._connected_to(name, port), hello)
        elif port == _HTTP:
            request, rest = await _request_for(near, name, port, b"")
            far = await self._connected_to(name, port)
            await _exchange(near, far, request, rest, asyncio.ensure_future(_pump(far, near)))
        else:
            await self._other(near, name, port)

    def _check_address(self, address: Address, port: int) -> None:
        if not self._policy.allows_address(address, port):
            raise _RefusedError(
                "not a public address"
                if self._policy.internet
                else "this address and port are not on the allow-list"
            )
        if self._policy.internet and addresses.is_own(plain(address)):
            raise _RefusedError("an address of the machine itself")

    async def _other(self, near: Stream, name: str, port: int) -> None:
        """A port somebody has named: any protocol, and TLS and HTTP are held to the name as on their own ports.

        In many protocols the server speaks first, so it is connected before the client has said anything.
        """
        far = await self._connected_to(name, port)
        answering = asyncio.ensure_future(_pump(far, near))
        try:
            detector = inspect.HttpDetector()
            http = None
            with contextlib.suppress(_RefusedError):  # the end of what is sent: then it is no request
                async for piece in near.pieces():
                    http = detector.feed(piece)
                    if http is not None:
                        break
            first = bytes(detector.data)
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
            raise _RefusedError("this name has no address that may be reached")
        return await _connected(allowed, port)

    # ------------------------------------------------------------ names

    async def answer(self, data: bytes) -> bytes | None:
        """To one DNS query. A name that is not allowed does not exist, and nobody outside is asked for it."""
        asked = names.query(data)
        if asked is None:
            return None
        wants_address = asked.wants_ipv4 or asked.wants_ipv6
        if self._policy.internet:
            if not host_name(asked.name):
                return names.answer(asked, names.NO_SUCH_NAME)
        elif not self._policy.allows_name(asked.name):
            if wants_address:
                self._denied.add(asked.name, None, "dns", "this name is not on the allow-list")
            return names.answer(asked, names.NO_SUCH_NAME)
        if not wants_address or (asked.wants_ipv6 and not self._policy.internet):
            return names.answer(asked, names.NO_ERROR)
        try:
            # With the dot: of the internet, and not of this machine's own domains.
            found = await self._addresses(asked.name + ("." if self._policy.internet else ""))
        except (OSError, TimeoutError, _RefusedError):
            return names.answer(asked, names.SERVER_FAILURE)
        if not found:
            return names.answer(asked, names.NO_SUCH_NAME)
        if self._policy.internet:
            return names.answer(asked, names.NO_ERROR, self._public(asked, found))
        return names.answer(asked, names.NO_ERROR, [self._stand_ins.of(asked.name)])

    def _public(self, asked: names.Query, found: list[Address]) -> list[Address]:
        """The answer of a name of the internet.

        An address of IPv6 only where there is none of IPv4: a connection is taken here before it is known
        whether this machine reaches the address, so a program could not fall back from one to the other.
        """
        open_to_all = [address for address in found if public(address)]
        if not open_to_all:
            self._denied.add(asked.name, None, "dns", "this name has no public address")
        ipv4: list[Address] = [address for address in open_to_all if isinstance(address, IPv4Address)]
        if asked.wants_ipv4:
            return ipv4
        return [] if ipv4 or not addresses.reaches_ipv6() else open_to_all

    # ------------------------------------------------------------ datagrams

    def refuse_datagrams(self, tap: socket.socket) -> None:
        """Record where datagrams were meant to go that the kernel has refused, a few at a time."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_TAPPED):
            try:
                target = namespace.refused_datagram(tap.recv(128))
            except OSError:
                return
            if target is not None:
                self._deny(*target, "UDP is not carried, except for DNS", "udp")
        loop.remove_reader(tap)
        loop.call_later(_TAP_PAUSE_SECONDS, loop.add_reader, tap, self.refuse_datagrams, tap)

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
                reader, writer = await asyncio.open_connection(str(address), port, limit=_CHUNK // 2)
        except (OSError, TimeoutError) as error:
            last = error
            continue
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Stream(reader, writer)
    raise last


async def _hello_for(near: Stream, name: str, first: bytes) -> bytes:
    """The ClientHello, when it is meant for this name."""
    reader = inspect.HelloReader()
    said = reader.feed(first)
    async with _time_for_a_head():
        if said is None:
            async for piece in near.pieces():
                said = reader.feed(piece)
                if said is not None:
                    break
    if said != name:
        raise _RefusedError("the TLS server name is another one")
    return bytes(reader.data)


async def _request_for(near: Stream, name: str, port: int, first: bytes) -> tuple[inspect.Request, bytes]:
    """The request, when it is meant for this name, and what came after its head."""
    reader = inspect.RequestReader()
    parsed = reader.feed(first)
    async with _time_for_a_head():
        if parsed is None:
            async for piece in near.pieces():
                parsed = reader.feed(piece)
                if parsed is not None:
                    break
    if parsed is None or parsed[0].host != name or (parsed[0].port or _HTTP) != port:
        raise _RefusedError("the Host header names another host or port")
    return parsed


@contextlib.asynccontextmanager
async def _time_for_a_head() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_FIRST_BYTES_SECONDS):
            yield
    except TimeoutError:
        raise _RefusedError(f"no whole TLS or HTTP head within {_FIRST_BYTES_SECONDS:g} s") from None


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
