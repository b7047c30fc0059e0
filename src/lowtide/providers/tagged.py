"""A command's whole process tree, found and ended from inside a sandbox with nothing but a shell.

A command starts with a unique value in the limit ``RLIMIT_LOCKS``, which Linux has not looked at since
2.4. Every descendant inherits it, through setsid, double fork, sudo and an emptied environment, and
/proc shows it to everybody. For providers whose own kill reaches one process only.
"""

from __future__ import annotations

import secrets

ALIVE = (
    'alive() { P=;for f in $(grep -l "^Max file locks  *$1 " /proc/[0-9]*/limits 2>/dev/null);do '
    'd=${f%/limits};s=;{ read -r s <"$d/stat"; } 2>/dev/null||continue;s=${s##*") "};'
    'case $s in Z*|X*) continue;;esac;g=${s#* * };g=${g%% *};[ -z "$2" ]||[ "$g" = "$2" ]||continue;'
    'P="$P ${d#/proc/}";done;[ -n "$P" ]; }'
)
"""A shell function, in one line: P becomes the living processes with the tag $1, in process group $2 where given."""


def new_tag() -> int:
    """Greater than any limit that somebody would set."""
    return (1 << 52) + secrets.randbits(52)


def enter(tag: int | str) -> str:
    """Tag the shell that runs this, and with it all that it starts."""
    return f"ulimit -w {tag} 2>/dev/null||ulimit -x {tag} 2>/dev/null"


def terminate(tag: int, grace_seconds: float) -> str:
    """TERM, grace, KILL to everything with the tag. Exit code 1: something could not be killed."""
    turns = max(0, round(grace_seconds * 50))
    return (
        f"{ALIVE};alive {tag}||exit 0;kill -15 $P 2>/dev/null;kill -18 $P 2>/dev/null;n=0;"
        f"while [ $n -lt {turns} ]&&alive {tag};do sleep 0.02;n=$((n+1));done;n=0;"
        f"while alive {tag};do [ $n -lt 200 ]||exit 1;kill -9 $P 2>/dev/null;sleep 0.01;n=$((n+1));done;exit 0"
    )
