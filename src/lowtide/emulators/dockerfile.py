"""A Dockerfile as the steps of a build, and what it sets for what runs on it later. No I/O."""

from __future__ import annotations

import bisect
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_VARIABLE = re.compile(r"\\\$|\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_BARE_VARIABLE = re.compile(r"\\\$|\$()()(\w+)")
_PIECE_OF_WORDS = re.compile(
    r"""(?P<space>[ \t\r\n]+)|(?P<bare>[^ \t\r\n'"\\]+)|\\(?P<escaped>.)"""
    r"""|'(?P<single>[^']*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)\"""",
    re.DOTALL,
)
_HEREDOC = re.compile(r"(?<!<)<<-?([\"']?)([A-Za-z_]\w*)\1")
PATH = "/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the programs of this machine are, which stands for every image."""
MOST_INSTRUCTIONS = 1000
LONGEST_RECIPE = 1 << 20
_MOST_EXPANDED = 128 << 10  # what an environment can hold; a variable of variables would be of any length
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,199}")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S+))?\s+")
_MODE = re.compile(r"[0-7]{3,4}|[ugoa]*[-+=][rwxXst]+(?:,[ugoa]*[-+=][rwxXst]+)*")
_SHELL: tuple[str, ...] = ("/bin/sh", "-c")
_NOT_DONE = (
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "ONBUILD",
    "STOPSIGNAL",
    "VOLUME",
)
"""Nothing is done for them while building."""


class CannotBuild(Exception):
    """An instruction that cannot be followed, in words for the build's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What holds for a step, and at the end for what runs on the image."""

    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""

    def at(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.workdir or "/", path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction; what is to be run for it, or copied, and in which surroundings."""

    shown: str
    argv: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Of a COPY, in the build's context; `target` is where they go."""
    target: str = ""
    mode: str = ""
    """Of what is copied, as chmod takes it; empty: as it is."""
    archives: bool = False
    """It is an ADD: tars are unpacked."""
    around: Surroundings = field(default_factory=Surroundings)
    """After the instruction."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Of the build: in the environment of a RUN, and of nothing later."""
    context: Path | None = None
    """The tar its sources are in, where it is not the build's."""
    fresh: str = ""
    """Not empty: it is not to be the same as any before it."""
    secret: bool = False
    """It sees secrets: what it leaves is not kept after the emulator's end."""
    begins: bool = False
    """It is a FROM: a stage begins, on an image or on the stage that `stage` says."""
    stage: int | None = None
    """An earlier stage: what this one begins with, or what the sources of a COPY are in."""
    image: str = ""
    """Of a COPY: the image that its sources are in."""
    apart: bool = False
    """It runs as root at `/`, whatever surrounds it."""
    by_user: bool = False
    """With `apart`: as the recipe's user, and as root where that one may not."""


def steps(
    text: str, *, given: Mapping[str, str] | None = None, around: Surroundings | None = None
) -> Iterator[Step]:
    """The instructions of a Dockerfile in their order. `given`: build arguments. CannotBuild for what is not built here."""
    first = around = around or Surroundings()
    arguments: dict[str, str] = {}
    for_all: dict[str, str] = {}
    """What was said before the first FROM: a stage has it where it asks for it."""
    names: dict[str, int] = {}
    ended: list[tuple[Surroundings, tuple[str, ...]]] = []
    stages, shell = 0, _SHELL
    for word, rest in instructions(text):
        shown = f"{word} {rest}"
        known = {"PATH": PATH, **arguments, **around.environment}
        match word:
            case "FROM":
                words = [one for one in _split(_expand(rest, known)) if not one.startswith("--")]
                if stages:
                    ended.append((around, shell))
                    arguments = {}
                else:
                    for_all = dict(arguments)
                stage = names.get(words[0].lower()) if words else None
                around, shell = (first, _SHELL) if stage is None else ended[stage]
                names[str(stages)] = stages
                if len(words) == 3 and words[1].upper() == "AS":
                    names[words[2].lower()] = stages
                stages += 1
                yield Step(shown=shown, around=around, begins=True, stage=stage)
            case "ARG":
                name, said, value = rest.partition("=")
                name = name.strip()
                value = _expand(_unquoted(value), known) if said else for_all.get(name, "")
                arguments[name] = (given or {}).get(name, value)
                yield Step(shown=shown, around=around)
            case "ENV":
                around = replace(around, environment={**around.environment, **_pairs(rest, known)})
                yield Step(shown=shown, around=around)
            case "WORKDIR":
                around = replace(around, workdir=around.at(_expand(_unquoted(rest), known)))
                yield directory(shown, around)
            case "USER":
                around = replace(around, user=_expand(rest, known).partition(":")[0])
                yield Step(shown=shown, around=around)
            case "RUN":
                at = 0
                while flag := _FLAG.match(rest, at):  # --mount, --network: of BuildKit
                    at = flag.end()
                rest = rest[at:]
                argv = _words(rest) or (*shell, rest)
                yield Step(shown=shown, argv=argv, around=around, arguments=dict(arguments))
            case "COPY" | "ADD":
                earlier = {name: at for name, at in names.items() if at < stages - 1}
                yield replace(_copy(shown, rest, known, around, earlier), archives=word == "ADD")
            case "SHELL":
                shell = _words(rest)
                if not shell:
                    raise CannotBuild(f"{shown[:200]}: a shell is a JSON list of words")
                yield Step(shown=shown, around=around)
            case _ if word in _NOT_DONE:
                yield Step(shown=shown, around=around)
            case _:
                raise CannotBuild(f"{shown[:200]}: there is no such instruction")


def directory(shown: str, around: Surroundings) -> Step:
    """Makes the directory that what follows is in."""
    argv = ("/bin/mkdir", "-p", around.workdir)
    return Step(shown=shown, argv=argv, around=around, apart=True, by_user=True)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The word and the rest of each: lines that go on and here-documents are put together, comments left out."""
    if len(text) > LONGEST_RECIPE:
        raise CannotBuild(f"a recipe has {LONGEST_RECIPE} characters at most")
    lines = [line.removesuffix("\r") for line in text.split("\n")]  # nothing else ends one
    places: dict[
        str, list[int]
    ] = {}  # of each line, so that the end of a here-document is looked up and not for
    for number, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(number)
    at = found = 0
    while at < len(lines):
        parts: list[str] = []
        while at < len(lines):
            line = lines[at]
            at += 1
            if line.lstrip().startswith("#") or not line.strip():
                continue
            goes_on = line.rstrip().endswith("\\")
            parts.append(line.rstrip()[:-1] if goes_on else line)
            if not goes_on:
                break
        words = "".join(parts).split(None, 1)
        if not words:
            continue
        word, rest = words[0], words[1] if len(words) > 1 else ""
        found += 1
        if found > MOST_INSTRUCTIONS:
            raise CannotBuild(f"a recipe has {MOST_INSTRUCTIONS} instructions at most")
        mark = _HEREDOC.search(rest) if word.upper() == "RUN" else None
        ends = places.get(mark[2], []) if mark else []
        after = bisect.bisect_left(ends, at)
        if mark and after < len(ends):
            end = ends[after]
            # `RUN <<EOF` alone is a script; anything before it takes the document as its input.
            inside = lines[at:end]
            rest = "\n".join(inside if not rest[: mark.start()].strip() else [rest, *inside, mark[2]])
            at = end + 1
        yield word.upper(), rest.strip()


def _copy(
    shown: str, rest: str, known: Mapping[str, str], around: Surroundings, stages: Mapping[str, int]
) -> Step:
    stage: int | None = None
    image = mode = ""
    at = 0
    while flag := _FLAG.match(rest, at):
        if flag[1] == "from":
            said = _expand(_unquoted(flag[2] or ""), known)
            stage, image = stages.get(said.lower()), said
            if stage is not None:
                image = ""
            elif not _IMAGE.fullmatch(said) or said.isdigit():
                raise CannotBuild(
                    f"COPY --from={said}: there is no earlier stage of that name, and no such image"
                )
        elif flag[1] == "chmod":
            mode = _expand(_unquoted(flag[2] or ""), known)
            if not _MODE.fullmatch(mode):
                raise CannotBuild(f"{shown[:200]}: {mode!r} is no mode")
        elif flag[1] in ("exclude", "parents"):  # it would copy something else than what is asked for
            raise CannotBuild(f"{shown[:200]}: --{flag[1]} is not followed here")
        at = flag.end()
    rest = rest[at:]
    words = list(_words(rest) or _split(rest))
    if len(words) < 2:
        raise CannotBuild(f"{shown}: a source and a target are needed")
    if any("://" in one for one in words[:-1]):
        raise CannotBuild(f"{shown}: addresses are not fetched here")
    *sources, target = (_expand(one, known) for one in words)
    place = around.at(target) + ("/" if target.endswith(("/", ".")) and around.at(target) != "/" else "")
    if stage is not None or image:  # its root is where they start
        sources = [posixpath.normpath(f"/{one}").lstrip("/") or "." for one in sources]
    step = Step(shown=shown, sources=tuple(sources), target=place, mode=mode, around=around)
    return replace(step, stage=stage, image=image)


def _pairs(rest: str, known: Mapping[str, str]) -> dict[str, str]:
    words = _split(rest)
    if words and "=" not in words[0]:  # the old form: ENV name value with spaces
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), known)}
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name:
            found[name] = _expand(value, known)
    return found


def _words(rest: str) -> tuple[str, ...]:
    """The JSON form of an instruction; empty where it is none."""
    if not rest.startswith("["):
        return ()
    try:
        found = json.loads(rest)
    except (ValueError, RecursionError):
        return ()
    return tuple(found) if isinstance(found, list) and all(isinstance(one, str) for one in found) else ()


def _split(rest: str) -> list[str]:
    """As `shlex.split`, which takes the square of a word's length: others would wait for it."""
    words: list[str] = []
    pieces: list[str] | None = None
    at = 0
    while at < len(rest):
        found = _PIECE_OF_WORDS.match(rest, at)
        if found is None:
            raise CannotBuild(f"{rest[:200]}: a quote is not closed")
        at = found.end()
        if found.lastgroup == "space":
            if pieces is not None:
                words.append("".join(pieces))
            pieces = None
            continue
        text = found[found.lastgroup or 0]
        if found.lastgroup == "double":
            text = re.sub(r'\\(["\\])', r"\1", text)
        pieces = pieces or []
        pieces.append(text)
    if pieces is not None:
        words.append("".join(pieces))
    return words


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _expand(text: str, known: Mapping[str, str]) -> str:
    said = 0

    def value(found: re.Match[str]) -> str:
        nonlocal said
        if found[0] == "\\$":
            return "$"
        filled = known.get(found[1] or found[3]) or found[2] or ""
        said += len(filled)
        if said > _MOST_EXPANDED:
            raise CannotBuild(f"{text[:200]}: its variables come to more than {_MOST_EXPANDED} characters")
        return filled

    # Behind the last brace none is closed: each that is opened there would be looked for to the end.
    end = text.rfind("}") + 1
    return _VARIABLE.sub(value, text[:end]) + _BARE_VARIABLE.sub(value, text[end:])
