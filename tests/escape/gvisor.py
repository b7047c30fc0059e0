"""What only a sandbox behind gVisor has: a channel that its root can write to, and runsc's own things around it."""

from __future__ import annotations

import time

from tests.escape.attempt import ANSWER_SECONDS, GVISOR, Target, attempt

_FLOOD = """
import struct
def host_pipes():
    for name in os.listdir("/proc/1/fd"):
        if (tried(os.readlink, "/proc/1/fd/" + name) or "").startswith("host:"):
            fd = tried(os.open, "/proc/1/fd/" + name, os.O_WRONLY)
            if fd is not None and not os.isatty(fd) and tried(os.lseek, fd, 0, 1) is None:
                yield fd
packets = struct.pack("<LQQ", 16, 0, 0) * 3276  # each says nothing at all; as many as a pipe holds
pipes = list(host_pipes())
print(len(pipes), flush=True)
for fd in pipes * 6:
    if os.fork() == 0:
        while True: os.write(fd, packets)
os.wait()
"""


@attempt(
    "keep the owner's other calls and time-outs waiting: write to the channel without an end",
    providers=(GVISOR,),
)
def flood_the_channel(target: Target) -> str | None:
    with target.make() as box, target.make() as other:
        began = time.monotonic()
        flood = target.start(_FLOOD, box=box, seconds=5)
        longest = 0.0
        while not flood.done():
            before = time.monotonic()
            other.exec(["true"]).exception(ANSWER_SECONDS)
            longest = max(longest, time.monotonic() - before)
        flood.exception(ANSWER_SECONDS)
        took = time.monotonic() - began
        return (
            f"a call took {longest:.0f} s, the time-out came after {took:.0f}"
            if max(longest, took) > 25
            else None
        )


@attempt(
    "see runsc's own things: its bundle, its state, its program, its control socket", providers=(GVISOR,)
)
def things_of_runsc(target: Target) -> str | None:
    return (
        target.python("""
import socket
for path in ("/bundle", "/run/runsc", "/runsc", "/rootfs", "/inside", "/oldroot", "/newroot"):
    if os.path.lexists(path): print(path)
for name in ("runsc-sandbox.sandbox", "sandbox", "runsc-sandbox"):
    with socket.socket(socket.AF_UNIX) as sock:
        if tried(lambda: sock.connect("\\0" + name) or True): print("the socket", name)
""")
        or None
    )


@attempt("change the program inside: write, chmod, rename, mount over it", providers=(GVISOR,))
def change_the_program(target: Target) -> str | None:
    return (
        target.python("""
path = "/dev/lowtide/inside"
if tried(os.open, path, os.O_WRONLY) is not None: print("opened")
for work, arguments in (
    (os.chmod, (path, 0o777)), (os.unlink, (path,)), (os.rename, (path, "/dev/lowtide/other")),
    (os.rename, ("/dev/lowtide", "/dev/other")), (os.setxattr, (path, "user.a", b"b")),
):
    if tried(lambda: work(*arguments) or True): print(work.__name__)
if call(165, 40, b"none", b"/dev/lowtide", b"tmpfs", 0, 0)[0] == 0: print("mounted")
""")
        or None
    )
