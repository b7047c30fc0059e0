"""Messages: one packet of JSON each, with descriptors beside it."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is a tenth of the start-up
    from typing import Any

    Fds = list[int]
    Message = dict[str, Any]
else:
    Fds, Message = list, dict


def send(sock: int, message: Message, fds: Fds = []) -> None:  # noqa: B006
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    out = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, os.dup(sock))
    with out, contextlib.suppress(OSError):  # nobody waits for it any more
        out.sendmsg([json.dumps(message).encode()], ancillary, socket.MSG_NOSIGNAL)


def failure(sock: int, error: BaseException) -> None:
    code = error.errno if isinstance(error, OSError) else None
    send(sock, {"errno": code or errno.EIO, "why": f"{error}"})


def complain(fd: int, error: BaseException) -> None:
    if isinstance(error, OSError) and error.filename:
        text = f"lowtide: {os.fsdecode(error.filename)}: {error.strerror}\n"
    else:
        text = f"lowtide: {error}\n"
    with contextlib.suppress(OSError):
        os.write(fd, text.encode("utf-8", "surrogateescape"))


def receive(control: socket.socket) -> tuple[Message, Fds] | None:
    data, ancillary, _, _ = control.recvmsg(65536, 1024, socket.MSG_CMSG_CLOEXEC)
    fds: Fds = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.extend(array.array("i", payload))
    if not data:
        return None
    if data == b"M":  # too long for one packet: it is in a memory file
        with os.fdopen(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return json.loads(data), fds
