"""The shell text that runs around a command in the sandbox, because the daemon's own start is not enough.

A session's log is text, kept line by line, with the two streams told apart by control characters in
between. What is missing is made here, with a POSIX shell and the tools that busybox has too:

* every byte, as it comes: each stream goes through base64, one line for each read;
* an end that waits for nobody: the shell writes the exit code as a mark into both streams as soon as
  the command has ended, whoever still holds them;
* a standard input with an end and without a second delivery: input comes in numbered frames of a stated
  length, a number that was seen is dropped, length 0 is the end;
* a session and process group of the command's own, for signals;
* the whole process tree: the command starts with a unique value in the unused limit ``RLIMIT_LOCKS``.
  Every descendant inherits it, through setsid, double fork and an emptied environment, and /proc shows it.

Where the sandbox has Perl, as Debian and Ubuntu always do, one process does all of this (`pump.pl`); the
shell alone does the same with a few processes for each read.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lowtide.providers import tagged
from lowtide.providers.base import ProcessSpec

FRAME_BYTES = 192 << 10

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_ENTER = f"""M=$1 T=$2 D=$3 W=$4;shift 4
enter() {{
{tagged.enter("$T")}
if [ -n "$D" ];then cd -- "$D"||exit 126
elif [ -n "$W" ];then cd -- "$W" 2>/dev/null||{{ mkdir -p -- "$W"&&cd -- "$W"; }}||exit 126
fi
}}
"""
# The shell's own standard error goes nowhere: it would say "Killed" where the command said nothing.
_RUN = """S=;command -v setsid >/dev/null&&S=setsid
enc() { while c=$(dd bs=65536 count=1 2>/dev/null|base64 -w 0)&&[ -n "$c" ];do printf '%s\\n' "$c";done; }
run() (read -r P _ </proc/self/stat;printf '%s+%s;' "$M" "$P";enter 2>&6;exec 2>&6 6>&-;ENVIRONMENT exec $S "$@")
main() { exec 6>&2 2>/dev/null;run "$@";C=$?;printf '%s=%s;' "$M" $C >&6;printf '%s=%s;' "$M" $C; }
"""
_FEED = """feed() { L=0 B=;while IFS=' ' read -r q l;do [ -n "$l" ]||continue;[ "$l" = 0 ]&&exit 0
if [ -n "$B" ]||[ "$q" -le $L ];then dd bs=$l count=1 iflag=fullblock >/dev/null 2>&1;continue;fi;L=$q
dd bs=$l count=1 iflag=fullblock 2>/dev/null|base64 -d 2>/dev/null||{ B=1;printf '%s!;' "$M" >&5; };done; }
"""
# Standard output goes through the inner pipe to the session's, standard error through the outer one (5).
_PIPES = """exec 3>&1 4>&2
{ { INPUT main "$@" 2>&5 3>&- 4>&- 5>&-; }|enc >&3 5>&-; } 5>&1|enc >&4
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """The marks of one command: what its streams are searched for, and what finds its processes."""

    mark: str = field(default_factory=lambda: f"\x1elt-{secrets.token_hex(10)}")
    tag: int = field(default_factory=tagged.new_tag)

    @property
    def ready(self) -> str:
        """What a terminal says when it is silent and waits for the command."""
        return self.mark.lstrip("\x1e") + "?;"

    def pumped(self, spec: ProcessSpec, working_dir: str | None) -> str:
        """What the session is told to run where there is Perl. Where there is none, nothing runs."""
        child = f'{_ENTER}printf \'%s+%s;\' "$M" $$;enter;{_exported(spec)}exec "$@"'
        stdin = "1" if spec.stdin else "''"
        return f"PERL_BADLANG=0 perl -e {perl('streams', 'pump')} {quoted(self.mark)} {stdin} {self._shell(child, spec, working_dir)}"

    def command(self, spec: ProcessSpec, working_dir: str | None) -> str:
        """The same with a shell alone: any shell a session may have."""
        script = _ENTER + _RUN.replace("ENVIRONMENT ", _exported(spec))
        if spec.stdin:
            script += _FEED + _PIPES.replace("INPUT", "feed|")
        else:
            script += _PIPES.replace("INPUT", "</dev/null")
        return self._shell(script, spec, working_dir)

    def on_terminal(self, spec: ProcessSpec, working_dir: str | None) -> tuple[str, str]:
        """For a terminal: a first line that makes it silent and asks, and the line that answers.

        Typed text is echoed, so the first line spells the mark in two halves. The second may be longer
        than a terminal's line, so the terminal is raw while it comes.
        """
        half = len(self.ready) // 2
        said = f"printf %s%s '{self.ready[:half]}' '{self.ready[half:]}'"
        first = f'T=$(stty -g) && stty raw -echo;{said};IFS= read -r S && stty "$T" && eval "$S"'
        script = (
            _ENTER
            + "read -r P _ </proc/self/stat;enter\n"
            + _exported(spec)
            + 'printf \'%s+%s;\' "$M" "$P";exec "$@"'
        )
        packed = base64.b64encode(self._shell(script, spec, working_dir).encode()).decode()
        return f"exec /bin/sh -c {quoted(first)}\n", f'eval "exec $(echo {packed}|base64 -d)"\n'

    def _shell(self, script: str, spec: ProcessSpec, working_dir: str | None) -> str:
        odd = [
            f"{name}={value}" for name, value in spec.environment.items() if not _IDENTIFIER.fullmatch(name)
        ]
        argv = ("env", *odd, *spec.argv) if odd else spec.argv
        given = (self.mark, str(self.tag), spec.cwd or "", working_dir or "", *argv)
        return f"/bin/sh -c {quoted(script)} sh {' '.join(map(quoted, given))}"


@cache
def perl(*names: str) -> str:
    """The Perl programs of these names, one after the other, as one word for a shell."""
    kept = []
    for name in names:
        for line in (Path(__file__).parent / f"{name}.pl").read_text().splitlines():
            code = re.sub(r"(^|\s+)#.*", "", line.strip())
            if code:
                kept.append(code)
    return quoted("\n".join(kept))


def frame(number: int, data: bytes) -> str:
    """One piece of standard input."""
    packed = base64.b64encode(data).decode()
    return f"{number} {len(packed)}\n{packed}\n"


def last_frame(number: int) -> str:
    return f"{number} 0\n"


def alone(script: str) -> str:
    """A script of ours for the daemon's plain exec, which may or may not go through a shell."""
    return f'/bin/sh -c "echo {base64.b64encode(script.encode()).decode()}|base64 -d|/bin/sh"'


def signal(leader: int, number: int, tag: int) -> str:
    """To the command's process group; nothing when it has ended."""
    return f"{tagged.ALIVE};alive {tag} {leader}&&kill -s {number} -- $P 2>/dev/null;exit 0"


def quoted(text: str) -> str:
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return "'" + text.replace("'", "'\\''") + "'"
    # The request carries text only: bytes that are none are spelled out. The x keeps last newlines.
    spelled = "".join(f"\\0{byte:03o}" for byte in text.encode("utf-8", "surrogateescape"))
    return f'"$(x=$(printf %b \'{spelled}x\');printf %s "${{x%x}}")"'


def _exported(spec: ProcessSpec) -> str:
    steps = [
        f"export {name}={quoted(value)}"
        for name, value in spec.environment.items()
        if _IDENTIFIER.fullmatch(name)
    ]
    if spec.tty is not None and "TERM" not in spec.environment:
        steps.append('export TERM="${TERM:-xterm-256color}"')
    return "".join(step + ";" for step in steps)
