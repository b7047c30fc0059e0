"""Images are really built: what a recipe runs and copies is in the sandboxes made from it, whichever service it came to."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import lowtide.emulators
from lowtide.emulators import build, dockerfile
from lowtide.emulators.backing import Backing, network_of
from lowtide.emulators.build import Builder, BuildFailed, Built
from lowtide.emulators.dockerfile import CannotBuild
from lowtide.emulators.layer_cache import LayerCache
from lowtide.providers.images.store import ImageStore
from lowtide.providers.local.prerequisites import ID_BASE

RECIPE = """
# a comment
FROM python:3.11
ARG COLOUR=red
ENV SHADE=dark NAME="two words"
WORKDIR /srv/app
RUN echo "$COLOUR $SHADE $NAME" > said && \\
    pwd >> said
COPY a.txt sub/ ./
RUN apt-get update && apt-get install -y -t stable --no-install-recommends tar=1.* && cat a.txt b.txt >> said
WORKDIR deeper
RUN <<EOF
echo here >> ../said
EOF
ENV PATH="/srv/bin:$PATH"
RUN n=3; echo $((1<<n)) >> ../said; apt-get remove x
CMD ["sleep", "1"]
"""


def context(**files: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


@asynccontextmanager
async def building(
    directory: Path, cache: LayerCache | None = None, network: str = "none"
) -> AsyncIterator[tuple[Backing, Builder]]:
    backing = Backing(directory, limit=20, network=network_of(network))
    builder = Builder(backing, cache=cache)
    try:
        yield backing, builder
    finally:
        await builder.aclose()
        assert await backing.aclose()


async def read(backing: Backing, built: Built, path: str) -> str:
    made = await backing.create(snapshot=built.snapshot)
    _, printed = await backing.run(made, ("cat", path))
    await backing.destroy(made)
    return printed.decode()


def test_a_recipe_is_followed_and_what_was_built_before_is_not_built_again(tmp_path: Path) -> None:
    async def check() -> None:
        files = context(**{"a.txt": "one\n", "sub/b.txt": "two\n"})
        async with building(tmp_path) as (backing, builder):
            log: list[str] = []
            built = await builder.build(dockerfile.steps(RECIPE), log=log.append, context=files)
            said = "red dark two words\n/srv/app\none\ntwo\nhere\n8\n"
            assert await read(backing, built, "/srv/app/said") == said
            assert built.around.workdir == "/srv/app/deeper"
            assert built.around.environment == {
                "SHADE": "dark",
                "NAME": "two words",
                "PATH": f"/srv/bin:{dockerfile.PATH}",
            }
            assert "apt-get update: not run here" in "".join(log)

            again: list[str] = []
            same = await builder.build(dockerfile.steps(RECIPE), log=again.append, context=files)
            assert same == built
            assert again.count("CACHED\n") == 7
            other = context(**{"a.txt": "other\n", "sub/b.txt": "two\n"})  # the content is what counts
            changed = await builder.build(dockerfile.steps(RECIPE), log=again.append, context=other)
            assert "other" in await read(backing, changed, "/srv/app/said")

    asyncio.run(check())


STAGES = """
ARG COLOUR=red
FROM golang:1.25 AS Builder
ENV SHADE=dark
WORKDIR /made
RUN echo "one$COLOUR" > one.txt && mkdir -p "d e" && echo two > "d e/two.txt" && echo left > /left
FROM scratch as other
ARG COLOUR
COPY --from=builder --chown=1:1 /made/*.txt /in/
RUN echo "[$SHADE] $COLOUR" >> /in/one.txt && pwd >> /in/one.txt && ls /left /made >> /in/one.txt 2>/dev/null || true
FROM builder
COPY --from=1 /in/one.txt ./copied
COPY --from=0 ["/made/d e", "/both/"]
RUN echo "$SHADE" >> copied && cat /left >> copied && cat /both/two.txt >> copied
"""


def test_stages_are_built_each_on_its_own_and_copied_from(tmp_path: Path) -> None:
    async def check() -> None:
        async with building(tmp_path) as (backing, builder):
            log: list[str] = []
            built = await builder.build(dockerfile.steps(STAGES), log=log.append)
            assert await read(backing, built, "/made/copied") == "onered\n[] red\n/\ndark\nleft\ntwo\n", log
            assert (built.around.workdir, built.around.environment) == ("/made", {"SHADE": "dark"})
            again: list[str] = []
            assert await builder.build(dockerfile.steps(STAGES), log=again.append) == built
            assert again.count("CACHED\n") == 7
            for line, said in (
                ("COPY --from=builder /nothing /x", "nothing: Cannot stat"),
                ("COPY --from=ghcr.io/some/image /x /x", "no image is pulled here"),
                ("COPY --from=later /x /x", "no earlier stage"),
                ("COPY --from=/etc /passwd /x", "no such image"),
                ("COPY --from=../../etc /passwd /x", "no such image"),
            ):
                with pytest.raises(BuildFailed, match=said):
                    steps = dockerfile.steps(f"FROM a AS builder\nFROM b AS later\n{line}")
                    await builder.build(steps, log=log.append)
            builder.release(built)
            builder.release(built)
            assert backing.count == 0
            assert [layer.pins for layer in builder._layers.values() if layer.pins] == []

    asyncio.run(check())


def test_packages_this_machine_does_not_have_are_left_out_where_the_user_says_so(tmp_path: Path) -> None:
    async def check() -> None:
        backing = Backing(tmp_path, limit=20)
        log: list[str] = []
        try:
            steps = dockerfile.steps("FROM x\nRUN yum -y install tar no-such-package-here && echo on > /went")
            built = await Builder(backing, packages="skip").build(steps, log=log.append)
            assert "NOT INSTALLED, this machine does not have: no-such-package-here" in "".join(log)
            assert await read(backing, built, "/went") == "on\n"
        finally:
            assert await backing.aclose()

    asyncio.run(check())


def test_a_hostile_context_stays_where_it_is_unpacked(tmp_path: Path) -> None:
    def tar(name: str, kind: bytes, target: str = "") -> bytes:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as made:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            made.addfile(info)
            made.addfile(tarfile.TarInfo(f"{name}/below" if kind == tarfile.SYMTYPE else "other"))
        return data.getvalue()

    async def check() -> None:
        async with building(tmp_path) as (backing, builder):
            log: list[str] = []
            for files, line in (
                (tar(f"../../../../..{tmp_path}/evil", tarfile.REGTYPE), "COPY . /in"),
                (tar("link", tarfile.SYMTYPE, str(tmp_path)), "COPY . /in"),
                (tar("hard", tarfile.LNKTYPE, "/etc/passwd"), "COPY . /in"),
                (tar("device", tarfile.CHRTYPE), "COPY . /in"),
                (tar("a", tarfile.REGTYPE), "COPY ../../../etc/hostname /in/"),
                (b"garbage" * 1000, "COPY a /in/"),
                (b"\x1f\x8bgarbage", "COPY a /in/"),
            ):
                with pytest.raises(BuildFailed):
                    await builder.build(dockerfile.steps(f"FROM x\n{line}"), log=log.append, context=files)
            assert backing.count == 0
        assert [path.name for path in tmp_path.rglob("*evil*")] == []

    asyncio.run(check())


def test_files_are_copied_as_root_where_the_user_may_not(tmp_path: Path) -> None:
    recipe = "FROM x\nRUN groupadd -f user && useradd -m user && mkdir /of-root /of-user && chmod 755 /of-root && chmod 777 /of-user"
    recipe += "\nUSER user\nRUN mkdir /of-user/own\nCOPY a /of-root/a\nCOPY a /of-user/own/a\nRUN cat /of-root/a /of-user/own/a > /tmp/said"

    async def check() -> None:
        async with building(tmp_path) as (backing, builder):
            log: list[str] = []
            steps = dockerfile.steps(recipe)
            built = await builder.build(steps, log=log.append, context=context(a="one "))
            assert await read(backing, built, "/tmp/said") == "one one ", log
            assert "useradd: user is there already\n" in "".join(log)

    asyncio.run(check())


def test_a_step_that_fails_says_why_in_its_own_words_and_leaves_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        async with building(tmp_path) as (backing, builder):
            log: list[str] = []
            for line, said in (
                ("RUN echo before; echo why >&2; exit 3", "why"),
                ("RUN pip install no-such-package-at-all", "no network"),
                (
                    "RUN apt-get update && apt-get install -y no-such-package-here",
                    "does not have: no-such-package-here",
                ),
                (
                    "RUN sudo apk add --virtual .mine tar no-such-package-here",
                    "lowtide emulate --packages skip",
                ),
                ("COPY a.txt /", ""),
                ("USER nobody-knows\nRUN true", ""),
            ):
                with pytest.raises(BuildFailed):
                    await builder.build(dockerfile.steps(f"FROM x\n{line}"), log=log.append)
                assert said in "".join(log)
            assert backing.count == 0

    asyncio.run(check())


def test_the_same_layer_asked_for_at_once_is_built_once(tmp_path: Path) -> None:
    async def check() -> None:
        async with building(tmp_path) as (_, builder):
            recipe = "FROM x\nRUN cat /proc/sys/kernel/random/uuid > /id"
            log: list[str] = []
            both = await asyncio.gather(
                *(builder.build(dockerfile.steps(recipe), log=log.append) for _ in range(4))
            )
            assert len({one.snapshot for one in both}) == 1

    asyncio.run(check())


def test_layers_nobody_holds_go_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MOST_LAYERS", 3)

    async def check() -> None:
        async with building(tmp_path) as (backing, builder):
            held = await builder.build(dockerfile.steps("FROM x\nRUN echo held > /f"), log=lambda text: None)
            for number in range(5):
                made = await builder.build(
                    dockerfile.steps(f"FROM x\nRUN echo {number} > /f"), log=lambda text: None
                )
                builder.release(made)
            assert len(await backing.provider.list_snapshots()) == 3
            assert await read(backing, held, "/f") == "held\n"

    asyncio.run(check())


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nCOPY --from=7 /x /y",
        "FROM a\nCOPY --from=/ /etc/passwd /y",
        "FROM a\nADD https://example.org/x /y",
        "FROM a\nCOPY one",
        'FROM a\nENV A="open',
        "FROM a\n" + "ENV A=b\n" * 1001,
    ],
)
def test_what_is_not_built_here_is_refused_by_name(text: str) -> None:
    with pytest.raises(CannotBuild):
        list(dockerfile.steps(text))


DAYTONA = """
import daytona
from daytona import CreateSandboxFromImageParams, CreateSnapshotParams, Image
client = daytona.Daytona()
image = Image.debian_slim("3.12").env({"SHADE": "dark"}).run_commands("echo $SHADE > /made && echo built by hand")
heard = []
sandbox = client.create(CreateSandboxFromImageParams(image=image), on_snapshot_create_logs=heard.append)
print(sandbox.process.exec("cat /made; whoami; echo $SHADE").result.split(), "built by hand" in "".join(heard))
sandbox.stop(); sandbox.start()
print(sandbox.process.exec("cat /made").result.strip())
sandbox.delete()
client.snapshot.create(CreateSnapshotParams(name="mine", image=image), on_logs=heard.append)
sandbox = client.create(daytona.CreateSandboxFromSnapshotParams(snapshot="mine"))
print(sandbox.process.exec("cat /made; echo $SHADE").result.split())
sandbox.delete()
try:
    client.snapshot.create(CreateSnapshotParams(name="bad", image=Image.base("x").run_commands("echo because; exit 3")), on_logs=heard.append)
except Exception as error:
    print("exit code 3" in str(error), "because" in "".join(heard))
"""
E2B = """
import os, sys
from e2b import Sandbox, Template
os.chdir(sys.argv[1])
os.mkdir("sub")
open("a.txt", "w").write("one ")
open("sub/b.txt", "w").write("two ")
template = (
    Template(file_context_path=sys.argv[1]).from_python_image("3").set_envs({"SHADE": "dark"})
    .copy("a.txt", "/home/user/").copy("sub", "/srv/sub")
    .run_cmd("cat a.txt /srv/sub/sub/b.txt /srv/sub/b.txt > made 2>/dev/null; echo $SHADE $(whoami) >> made; echo built by hand")
    .set_start_cmd("echo started > /tmp/started; sleep infinity", "true")
)
heard = []
built = Template.build(template, "mine", on_build_logs=lambda entry: heard.append(entry.message))
print(any("built by hand" in line for line in heard), Template.exists("mine"))
sandbox = Sandbox.create("mine")
print(sandbox.files.read("/home/user/made").split())
sandbox.commands.run("until [ -e /tmp/started ]; do sleep 0.05; done", timeout=60)
print(sandbox.get_info().name)
sandbox.kill()
try:
    Template.build(Template().from_template("mine").run_cmd("cat made; exit 3"), "bad", on_build_logs=lambda entry: heard.append(entry.message))
except Exception as error:
    print("exit code 3" in str(error), heard.count("one two dark user") == 1)
try:
    Template.build(Template().from_base_image().run_cmd("whoami", user="nobody-knows"), "bad")
except Exception as error:
    print(str(error).endswith("invalid username: 'nobody-knows'"), Template.assign_tags("mine", "stable").tags)
"""
RUNLOOP = """
from runloop_api_client import Runloop
client = Runloop()
made = client.blueprints.create_and_await_build_complete(
    name="mine", dockerfile="FROM ubuntu:22.04\\nENV SHADE=dark\\nRUN echo $SHADE > /made",
    system_setup_commands=["echo later >> /made"], file_mounts={"/etc/mounted": "content"})
devbox = client.devboxes.create_and_await_running(blueprint_id=made.id)
done = client.devboxes.execute_and_await_completion(devbox.id, command="cat /made /etc/mounted; echo; echo $SHADE")
print(done.stdout.split())
print("echo later" in " ".join(one.message for one in client.blueprints.logs(made.id).logs))
bad = client.blueprints.create(name="bad", dockerfile="FROM ubuntu:22.04\\nRUN echo because; exit 3")
while (bad := client.blueprints.retrieve(bad.id)).status not in ("failed", "build_complete"): pass
print(bad.status, "because" in " ".join(one.message for one in client.blueprints.logs(bad.id).logs))
based = client.blueprints.create_and_await_build_complete(name="based", base_blueprint_id=made.id, system_setup_commands=["cat /made > /copied"])
devbox = client.devboxes.create_and_await_running(blueprint_id=based.id)
print(client.devboxes.execute_and_await_completion(devbox.id, command="cat /copied").stdout.split())
"""
MODAL = """
import modal
app = modal.App.lookup("built", create_if_missing=True)
image = modal.Image.debian_slim().apt_install("tar").env({"SHADE": "dark"}).run_commands("echo $SHADE > /made")
sandbox = modal.Sandbox.create("cat", "/made", app=app, image=image)
sandbox.wait()
print(sandbox.stdout.read().strip())
try:
    with modal.enable_output():
        modal.Sandbox.create("true", app=app, image=image.pip_install("no-such-package-at-all"))
except Exception as error:
    print("failed" in str(error))
"""


@pytest.mark.parametrize(
    ("name", "script", "printed"),
    [
        (
            "daytona",
            DAYTONA,
            ["['dark', 'daytona', 'dark'] True", "dark", "['dark', 'dark']", "True True"],
        ),
        ("e2b", E2B, ["True True", "['one', 'two', 'dark', 'user']", "mine", "True True", "True ['stable']"]),
        (
            "runloop",
            RUNLOOP,
            ["['dark', 'later', 'content', 'dark']", "True", "failed True", "['dark', 'later']"],
        ),
        ("modal", MODAL, ["dark", "True"]),
    ],
)
def test_the_sdks_own_builders_build(tmp_path: Path, name: str, script: str, printed: list[str]) -> None:
    pytest.importorskip({"runloop": "runloop_api_client"}.get(name, name))
    files = tmp_path / "files"
    files.mkdir()
    with lowtide.emulators.start(name, home=tmp_path) as handle:
        environment: dict[str, Any] = {**os.environ, **handle.environment}
        done = subprocess.run(
            [sys.executable, "-c", script, str(files)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        lines = [line for line in done.stdout.splitlines() if line in printed]
        assert lines == printed, done.stdout + done.stderr
    assert list((tmp_path / "emulators").iterdir()) == []


def test_files_come_from_an_image_of_the_store_and_from_nowhere_else(tmp_path: Path) -> None:
    def image(name: str, **files: str) -> None:
        (tmp_path / "image.tar").write_bytes(context(**files))
        store.import_file(name, tmp_path / "image.tar")

    async def check() -> None:
        backing = Backing(tmp_path / "emulator", limit=20)
        builder = Builder(backing, home=tmp_path)
        log: list[str] = []

        async def made(recipe: str) -> Built:
            return await builder.build(dockerfile.steps(f"FROM x\n{recipe}"), log=log.append)

        try:
            copies = "COPY --from=tool:1 /tool /opt/d* /in/\nCOPY --from=tool:1 /opt/da /srv/da"
            show = "RUN cat /in/tool /in/one /srv/da/deep/two > /said; ls /in | wc -l >> /said"
            built = await made(f"{copies}\n{show}")
            assert await read(backing, built, "/said") == "runs one two 3\n", log
            await made(copies)
            assert log[-1] == "CACHED\n"
            image("tool:1", tool="other ")  # the name stands for something else now
            built = await made("COPY --from=tool:1 /tool /tool")
            assert await read(backing, built, "/tool") == "other "
            for line, said in (
                ("COPY --from=tool:1 /../../../etc/hostname /x", "not in the build context"),
                ("COPY --from=tool:1 /nothing /x", "not in the build context"),
                ("COPY --from=tool:2 /tool /x", "lowtide image pull tool:2"),
            ):
                with pytest.raises(BuildFailed) as failed:
                    await made(line)
                assert said in str(failed.value) + "".join(log)
        finally:
            assert await backing.aclose()

    owner = ID_BASE if os.geteuid() == 0 else None
    store = ImageStore(tmp_path / "local" / "images", owner)
    image("tool:1", **{"tool": "runs ", "opt/da/one": "one ", "opt/da/deep/two": "two "})
    asyncio.run(check())
