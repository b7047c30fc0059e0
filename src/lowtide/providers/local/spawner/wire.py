"""Messages: one packet of JSON each, with descriptors beside it."""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
import time

# Too many descriptors of this user are under way, or the kernel is short of memory: both pass.
MAY_PASS = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN)
NOBODY_WAITS = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
SEND_AGAIN_SECONDS = (0.001, 0.01, 0.05, 0.2, 0.5, 0.5)

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is a tenth of the start-up
    from typing import Any

    Fds = list[int]
    Message = dict[str, Any]
else:
    Fds, Message = list, dict


def send(sock: int, message: Message, fds: Fds = []) -> None:  # noqa: B006
    """What cannot be sent with its descriptors is said without them: whoever waits gets an answer in any case."""
    data = json.dumps(message).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    out = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, sock)  # no copy: no descriptor may be left
    try:
        for pause in SEND_AGAIN_SECONDS:
            try:
                out.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
                return
            except OSError as error:
                if error.errno in NOBODY_WAITS:
                    return
                if error.errno not in MAY_PASS:
                    raise
                trouble = error
                time.sleep(pause)
        if not fds:
            raise trouble
        code = trouble.errno or errno.EIO
        data = json.dumps(
            {"errno": code, "why": f"a descriptor cannot be handed out: {trouble.strerror}"}
        ).encode()
        with contextlib.suppress(OSError):
            out.sendmsg([data], [], socket.MSG_NOSIGNAL)
    finally:
        out.detach()


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


class Cut(Exception):
    """A message came without all of its descriptors: this process has as many as it may. `fds` are those that came."""

    def __init__(self, fds: Fds) -> None:
        super().__init__("no descriptor is left")
        self.fds = fds


def receive(control: socket.socket) -> tuple[Message, Fds] | None:
    try:
        data, ancillary, flags, _ = control.recvmsg(65536, 1024, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    fds: Fds = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.extend(array.array("i", payload))
    if flags & socket.MSG_CTRUNC:
        raise Cut(fds)
    if not data:
        return None
    if data == b"M":  # too long for one packet: it is in a memory file
        with os.fdopen(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return json.loads(data), fds
