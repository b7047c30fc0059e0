"""Files in a pod: streamed through a shell script, counted on both sides."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

from lowtide import errors
from lowtide.providers.base import STDOUT
from lowtide.providers.kubernetes.process import PodProcess
from lowtide.providers.kubernetes.script import quoted

StartText = Callable[[str], Awaitable[PodProcess]]
"""Starts a script of ours in the pod."""

# Exit codes of the scripts are errno's, so that they read like one.
_ERRORS: dict[int, tuple[type[errors.SandboxFileError], str]] = {
    2: (errors.SandboxFileNotFoundError, "no such file or directory"),
    13: (errors.SandboxPermissionError, "permission denied"),
    20: (errors.SandboxNotADirectoryError, "not a directory"),
    21: (errors.SandboxIsADirectoryError, "is a directory"),
}

# why PATH: leaves with the reason for which PATH cannot be reached.
_WHY = (
    'why() { p=$1;while :;do case $p in */*) p=${p%/*};; *) p=.;; esac;[ -n "$p" ]||p=/;'
    '[ -e "$p" ]&&break;[ "$p" = / ]&&break;[ "$p" = . ]&&break;done;'
    '[ -d "$p" ]||exit 20;[ -x "$p" ]||exit 13;exit 2; }'
)


async def read(start: StartText, path: str) -> AsyncIterator[bytes]:
    text = (
        f'{_WHY};f={quoted(_safe(path))};[ -d "$f" ]&&exit 21;[ -e "$f" ]||why "$f";[ -r "$f" ]||exit 13;'
        '[ -f "$f" ]&&stat -L -c %s -- "$f" >&2;exec cat -- "$f"'
    )
    process = await start(text)
    said = bytearray()
    count = 0
    try:
        async for stream, data in process.output():
            if stream == STDOUT:
                count += len(data)
                yield data
            elif len(said) < 4096:
                said += data
        code = await process.wait()
    finally:
        await process.aclose()
    first, _, rest = bytes(said).partition(b"\n")
    if code:
        raise failure(code, path, (rest or first).decode(errors="replace"))
    # A file may grow while it is read. Fewer bytes than it had means that some were lost on the way.
    if first.isdigit() and count < int(first):
        raise errors.SandboxFileError(
            f"{path}: {count} bytes came of {int(first)}", path=path, provider="kubernetes", retryable=True
        )


async def write(
    start: StartText, path: str, chunks: AsyncIterable[bytes], *, size: int | None, mode: int | None
) -> int:
    """Into a file beside it that takes its place only when every byte has come."""
    process = await start(_write_script(path, mode))
    total = 0
    try:
        try:
            async for chunk in chunks:
                total += len(chunk)
                if size is not None and total > size:
                    break
                await process.write_stdin(bytes(chunk))
            if size is not None and total != size:
                raise errors.ValidationError(
                    f"{path}: the content has {'more than' if total > size else 'only'} "
                    f"{size if total > size else total} bytes, {size} were announced",
                    argument="size",
                    provider="kubernetes",
                )
            await process.close_stdin()
        except BrokenPipeError:
            pass  # the script has ended early: its exit code says why
        said, stored = await _collect(process)
        code = await process.wait()
    finally:
        await process.aclose()
    if code:
        raise failure(code, path, said)
    if stored != total:
        raise errors.SandboxFileError(
            f"{path}: {stored} bytes were stored of {total}", path=path, provider="kubernetes"
        )
    return total


async def _collect(process: PodProcess) -> tuple[str, int]:
    said, stored = bytearray(), bytearray()
    async for stream, data in process.output():
        target = stored if stream == STDOUT else said
        if len(target) < 4096:
            target += data
    text = bytes(stored).strip()
    return said.decode(errors="replace"), int(text) if text.isdigit() else -1


def _write_script(path: str, mode: int | None) -> str:
    wanted = "" if mode is None else format(mode & 0o7777, "o")
    stray = f".lowtide-{secrets.token_hex(6)}"
    return (
        f"{_WHY};f={quoted(_safe(path))};m={wanted};"
        'case $f in */) [ -d "$f" ]&&exit 21;exit 2;;esac;[ -d "$f" ]&&exit 21;'
        # A link is followed by the sandbox itself, to where it points inside.
        'if [ -L "$f" ];then f=$(readlink -f -- "$f")||exit 2;[ -d "$f" ]&&exit 21;fi;'
        'case $f in */*) d=${f%/*};;*) d=.;;esac;[ -n "$d" ]||d=/;'
        '[ -d "$d" ]||mkdir -p -- "$d" 2>/dev/null||{ [ -e "$d" ]&&exit 20;p=$d;until [ -e "$p" ];do p=${p%/*};p=${p:-/};done;[ -d "$p" ]||exit 20;exit 13; };'
        f't="$d/{stray}";'
        # What is not a plain file (a device, a pipe), or lies where nothing new may, is written in place.
        'if [ -e "$f" ]&&[ ! -f "$f" ];then t=$f;elif ! { : >"$t"; } 2>/dev/null;then [ -w "$f" ]||exit 13;t=$f;: >"$f";fi;'
        'trap \'[ "$t" = "$f" ]||rm -f -- "$t"\' 0;n=0;e=;'
        'exec 3>>"$t"||exit 13;while IFS= read -r F;do if [ "$F" = 0 ];then e=1;break;fi;'
        'dd bs=$F count=1 iflag=fullblock >&3 2>/dev/null||exit 28;n=$((n+F));done;[ -n "$e" ]||exit 5;exec 3>&-;'
        'if [ "$t" != "$f" ];then s=$(stat -c %s -- "$t");[ "$s" = "$n" ]||exit 28;'
        'if [ -e "$f" ];then [ -n "$m" ]||m=$(stat -c %a -- "$f");chown "$(stat -c %u:%g -- "$f")" "$t" 2>/dev/null;fi;'
        '[ -z "$m" ]||chmod "$m" "$t"||exit 13;mv -f -- "$t" "$f"||exit 13;t=$f;'
        'elif [ -n "$m" ];then chmod "$m" "$f"||exit 13;fi;echo $n'
    )


def failure(code: int, path: str, said: str) -> errors.LowtideError:
    if code == 28:
        return errors.ResourceExhaustedError(f"{path}: no space left in the sandbox", provider="kubernetes")
    kind, text = _ERRORS.get(
        code, (errors.SandboxFileError, said.strip()[:500] or f"failed with code {code}")
    )
    return kind(f"{path}: {text}", path=path, provider="kubernetes")


def _safe(path: str) -> str:
    """A path that no tool takes for an option."""
    if "\x00" in path or not path:
        raise errors.ValidationError(
            "a path must not be empty or contain a NUL", argument="path", provider="kubernetes"
        )
    return path if path.startswith("/") else f"./{path}"
