"""Recipes are read as their own builders read them, and nothing of a recipe or a context changes how it is copied."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lowtide.emulators import dockerfile
from lowtide.emulators.build import BuildFailed
from lowtide.emulators.dockerfile import CannotBuild, Surroundings
from lowtide.emulators.e2b import templates
from lowtide.emulators.layer_cache import LayerCache
from tests.emulators.test_build import building, context

SURROUNDED = r"""
FROM x
ENV TMPDIR=/nowhere PATH=/nowhere TAR_OPTIONS=--nope
COPY a.txt /said/one
ENV PATH=/usr/bin:/bin
WORKDIR /w
RUN rmdir /w && mkdir -m 700 /closed
COPY d/* /said/
COPY --chmod=0750 d /with-mode/
ADD in.tgz text empty /added/
USER 1000
COPY a.txt /closed/one
WORKDIR /home/user/deep/er
RUN pwd >> /tmp/said; echo "$HOME" >> /tmp/said
"""
SHOW = r"""ls -A /said; ls /tmp; cat /tmp/said /added/inner/x; cd /with-mode; stat -c '%a %n' fifo 'a b' d
ls /added; stat -c %U /home/user/deep/er"""


def hostile_context() -> bytes:
    data = io.BytesIO()

    def add(name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
        info = tarfile.TarInfo(name)
        info.size, info.type, info.linkname = len(content), kind, link
        info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
        tar.addfile(info, io.BytesIO(content))

    with tarfile.open(fileobj=data, mode="w") as tar:
        add("a.txt", b"one")
        for name in ("d", "d/d"):
            add(name, kind=tarfile.DIRTYPE)
        add("d/a b", b"two")
        add("d/new\nline", b"three")
        add("d/link", kind=tarfile.SYMTYPE, link="/etc/passwd")
        add("d/fifo", kind=tarfile.FIFOTYPE)  # who opens it waits for ever
        add("in.tgz", gzip.compress(context(**{"inner/x": "inner\n"})))
        add("text", b"text")
        add("empty")
    return data.getvalue()


def test_copies_are_the_same_whatever_surrounds_them_and_leave_nothing_else(tmp_path: Path) -> None:
    async def check() -> None:
        async with building(tmp_path) as (backing, builder):
            log: list[str] = []
            made = await builder.build(
                dockerfile.steps(SURROUNDED), log=log.append, context=hostile_context()
            )
            sandbox_id = await backing.create(snapshot=made.snapshot)
            code, printed = await backing.run(sandbox_id, ("sh", "-c", SHOW), user="0:0")
            await backing.destroy(sandbox_id)
            lines = ["a b", "fifo", "link", "new", "line", "one", "said"]
            lines += ["/home/user/deep/er", "/home/user", "inner", "750 fifo", "750 a b", "750 d"]
            assert printed.decode().splitlines() == [*lines, "empty", "inner", "text", "user"], log
            assert code == 0

    asyncio.run(check())


def test_instructions_are_found_as_a_builder_finds_them() -> None:
    text = (
        "FROM x\r\nRUN\techo tab\n"
        "RUN echo a && \\\n\n# a comment\n\n  echo b\n"
        "RUN echo wor\\\nd\f\u2028still\n"
        'SHELL ["/bin/bash", "-eo", "pipefail", "-c"]\nrun [[ a ]]\nRUN ["exec", "form"]\n'
        "FROM y\nRUN again\nEXPOSE 80"
    )
    assert [step.argv for step in dockerfile.steps(text) if step.argv] == [
        ("/bin/sh", "-c", "echo tab"),
        ("/bin/sh", "-c", "echo a &&   echo b"),
        ("/bin/sh", "-c", "echo word\f\u2028still"),
        ("/bin/bash", "-eo", "pipefail", "-c", "[[ a ]]"),
        ("exec", "form"),
        ("/bin/sh", "-c", "again"),
    ]


@pytest.mark.parametrize(
    "line",
    ["RNU echo", "SHELL bash -c", "COPY --chmod=wide a b", "COPY --exclude=*.txt a b", "COPY --parents a b"],
)
def test_what_would_come_to_something_else_is_refused(line: str) -> None:
    with pytest.raises(CannotBuild):
        list(dockerfile.steps(f"FROM x\n{line}"))


def test_a_context_that_fails_with_many_words_does_not_hold_the_build(tmp_path: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for number in range(20_000):  # more of both than pipes and buffers hold
            info = tarfile.TarInfo(f"{number}-{'x' * 80}")
            info.type = tarfile.CHRTYPE
            tar.addfile(info)

    async def check() -> None:
        async with building(tmp_path) as (_, builder):
            with pytest.raises(BuildFailed):
                async with asyncio.timeout(120):
                    steps = dockerfile.steps("FROM x\nCOPY . /in")
                    await builder.build(steps, log=lambda text: None, context=data.getvalue())

    asyncio.run(check())


def test_a_context_that_is_sent_again_meanwhile_makes_no_layer(tmp_path: Path) -> None:
    files, cache = tmp_path / "files.tar", LayerCache(tmp_path / "kept")
    files.write_bytes(context(a="one"))

    async def check() -> None:
        async with building(tmp_path / "one", cache) as (backing, builder):
            create = backing.create

            async def replace_first(**asked: object) -> str:
                made = await create(**asked)  # type: ignore[arg-type]
                other = tmp_path / "other"
                other.write_bytes(context(a="two"))
                other.rename(files)
                return made

            steps = list(dockerfile.steps("FROM x\nRUN true\nCOPY a /a"))
            below = await builder.build(steps[:2], log=lambda text: None)
            kept = cache.layers()
            backing.create = replace_first  # type: ignore[method-assign]
            with pytest.raises(BuildFailed, match="replaced"):
                await builder.build(steps[2:], log=lambda text: None, below=below, context=(files,))
            assert cache.layers() == kept

    asyncio.run(check())


@pytest.mark.parametrize(("force", "ran"), [(False, 1), (True, 2)])
def test_a_forced_step_of_a_template_is_built_again_with_all_that_follows(
    tmp_path: Path, force: bool, ran: int
) -> None:
    asked: list[dict[str, Any]] = [
        {"type": "RUN", "args": ["echo first", "root"], "force": force},
        {"type": "ENV", "args": ["A", "b"]},
        {"type": "RUN", "args": ["echo second $A", "root"]},
    ]

    async def check() -> None:
        async with building(tmp_path / "one", LayerCache(tmp_path / "kept")) as (_, builder):
            said: list[str] = []
            for _ in range(2):
                steps = list(templates._steps(asked, Surroundings(), None))
                await builder.build(steps, log=said.append)
        lines = "".join(said).splitlines()
        assert (lines.count("first"), lines.count("second b")) == (ran, ran)

    asyncio.run(check())
