"""The shell text that runs around a command in a pod, because the exec API alone is not enough.

A pod's exec takes a command and streams, no more. What is missing is made here, with a shell and
nothing else, so that it is the same on every server version:

* working directory and environment: sent on standard input, so that no value ever stands in the
  request's address (where audit logs would keep it) or in a process title;
* the end of standard input, which protocol v4 cannot say (kubernetes 89899): input goes in frames of
  a stated length, and a frame of length 0 is the end;
* an output that is never cut (kubernetes 124571): after the command the shell writes its exit code
  as a mark into both streams and lives on until this end has read them;
* the whole process tree: the command starts with a unique value in the unused limit
  ``RLIMIT_LOCKS``. Every descendant inherits it, through setsid, double fork and an emptied
  environment, and it can be read from /proc without any right.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field

from lowtide.providers import tagged
from lowtide.providers.base import ProcessSpec, TerminalSize

# All that appears in the request: read one line, run it. The line has everything else.
BOOT = ("/bin/sh", "-c", 'IFS= read -r S && eval "$S"')
FRAME_BYTES = 1 << 20

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A signal to the command's group reaches the shell around it too; caught, it goes on to report.
_CATCH = "trap : 1 2 3 4 5 6 7 8 10 11 12 13 14 15 16 20 21 22 24 25 26 27 29 30 31"
_IGNORE = "trap '' 1 2 3 10 12 13 14 15"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """The marks of one command: what its streams are searched for, and what finds its processes."""

    mark: str = field(default_factory=lambda: f"\x1elt-{secrets.token_hex(10)}")
    tag: int = field(default_factory=tagged.new_tag)

    def boot_tty(self) -> tuple[str, ...]:
        """Like BOOT, on a terminal: silent and raw while the line comes, so that nothing echoes or is cut at 4096."""
        ready = f"printf '%s?;' {quoted(self.mark)}"
        return (
            "/bin/sh",
            "-c",
            f'T=$(stty -g) && stty raw -echo;{ready};IFS= read -r S && stty "$T" && eval "$S"',
        )

    def command(self, spec: ProcessSpec) -> bytes:
        """The line for one command."""
        run = f"({tagged.enter(self.tag)};{_entered(spec)};exec {_exec(spec)}) 2>&4 4>&-"
        if spec.tty is not None:
            return self._line(
                f"{_CATCH};{_size(spec.tty)};{self._begin()};{run};{self._end(tty=True)};{self._hold()}"
            )
        if not spec.stdin:
            return self._line(f"{_CATCH};{self._begin()};{run} </dev/null;{self._end()};{self._hold()}")
        # The right side of the pipe reports; the left one may still be waiting for input by then.
        return self._line(
            f"{_CATCH};{self._begin()};{{ {_IGNORE};{self._feed()}; }} | {{ {_CATCH};{run};{self._end()}; }};{self._hold()}"
        )

    def text(self, script: str) -> bytes:
        """The line for a script of ours that reads the frames itself (`frame` and `F` as in `feed`)."""
        return self._line(
            f"{_CATCH};{self._begin()};({tagged.enter(self.tag)};{script}) 2>&4 4>&-;{self._end()};{self._hold()}"
        )

    def quit(self) -> bytes:
        """What lets the shell go once both marks have been read: one line for the feeder, one for the shell."""
        return f"q\nQ{self.mark}\n".encode()

    def _line(self, text: str) -> bytes:
        # One line carries it all: a newline inside a value is spelled by the variable N.
        if "\n" in text:
            text = "N=$(printf '\\n_');N=${N%_};" + text.replace("\n", "'\"$N\"'")
        return text.encode("utf-8", "surrogateescape") + b"\n"

    def _begin(self) -> str:
        # The shell's own standard error goes nowhere: it would say "Killed" where the command said nothing.
        return f"exec 4>&2 2>/dev/null;M={quoted(self.mark)};printf '%s+%s;' \"$M\" $$"

    def _end(self, *, tty: bool = False) -> str:
        errors = "" if tty else "printf '%s=%s;' \"$M\" $C >&4;"
        return f"C=$?;{errors}printf '%s=%s;' \"$M\" $C"

    def _hold(self) -> str:
        return 'while IFS= read -r F;do [ "$F" = "Q$M" ] && exit 0;done'

    def _feed(self) -> str:
        # After the reader has closed its end, say so once; what was under way is dropped.
        broken = "{ printf '%s!;' \"$M\" >&4;exit 0; }"
        return f"while IFS= read -r F;do case $F in 0|q) exit 0;;esac;{FRAME}||{broken};done"


# Exactly the bytes of one frame, nothing of the next: dd reads what it is told, where head may read ahead.
FRAME = "dd bs=$F count=1 iflag=fullblock 2>/dev/null"


def frames(data: bytes) -> list[bytes]:
    return [
        b"%d\n" % len(part) + part
        for part in (data[start : start + FRAME_BYTES] for start in range(0, len(data), FRAME_BYTES))
    ]


LAST_FRAME = b"0\n"


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def signal(group: int, number: int, tag: int) -> str:
    """To the command's group; SIGKILL one by one, because the shell that reports the exit code is in it too."""
    if number != 9:
        return f"kill -s {number} -- -{group} 2>/dev/null;exit 0"
    return f"{tagged.ALIVE};n=0;while alive {tag} {group} && [ $n -lt 200 ];do kill -9 $P 2>/dev/null;n=$((n+1));sleep 0.01;done;exit 0"


def _entered(spec: ProcessSpec) -> str:
    steps = [
        f"export {name}={quoted(value)}"
        for name, value in spec.environment.items()
        if _IDENTIFIER.fullmatch(name)
    ]
    if spec.tty is not None and "TERM" not in spec.environment:
        steps.append('export TERM="${TERM:-xterm-256color}"')
    if spec.cwd is not None:
        steps.append(f"cd -- {quoted(spec.cwd)}||exit 126")
    return ";".join(steps) or ":"


def _exec(spec: ProcessSpec) -> str:
    # Names a shell has no variable for (with a dot or a dash) go through env.
    odd = [f"{name}={value}" for name, value in spec.environment.items() if not _IDENTIFIER.fullmatch(name)]
    argv = ["env", *odd, *spec.argv] if odd else list(spec.argv)
    return " ".join(quoted(part) for part in argv)


def _size(size: TerminalSize) -> str:
    return f"stty cols {size.columns} rows {size.rows}"
