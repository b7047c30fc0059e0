"""The way into a sandbox: the program inside, brought and started through the daemon's own calls.

The first command of a sandbox made here goes with the program in one `execute` request, whose answer is the
command's. Everything after that goes over one terminal's WebSocket. docs/daytona.md has the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from lowtide import errors
from lowtide.providers.daytona.access import Connection
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.hosted import backoff, was_lost
from lowtide.providers.inside import Answer, program

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse, WSMessage
    from daytona import AsyncSandbox

LONGEST_FIRST = 100_000
"""The kernel takes no variable of more than 128 KiB."""
_EXECUTE_SECONDS = 10.0
_TRIES = 5
_PIECE = 256 << 10
_HEARTBEAT_SECONDS = 30.0
_CLOSE_SECONDS = 2.0
_NOISE = 64 << 10


@dataclass(slots=True)
class Way:
    """How to reach one server in one sandbox. Whoever knows the name and not the key is not heard."""

    working_dir: str | None
    fresh: bool = False
    """Nothing has run in the sandbox yet that could see what `execute` is told."""
    reusable: bool = False
    """The server answered in full and may be used by the next client. One that failed is never asked again."""
    name: str = field(default_factory=lambda: secrets.token_hex(10))
    key: bytes = field(default_factory=program.new_key)


class Terminal:
    """Implements `inside.Channel` over a terminal's WebSocket."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._begun = b""
        self._closing: asyncio.Task[None] | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
            await self._socket.send_bytes(data[at : at + _PIECE])

    async def receive(self) -> bytes:
        begun, self._begun = self._begun, b""
        if begun:
            return begun
        while (data := _bytes_of(await self._socket.receive())) == b"":
            pass
        return data or b""

    async def until(self, mark: bytes) -> bytes:
        """What came before it: a shell's noise, before it is silent."""
        said = b""
        while mark not in said:
            data = await self.receive()
            if not data or len(said) > _NOISE:
                words = said[-400:].decode("utf-8", "replace").strip()
                raise errors.SandboxUnavailableError(f"the terminal does not answer: {words or 'it ended'}")
            said += data
        before, _, self._begun = said.partition(mark)
        return before

    def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._socket.close()
        finally:
            self.closed.set_result(None)


def _bytes_of(message: WSMessage) -> bytes | None:
    """None at the end; empty for what is said about the terminal and not by it."""
    from aiohttp import WSMsgType

    if message.type is WSMsgType.BINARY:
        return bytes(message.data)
    if message.type is not WSMsgType.TEXT:
        return None
    try:
        said = json.loads(message.data)
        if said["type"] == "control":
            return b"" if said["status"] == "connected" else None
    except (ValueError, TypeError, KeyError):
        pass
    return str(message.data).encode()


async def ask_once(sandbox: AsyncSandbox, way: Way, first: bytes) -> Answer | None:
    """The program, what it is told first, and what comes of it, in one request.

    Sent again when its answer is lost: the program knows what it was told before by its place in the stream.
    None: the sandbox has another processor than most.
    """
    text = _EXECUTED.format(
        first=program.FIRST, enter=_enter(way), name=way.name, program=program.encoded("x86_64")
    )
    for tries, delay in enumerate(backoff(0.05, 1.0), 1):
        try:
            asking = sandbox.process.exec(text, env={program.FIRST: first.decode("ascii")})
            answer = await SERVICE.call(_EXECUTE_SECONDS, asking, "the first command", sandbox.id)
            break
        except errors.LowtideError as error:
            if not was_lost(error) or tries == _TRIES:
                raise
            await asyncio.sleep(delay)
    said = answer.result or ""
    if f"\n{said}".find("\n~") >= 0:
        way.reusable = True
        return Answer(said.encode())
    if "xec format error" in said:
        return None
    raise errors.SandboxUnavailableError(
        f"the program could not be started in the sandbox: {said[-400:].strip() or 'it ended'}",
        retryable=False,
    )


async def open_terminal(connection: Connection, sandbox: AsyncSandbox, way: Way, first: bytes) -> Terminal:
    """A shell on a terminal of its own that becomes the program. It gets the rest when it is silent."""
    session, headers = await connection.session()
    address = f"{str(sandbox.toolbox_proxy_url).rstrip('/')}/{quote(sandbox.id)}/process/pty/create-connect"
    name, mark = f"lowtide-{secrets.token_hex(10)}", secrets.token_hex(10)
    socket = await session.ws_connect(
        f"{address}?id={name}&cols=80&rows=24",
        headers=headers,
        heartbeat=_HEARTBEAT_SECONDS,
        max_msg_size=0,
    )
    channel = Terminal(socket)
    script = _TYPED.format(begin=mark[:10], end=mark[10:], enter=_enter(way), name=way.name)
    try:
        # Typed text is echoed, so the mark is spelled in two halves; a history keeps no line that begins so.
        await channel.send(f" exec /bin/sh -c {shlex.quote(script)}\n".encode())
        await channel.until(mark.encode())
        machine = (await channel.until(b";"))[:20].decode("ascii", "replace")
        text, size = program.encoded(machine, provider="daytona").encode(), len(program.program(machine))
        await channel.send(b"%d %d\n" % (len(text), size) + text + first)
    except BaseException as error:
        channel.close()
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):  # a shell that waits there for nobody
                await SERVICE.within(_CLOSE_SECONDS, sandbox.process.kill_pty_session(name), "end a terminal")
        raise
    return channel


# The program's file is a new one, and the program removes it as soon as it runs. The second text is on its
# standard input: what is to be said, to its end.
_EXECUTED = """f=${first} p="${{TMPDIR:-/tmp}}/.lowtide-{name}-$$"
unset {first};set -C
{enter}base64 -d >"$p" <<'P' && chmod 700 "$p" && exec "$p" serve {name} text once own <<F
{program}
P
$f
F
"""
# A shell whose connection is lost before it has the program sees an end after ten seconds.
_TYPED = """stty raw -echo min 0 time 100;printf '%s%s%s;' {begin} {end} "$(uname -m)"
p="${{TMPDIR:-/tmp}}/.lowtide-{name}-$$";unset TERM;set -C
{enter}read -r n m;dd bs="$n" count=1 iflag=fullblock 2>/dev/null|base64 -d >"$p" 2>/dev/null
[ "$(wc -c <"$p")" -eq "$m" ]&&chmod 700 "$p"&&exec "$p" serve {name} text own
rm -f "$p" """


def _enter(way: Way) -> str:
    if way.working_dir is None:
        return ""
    where = shlex.quote(way.working_dir)
    return f"cd -- {where} 2>/dev/null||{{ mkdir -p -- {where}&&cd -- {where};}}||exit 126\n"
