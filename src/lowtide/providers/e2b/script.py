"""The shell text that runs around a command in the sandbox, because envd's own start is not enough.

envd starts a process and says how it ended. What is missing is made here, with the shells that every
template has (E2B's SDK itself needs bash):

* an end that waits for nobody: envd ends a command's output when the last holder of its streams is
  gone. So the shell writes the exit code as a mark into both streams as soon as the command has ended;
* a standard input that breaks when the command closes its own (the shell holds no copy);
* the whole process tree: the command starts with a unique value in the unused limit ``RLIMIT_LOCKS``.
  Every descendant inherits it, through setsid, double fork and sudo, and /proc shows it to everybody.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from lowtide.providers import tagged
from lowtide.providers.base import ProcessSpec

SH, BASH = "/bin/sh", "/bin/bash"
_FLAGS = ("--noprofile", "--norc", "-p", "-c")  # -p: the command's BASH_ENV and functions are not the shell's

_BEGIN = f"""M=$1 T=$2 D=$3 W=$4;shift 4
exec 3>&2 2>/dev/null
enter() {{
{tagged.enter("$T")}
exec 2>&3 3>&-
if [ -n "$D" ];then cd -- "$D"||exit 126
elif [ -n "$W" ];then cd -- "$W" 2>/dev/null||{{ mkdir -p -- "$W"&&cd -- "$W"; }}||exit 126
fi
}}
"""
_END = """printf '%s=%s;' "$M" $C >&3
printf '%s=%s;' "$M" $C
exit $C"""
_PLAIN = f"""{_BEGIN}(enter;exec "$@");C=$?
{_END}"""
# With an input the shell must not hold a copy of it, so the command goes into the background; only bash
# does that without making it deaf to Ctrl+C. `wait` also returns when the command is stopped. `wait -f`
# would not, but now and then misses the end (bash 5.2: two of 600 under load never return).
_FED = f"""{_BEGIN}set -m
(enter;exec -- "$@") &
P=$!
exec </dev/null
wait $P;C=$?
while [ $C -gt 128 ]&&kill -0 $P;do sleep 0.05;wait $P;C=$?;done
{_END}"""
# On a terminal the command takes the shell's own place: it leads the session and has the terminal.
_TTY = _BEGIN + 'enter;exec -- "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """The marks of one command: what its streams are searched for, and what finds its processes."""

    mark: str = field(default_factory=lambda: f"\x1elt-{secrets.token_hex(10)}")
    tag: int = field(default_factory=tagged.new_tag)

    def command(self, spec: ProcessSpec, working_dir: str | None) -> list[str]:
        """The shell to start, with its arguments."""
        given = [self.mark, str(self.tag), spec.cwd or "", working_dir or "", *spec.argv]
        odd = any(_is_odd(word) for word in given)
        if spec.tty is None and not spec.stdin and not odd:
            return [SH, "-c", _PLAIN, "sh", *given]
        script = _TTY if spec.tty is not None else _FED
        if odd:
            # The protocol carries text only; names that are none are spelled out in the script.
            return [BASH, *_FLAGS, f"set -- {' '.join(map(_spelled, given))}\n{script}", "sh"]
        return [BASH, *_FLAGS, script, "sh", *given]


def plain(script: str, *arguments: str) -> list[str]:
    """A script of ours, alone."""
    if any(_is_odd(word) for word in arguments):
        return [BASH, *_FLAGS, f"set -- {' '.join(map(_spelled, arguments))}\n{script}", "sh"]
    return [BASH, *_FLAGS, script, "sh", *arguments]


def signal(shell: int, number: int, tag: int, *, tty: bool) -> str:
    """To those of the command's processes that are still in its group; nothing when it has ended.

    One by one, because the group may be shared with other commands. Exit code 1: it is there, but this
    user may not.
    """
    leader = f"G={shell}" if tty else f'G=$(group {shell});[ -n "$G" ]||exit 0'
    return (
        f"{tagged.ALIVE}\n{_GROUP}\nalive {tag}||exit 0;{leader};C=0\n"
        f'for p in $P;do [ "$(of $p 3)" != "$G" ]||kill -s {number} $p||{{ [ ! -d /proc/$p ]||C=1; }};done;exit $C'
    )


# `of PID N`: state, parent, group. `group SHELL`: the group of the one of them that the shell started.
_GROUP = """of() { local s n=$2;{ read -r s </proc/$1/stat; } 2>/dev/null||return;set -- ${s##*") "};echo "${!n}"; }
group() { local p;for p in $P;do [ "$(of $p 2)" != "$1" ]||{ of $p 3;return; };done; }"""


def _is_odd(word: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in word)


def _spelled(word: str) -> str:
    if not _is_odd(word):
        return "'" + word.replace("'", "'\\''") + "'"
    return "$'" + "".join(f"\\x{byte:02x}" for byte in word.encode("utf-8", "surrogateescape")) + "'"
