"""The process of a proxy: ends with its sandbox, whichever process started it.

It is started with a JSON object on standard input: the policy, the process whose network it serves, and the file
for what it refuses. It writes one line to standard output, and from then on it has no parent: a sandbox may outlive
the process that created it. It joins the control groups of the sandbox's first process, so that its work counts as
the sandbox's, and watches that process by a descriptor: the proxy ends when that process has ended. If the proxy is
killed, the sandbox has no network.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from typing import Any

from lowtide.providers.network import addresses, groups
from lowtide.providers.network.denied import DeniedLog
from lowtide.providers.network.namespace import Listeners, listen
from lowtide.providers.network.policy import Policy
from lowtide.providers.network.proxy import Proxy, Queries, allow_descriptors

_NOBODY = 65534
_SET_DUMPABLE, _NO_NEW_PRIVILEGES = 4, 38


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program that ignores it starts its children so
    asked: dict[str, Any] = json.load(sys.stdin)
    policy = Policy.public_internet() if asked["allow"] is None else Policy.of(asked["allow"])
    try:
        # Opened before anything else, and checked after: the number may belong to somebody else by now.
        pidfd = os.pidfd_open(asked["pid"])
        if _start_time(asked["pid"]) != asked["start_time"]:
            raise ProcessLookupError(3, "the sandbox is gone")
        own_user = _in_another_user_namespace(asked["pid"])
        listeners = listen(pidfd, own_user=own_user, needs_ipv6=policy.needs_ipv6)
        denied = _open_denied(asked["denied"])
    except OSError as error:
        os.write(1, json.dumps({"errno": error.errno, "why": error.strerror or str(error)}).encode())
        return
    said_r, said_w = os.pipe()
    if os.fork():
        os.close(said_w)
        os.read(said_r, 1)  # until it has its name, or is gone
        return
    os.setsid()
    addresses.start_lookups()
    groups.join(asked["pid"])
    line = json.dumps({"pid": os.getpid(), "start_time": _start_time(os.getpid())}) + "\n"
    _become_nobody()
    os.write(1, line.encode())
    os.close(said_w)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    asyncio.run(serve(Proxy(policy, DeniedLog(denied)), listeners, pidfd))
    os._exit(0)  # a thread may still wait for a name server


async def serve(proxy: Proxy, listeners: Listeners, pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    for sock in listeners.streams:
        sock.setblocking(False)
        await asyncio.start_server(proxy.connection, sock=sock, limit=1 << 17)
    for sock in listeners.queries:
        sock.setblocking(False)
        await loop.create_datagram_endpoint(lambda: Queries(proxy), sock=sock)
    for sock in listeners.taps:
        sock.setblocking(False)
        loop.add_reader(sock, proxy.refuse_datagrams, sock)
    await ended.wait()
    os._exit(0)


def _open_denied(path: str | None) -> int | None:
    if path is None:
        return None
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _become_nobody() -> None:
    """It reads what hostile code writes: it keeps no right that it does not need."""
    allow_descriptors()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def _in_another_user_namespace(pid: int) -> bool:
    """An ordinary user's sandbox always is: its first process may not even be looked at."""
    if os.geteuid() != 0:
        return True
    return os.stat(f"/proc/{pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino


def _start_time(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


if __name__ == "__main__":
    main()
