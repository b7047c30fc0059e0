"""The frames between client and program: kinds, layout, bounds. `inside.c` has the same list."""

from __future__ import annotations

import struct

START, INPUT, INPUT_END, SIGNAL, END, CREDIT, RESIZE, RENEW, FORGET, BYE, SETTLE, LOG = range(1, 13)
STDOUT, STDERR, EXITED, STARTED, INPUT_BROKEN, INPUT_TAKEN, REFUSED, ENDED, RENEWED, LEFT = range(1, 11)

WANTS_INPUT, TERMINAL, CALL = 1, 2, 4
UNKNOWN_USER = 1000
STREAMS_OPEN = 0x100  # beside an exit code: others held its streams when they were let go
NOT_KEPT, SO_FAR = b"\0", b"\1"  # on a log's second stream: what was here is gone; this was all when asked

HEAD = struct.Struct("<LBL")
NUMBER = struct.Struct("<L")
SIZE = struct.Struct("<HH")
START_HEAD = struct.Struct("<BHHHH")

INPUT_WINDOW = 256 * 1024  # of standard input on its way to one command
PIECE = 32 * 1024
LOG_KEPT = 1024 * 1024  # of what the main command printed
MOST_UNREAD = 8 * 1024 * 1024  # of one command's output: far more than the other side has credit for
REPAY = 256 * 1024  # of output read before the other side hears of it
LONGEST = 3 * 1024 * 1024  # of one frame
COMMANDS = 1000  # at once; inside.c has room for a few more


def frame(kind: int, number: int, data: bytes = b"") -> bytes:
    return HEAD.pack(len(data) + 5, kind, number) + data


def value(data: bytes) -> int:
    return int(NUMBER.unpack(data[:4])[0]) if len(data) >= 4 else 0
