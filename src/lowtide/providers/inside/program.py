"""The program itself, by architecture, and how it is named and packed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import secrets
from functools import cache
from importlib import resources

from lowtide.errors import UnsupportedError

EXPIRED = 124
"""Exit code of the main process when the lease is over."""
KEY = "LOWTIDE_KEY"
"""The variable in which the main process gets the key. It takes it out before anything else runs."""
FIRST = "LOWTIDE_FIRST"
"""The variable in which `serve` gets what has to be said first, where a service's start carries no input: base64."""
LONGEST_FIRST = 90_000
"""As much as fits into one variable (128 KiB) as base64."""
READER = "65534:65534"
"""Who `attach` runs as: the program's file may be executed and not read by it, so that it is never dumpable."""

_ARCHITECTURES = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


def new_key() -> bytes:
    return secrets.token_bytes(16)


@cache
def program(architecture: str, *, provider: str | None = None) -> bytes:
    name = _ARCHITECTURES.get(architecture)
    if name is None:
        raise UnsupportedError(
            f"lowtide has no program for sandboxes on {architecture}",
            provider=provider,
            feature=f"architecture {architecture}",
            alternative="a machine with x86_64 or aarch64",
        )
    return resources.files(__package__).joinpath(f"inside.{name}").read_bytes()


@cache
def fingerprint(architecture: str) -> str:
    """Names it by its content: another version of lowtide has its own beside it."""
    return hashlib.sha256(program(architecture)).hexdigest()[:12]


@cache
def packed(architecture: str) -> str:
    """The program as text that fits into one argument."""
    return base64.b64encode(gzip.compress(program(architecture), 9, mtime=0)).decode("ascii")


def serve_line(architecture: str, name: str) -> str:
    """Bring it in and become the server `name`, and leave no file: for a sandbox in which nothing hostile runs yet."""
    path = f"/tmp/.lowtide-{name}"  # noqa: S108 - gone when the program runs
    return f"{_written(architecture, path)}&&exec {path} serve {name} own"


def text_line(architecture: str, name: str) -> str:
    """As `serve_line`, for a channel of text that may be opened anew: each try has a file of its own.

    Not by its pid: one that was cut off leaves a file that nobody may write, and after a resume pids come again.
    """
    path = f"/tmp/.lowtide-{name}-{secrets.token_hex(4)}"  # noqa: S108 - gone when the program runs
    return f"{_written(architecture, path)}&&exec {path} serve {name} text own"


def main_line(place: str, *architectures: str, small: bool = False, log: bool = False) -> str:
    """Bring it in as `place` and become the sandbox's main process: `guard`, with the words after the line's own name.

    `place` is as a shell reads it. It may be executed only when it is whole, which `attach_words` waits for.
    `small`: packed, where the line is kept and shown by the service; then the image needs gzip, too.
    `log`: it keeps what the command prints, for `inside.logs`.
    """
    text = packed if small else encoded
    unpack = "base64 -d|gzip -d" if small else "base64 -d"
    if len(architectures) == 1:
        bring = f"echo {text(architectures[0])}"
    else:
        cases = "".join(f"{'|'.join(_names(one))}) a={text(one)};; " for one in architectures)
        other = '*) echo "lowtide has no program for sandboxes on $(uname -m)" >&2; exit 1;; '
        bring = f"case $(uname -m) in {cases}{other}esac;echo $a"
    return (
        f'p={place};[ -e "$p" ]||[ -L "$p" ]&&rm -f "$p";{bring}|{unpack} >"$p"&&chmod 111 "$p"'
        f'&&exec "$p" guard {"log " if log else ""}"$@"'
    )


def attach_words(place: str) -> tuple[str, ...]:
    """Become a channel to the main process of `main_line`, which may have started only a moment ago."""
    line = (
        f'p={place};n=0;until [ -x "$p" ];do n=$((n+1));[ $n -gt 2000 ]&&exit 1;sleep 0.005;done;'
        'exec "$p" attach wait'
    )
    return ("/bin/sh", "-c", line)


def first_variable(first: bytes) -> dict[str, str]:
    """What has to be said first, as the environment of what says it. Empty: there is too much of it."""
    return {FIRST: base64.b64encode(first).decode("ascii")} if len(first) <= LONGEST_FIRST else {}


def place_line(architecture: str, directory: str) -> str:
    """Put it into a new directory, for root to say: the user who executes it can neither read nor replace it."""
    return f"mkdir -m 711 {directory}&&{_written(architecture, f'{directory}/inside')}"


def _written(architecture: str, path: str) -> str:
    """Not packed: another process to unpack it costs more than 16 kB on the way, which need no more round trips."""
    return f"echo {encoded(architecture)}|base64 -d >{path}&&chmod 111 {path}"


@cache
def encoded(architecture: str, *, provider: str | None = None) -> str:
    return base64.b64encode(program(architecture, provider=provider)).decode("ascii")


def _names(architecture: str) -> list[str]:
    return [name for name, known in _ARCHITECTURES.items() if known == architecture]
