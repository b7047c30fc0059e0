"""What runs inside the sandbox as one interpreter context: code in as JSON lines, output out as JSON lines.

It is handed to ``python -c`` as text. Its own stream is a copy of standard output; what code prints, and
what its child processes print, is caught and told apart.
"""

import ast
import builtins
import fcntl
import io
import json
import linecache
import os
import struct
import sys
import termios
import threading
import time
import traceback
from typing import Any

FIONREAD_SIZE = struct.pack("i", 0)
told = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
os.set_inheritable(told.fileno(), False)
telling = threading.Lock()


def tell(**said: Any) -> None:
    with telling:
        told.write(json.dumps(said) + "\n")
        told.flush()


class Printed(io.TextIOBase):
    """sys.stdout and sys.stderr of the code."""

    encoding = "utf-8"

    def __init__(self, name: str, number: int) -> None:
        self.stream, self.number = name, number

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            tell(type=self.stream, text=text)
        return len(text)

    def fileno(self) -> int:
        return self.number


def catch(name: str, number: int) -> int:
    """What is written to the descriptor itself is told as well. Returns the end that is read."""
    read, write = os.pipe()
    os.dup2(write, number)
    os.close(write)

    def pump() -> None:
        while data := os.read(read, 65536):
            tell(type=name, text=data.decode("utf-8", "replace"))

    threading.Thread(target=pump, daemon=True).start()
    return read


def drained(reads: list[int]) -> None:
    for _ in range(200):
        left = [struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, FIONREAD_SIZE))[0] for fd in reads]
        if not any(left):
            break
        time.sleep(0.005)


def run(code: str, space: dict[str, Any], number: int) -> None:
    name = f"<run {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        exec(compile(ast.parse(code, name), name, "exec"), space)  # noqa: S102 - what this is for
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        frames = traceback.TracebackException.from_exception(error)
        frames.stack = traceback.StackSummary.from_list([f for f in frames.stack if f.filename != "<string>"])
        tell(type="error", name=type(error).__name__, value=str(error), traceback="".join(frames.format()))


def main() -> None:
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    reads = [catch("stdout", 1), catch("stderr", 2)]
    sys.stdout, sys.stderr = Printed("stdout", 1), Printed("stderr", 2)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    number = 0
    while True:
        try:
            line = asked.readline()
        except KeyboardInterrupt:
            continue
        if not line:
            return
        one = json.loads(line)
        before = {key: os.environ.get(key) for key in one["envs"]}
        number += 1
        try:
            os.environ.update(one["envs"])
            run(one["code"], space, number)
            drained(reads)
        except KeyboardInterrupt:
            pass
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        tell(type="done")


if __name__ == "__main__":
    main()
