"""A process of envd's: start it, follow its events, read its end.

Through the SDK's generated client, one step below ``commands.run``: that one takes the bytes apart
into text, and loses those that are none.
"""

from __future__ import annotations

import contextlib
import signal as signals
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.base import TerminalSize

if TYPE_CHECKING:
    from lowtide.providers.e2b.sdk import LazySandbox

_KEEPALIVE_SECONDS = 50
_SAID_BYTES = 64 << 10


async def alone(box: LazySandbox, command: list[str], *, user: str | None) -> tuple[int, bytes]:
    """Run a command to its end: its exit code, and what it said on standard error."""
    events = events_of(box, command, user=user)
    said = bytearray()
    try:
        await started(box, events)
        async for event in events:
            payload = event.event.event if event.event is not None else None
            if payload is None:
                continue
            if payload.field == "data" and payload.value.output.field == "stderr":
                said += payload.value.output.value[: _SAID_BYTES - len(said)]
            elif payload.field == "end":
                return exit_code(payload.value), bytes(said)
    finally:
        await closed(events)
    raise errors.SandboxUnavailableError("the stream of a command ended before it", provider="e2b")


def events_of(
    box: LazySandbox,
    command: list[str],
    *,
    environment: dict[str, str] | None = None,
    user: str | None = None,
    stdin: bool = False,
    tty: TerminalSize | None = None,
) -> AsyncGenerator[Any, Any]:
    """The stream of a new process; nothing is sent before its first event is asked for."""
    from e2b.envd.client_async import as_stream
    from e2b.envd.process import process_pb
    from e2b.envd.utils import authentication_header

    config = process_pb.ProcessConfig(cmd=command[0], args=command[1:], envs=environment or {})
    request = process_pb.StartRequest(process=config, stdin=stdin)
    if tty is not None:
        size = process_pb.PTY.Size(rows=tty.rows, cols=tty.columns)
        request = process_pb.StartRequest(process=config, pty=process_pb.PTY(size=size), stdin=True)
    headers = {
        **authentication_header(box._envd_version, user),
        "Keepalive-Ping-Interval": str(_KEEPALIVE_SECONDS),
    }
    return as_stream(box.process_rpc.start(request, headers=headers))


async def started(box: LazySandbox, events: AsyncGenerator[Any, Any]) -> int:
    """The process id, once it runs. For as long as that takes: the caller has the deadline."""
    from e2b.envd.rpc import ahandle_rpc_exception_with_health
    from e2b.envd.utils import extract_start_pid

    try:
        return int(extract_start_pid(await anext(events), "start process"))
    except BaseException as error:
        await closed(events)
        if isinstance(error, Exception):
            raise await ahandle_rpc_exception_with_health(error, box.commands._check_health) from error
        raise


async def closed(events: AsyncGenerator[Any, Any]) -> None:
    with contextlib.suppress(Exception):
        await events.aclose()


def exit_code(end: Any) -> int:
    """What envd says of the end. It names a signal in words, as Go does, and then has no exit code."""
    status = str(end.status or "")
    if status.startswith("signal: "):
        name = status.removeprefix("signal: ").removesuffix(" (core dumped)")
        return 128 + _SIGNALS.get(name, signals.SIGKILL)
    code = int(end.exit_code)
    return code if code >= 0 else 128 + signals.SIGKILL


_SIGNALS: dict[str, int] = {
    (signals.strsignal(number) or "").lower(): int(number) for number in signals.valid_signals()
} | {"trace/breakpoint trap": 5, "user defined signal 1": 10, "user defined signal 2": 12, "alarm clock": 14}
