"""What runs inside the sandbox as one interpreter context: code in as JSON lines, output out as JSON lines.

It is handed to ``python -c`` as text. Its own stream is a copy of standard output; what code prints, and
what its child processes print, is caught and told apart.
"""

import ast
import builtins
import codecs
import io
import json
import linecache
import os
import select
import sys
import threading
import traceback
from typing import Any

PIPE_BYTES = 1 << 20  # the most that a pipe holds, unless its user is root
PIECE = 1 << 16  # characters of a text in one line: whoever reads the lines bounds them
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
        for at in range(0, len(text), PIECE):
            tell(type=self.stream, text=text[at : at + PIECE])
        return len(text)

    def fileno(self) -> int:
        return self.number


class Caught:
    """What is written to a descriptor itself, by child processes too: told as it comes."""

    def __init__(self, name: str, number: int) -> None:
        self.stream, self.lock = name, threading.Lock()
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.read, write = os.pipe()
        os.set_blocking(self.read, False)
        os.dup2(write, number)
        os.close(write)
        threading.Thread(target=self.pump, daemon=True).start()

    def pump(self) -> None:
        poll = select.poll()
        poll.register(self.read, select.POLLIN)
        while self.tell():
            poll.poll()

    def tell(self) -> bool:
        """What there is by now. Locked, so that what is not there any more has been told. False: no more can come."""
        with self.lock:
            try:
                data = os.read(self.read, PIPE_BYTES)
            except BlockingIOError:
                return True
            text = self.decoder.decode(data, final=not data)
            for at in range(0, len(text), PIECE):
                tell(type=self.stream, text=text[at : at + PIECE])
            return bool(data)


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
        name, value, trace = type(error).__name__, str(error), "".join(frames.format())
        tell(type="error", name=name[:PIECE], value=value[:PIECE], traceback=trace[-PIECE:])


def main() -> None:
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    caught = [Caught("stdout", 1), Caught("stderr", 2)]
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
            for stream in caught:
                stream.tell()
        except KeyboardInterrupt:
            pass
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
        tell(type="done")


if __name__ == "__main__":
    main()
