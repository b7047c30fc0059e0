"""A real engine behind a proxy that cuts, goes silent and lies, and other people's hands on its containers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.container_engine import (
    DOCKER,
    IMAGE,
    REGISTRY,
    Boxes,
    boxes_on,
    docker,
    import_bare_image,
    needs_docker,
)
from tests.crash.world import World
from tests.lying_engine import HTML, LyingProxy, json_answer

from lowtide.errors import (
    SandboxError,
    SandboxFailedError,
    SandboxNotFoundError,
    SandboxUnavailableError,
    UnsupportedError,
    ValidationError,
)
from lowtide.providers.base import Network, NetworkMode, ProcessSpec, SandboxState
from lowtide.providers.docker import DockerProvider
from lowtide.providers.docker.container import NETWORK
from lowtide.providers.inside import link

pytestmark = pytest.mark.timeout(180)

FULL = Network(mode=NetworkMode.INTERNET)


@asynccontextmanager
async def behind_proxy() -> AsyncIterator[tuple[Boxes, LyingProxy]]:
    """Sandboxes whose provider speaks to the engine through the proxy; they end over the direct way."""
    async with LyingProxy.before_docker(DOCKER) as proxy, boxes_on(DOCKER) as boxes:
        direct, boxes.provider = boxes.provider, DockerProvider.connect({"DOCKER_HOST": proxy.docker_host})
        try:
            yield boxes, proxy
        finally:
            await boxes.provider.aclose()
            boxes.provider = direct


def exists(url: str, container_id: str) -> bool:
    return container_id in docker(url, "ps", "-aq", "--no-trunc").split()


def identity(url: str, name: str) -> str:
    return docker(url, "inspect", "--format", "{{.Id}}", name)


# -- a container is known by the engine's id


async def test_a_container_that_took_the_name_is_never_removed(
    boxes: Boxes, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by the process that made the sandbox, nor by another one."""
    box = await boxes.make()
    await boxes.run(box, "true")
    docker(boxes.url, "rm", "-f", box)
    other = docker(boxes.url, "create", "--name", box, IMAGE, "true")
    second = DockerProvider.connect({**os.environ, "DOCKER_HOST": boxes.url})
    try:
        assert await boxes.provider.destroy(box) is False
        assert await boxes.provider.destroy(box, grace_seconds=1) is False
        with caplog.at_level(logging.WARNING, "lowtide.docker"):
            assert await second.destroy(box) is False
        assert "somebody else's" in caplog.text
        with pytest.raises(SandboxNotFoundError, match="somebody else's"):
            await second.get(box)
        assert exists(boxes.url, other)
    finally:
        await second.aclose()
        docker(boxes.url, "rm", "-f", other)


@pytest.mark.parametrize("own", [True, False], ids=["by-its-maker", "by-another-process"])
async def test_a_renamed_container_is_listed_used_and_destroyed(boxes: Boxes, own: bool) -> None:
    box = await boxes.make()
    real = identity(boxes.url, box)
    docker(boxes.url, "rename", box, f"renamed-{secrets.token_hex(6)}")
    other = docker(boxes.url, "create", "--name", box, IMAGE, "true")  # and its name is taken
    provider = boxes.provider if own else DockerProvider.connect({**os.environ, "DOCKER_HOST": boxes.url})
    try:
        listed = [info.sandbox_id async for info in provider.list({"lowtide-ledger": boxes.ledger_id})]
        assert listed == [box]
        assert (await provider.get(box)).state is SandboxState.RUNNING
        found = await provider.find(boxes.made[0])
        assert found is not None
        assert found.sandbox_id == box
        handle = await provider.start_process(box, ProcessSpec(argv=("echo", "here")))
        assert [data async for _, data in handle.output()] == [b"here\n"]
        assert await provider.destroy(box) is True
        assert not exists(boxes.url, real)
        assert exists(boxes.url, other)
    finally:
        docker(boxes.url, "rm", "-f", other)
        if not own:
            await provider.aclose()


@needs_docker[1]
async def test_a_container_of_an_image_made_from_a_sandbox_is_somebody_elses() -> None:
    """It has all our labels, because engines copy them."""
    async with boxes_on(DOCKER) as boxes:
        box = await boxes.make()
        image = f"lowtide-test-copy:{secrets.token_hex(6)}"
        docker(boxes.url, "commit", box, image)
        copy = docker(boxes.url, "create", "--entrypoint", "sleep", image, "600")
        try:
            listed = [
                info.sandbox_id async for info in boxes.provider.list({"lowtide-ledger": boxes.ledger_id})
            ]
            assert listed == [box]
            assert await boxes.provider.destroy(box) is True
            assert await boxes.provider.destroy(box) is False
            assert exists(boxes.url, copy)
        finally:
            docker(boxes.url, "rm", "-f", copy)
            docker(boxes.url, "rmi", image)


# -- what lies on the way


@needs_docker[1]
async def test_a_page_in_answer_to_a_delete_is_no_end() -> None:
    async with behind_proxy() as (boxes, proxy):
        box = await boxes.make()
        proxy.lie("DELETE", "/containers/", forward=False, answer=HTML)
        with pytest.raises(SandboxUnavailableError, match="not a container engine's"):
            await boxes.provider.destroy(box)
        assert exists(DOCKER, identity(DOCKER, box))
        proxy.truth()
        assert await boxes.provider.destroy(box) is True
        assert await boxes.gone(box)


@needs_docker[1]
@pytest.mark.parametrize(
    "answer", [HTML, json_answer(b"[]"), json_answer(b'{"Id": "../x"}')], ids=["page", "list", "no-id"]
)
@pytest.mark.parametrize("forward", [True, False], ids=["made", "not-made"])
async def test_a_create_that_is_answered_with_something_else_is_unavailable(
    answer: bytes, forward: bool
) -> None:
    async with behind_proxy() as (boxes, proxy):
        proxy.lie("POST", "/containers/create", forward=forward, answer=answer)
        spec = boxes.spec()
        with pytest.raises(SandboxUnavailableError, match="not a container engine's"):
            await boxes.provider.create(spec)
        found = await boxes.provider.find(spec)
        assert (found is not None) is forward
        proxy.truth()
        assert await boxes.provider.destroy(spec.lease_id) is forward


@needs_docker[1]
async def test_an_inspect_that_describes_another_container_is_not_believed() -> None:
    async with behind_proxy() as (boxes, proxy):
        box, other = await boxes.make(), await boxes.make()
        facts = docker(DOCKER, "inspect", "--format", "{{json .}}", other).encode()
        proxy.lie("GET", f"/containers/{identity(DOCKER, box)}/json", answer=json_answer(facts))
        with pytest.raises(SandboxUnavailableError, match="another container"):
            await boxes.provider.destroy(box)
        proxy.truth()
        assert exists(DOCKER, identity(DOCKER, other))


@needs_docker[1]
async def test_a_not_found_that_names_another_container_is_no_end() -> None:
    """One that names the container by the engine's id is, which is another one than ours."""
    async with behind_proxy() as (boxes, proxy):
        box = await boxes.make()
        real = identity(DOCKER, box)

        def missing(named: str) -> bytes:
            return json_answer(json.dumps({"message": f"No such container: {named}"}).encode(), 404)

        for method in ("DELETE", "GET"):
            proxy.lie(method, f"/containers/{real}", forward=False, answer=missing("f" * 64))
            with pytest.raises(SandboxUnavailableError, match="another container"):
                await boxes.provider.destroy(box)
            assert exists(DOCKER, real)
        proxy.truth()
        docker(DOCKER, "rm", "-f", box)
        assert await boxes.provider.destroy(box) is False


@needs_docker[1]
async def test_a_connection_that_goes_silent_is_replaced_and_commands_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a firewall that forgets: nothing arrives and nothing ends. Every command runs once."""
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.5, raising=False)
    async with behind_proxy() as (boxes, proxy):
        box = await boxes.make()
        script = "echo ran >>/ran; until [ -e /go ]; do sleep 0.05; done; echo said; exit 5"
        handle = await boxes.provider.start_process(box, ProcessSpec(argv=("sh", "-c", script)))
        proxy.go_silent()
        docker(DOCKER, "exec", box, "touch", "/go")  # what it says goes into the silence
        async with asyncio.timeout(60):
            assert b"".join([data async for _, data in handle.output()]) == b"said\n"
            assert await handle.wait() == 5
            proxy.go_silent()
            assert await boxes.run(box, "cat", "/ran") == (0, "ran\n", "")


# -- pauses


async def test_a_paused_sandbox_is_not_renewed_and_its_commands_go_on_after_a_resume(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not renewed: who hears that it is not found takes it for ended. Its link meets silence meanwhile."""
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.3, raising=False)
    box = await boxes.make()
    handle = await boxes.provider.start_process(
        box, ProcessSpec(argv=("sh", "-c", "read x; exit $x"), stdin=True)
    )
    await boxes.provider.pause(box)
    second = DockerProvider.connect({**os.environ, "DOCKER_HOST": boxes.url})
    try:
        for provider in (boxes.provider, second):
            assert await provider.renew(box, 600) is None
    finally:
        await second.aclose()
    await asyncio.sleep(3)
    await boxes.provider.resume(box)
    await handle.write_stdin(b"7\n")
    assert await asyncio.wait_for(handle.wait(), 60) == 7
    assert await boxes.provider.renew(box, 600) is not None


@needs_docker[1]
@pytest.mark.parametrize("way", ["tcp", "forwarded-socket"])
async def test_a_pause_is_refused_where_the_engine_outlives_this_machine(tmp_path: Path, way: str) -> None:
    async with behind_proxy() as (boxes, proxy):
        box = await boxes.make()
        url = proxy.docker_host
        if way == "forwarded-socket":
            facts = json.loads(docker(DOCKER, "info", "--format", "{{json .}}"))
            answer = json.dumps({**facts, "Name": "another-machine"}).encode()
            proxy.lie("GET", "/info", forward=False, answer=json_answer(answer))
            url = f"unix://{tmp_path}/forwarded"
            server = await asyncio.start_unix_server(_forward_to(proxy.port), tmp_path / "forwarded")
        provider = DockerProvider.connect({**os.environ, "DOCKER_HOST": url})
        try:
            with pytest.raises(UnsupportedError, match="another machine") as caught:
                await provider.pause(box)
            assert caught.value.alternative
            assert (await provider.get(box)).state is SandboxState.RUNNING
        finally:
            await provider.aclose()
            if way == "forwarded-socket":
                server.close()


def _forward_to(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    return serve


_PAUSES = """
boxes = make(1)
for box in boxes:
    box.pause().result(60)
say("READY")
time.sleep(60)
"""


@needs_docker[1]
@pytest.mark.parametrize("ended_by", ["guardian", "sweep"])
def test_a_paused_sandbox_of_a_killed_owner_ends(tmp_path: Path, ended_by: str) -> None:
    """By the guardian; where that was killed as well, by the next lowtide process, though its clock stands still."""
    world = World(tmp_path, "docker", {"LOWTIDE_IMAGE": IMAGE, "DOCKER_HOST": DOCKER})
    try:
        owner = world.start_program(_PAUSES)
        owner.until("READY", 120)
        (made,) = owner.made()
        guardian = world.guardian()
        if ended_by == "sweep":
            os.kill(guardian, signal.SIGSTOP)
        owner.kill()
        if ended_by == "sweep":
            os.kill(guardian, signal.SIGKILL)
            assert docker(DOCKER, "inspect", "--format", "{{.State.Status}}", made) == "paused"
            world.sweep()
        world.wait_until_clean()
    finally:
        world.close()


# -- the first use of an engine


@pytest.fixture(scope="module")
def new_engine() -> Iterator[str]:
    """An engine of its own, with nothing on it, in namespaces of its own: an engine changes bridges, rules and mounts of the
    machine that it finds. There the registry is where it is here."""
    home = Path(tempfile.mkdtemp(prefix="lowtide-engine-", dir="/tmp"))  # short: its sockets are in there
    url, port = f"unix://{home}/engine.sock", REGISTRY.rpartition(":")[2]
    arguments = [
        "-H",
        url,
        "--data-root",
        f"{home}/data",
        "--exec-root",
        f"{home}/exec",
        "--pidfile",
        f"{home}/pid",
    ]
    arguments += ["--storage-driver", "vfs"]
    script = 'ip link set lo up && exec dockerd "$@"'
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> subprocess.Popen[bytes]:
        with (home / "log").open("ab") as file:
            environ = {**os.environ, "TMPDIR": str(home)}  # where a slow containerd writes its stacks
            started.append(subprocess.Popen(command, stdout=file, stderr=file, cwd=home, env=environ))
        return started[-1]

    try:
        start("socat", f"UNIX-LISTEN:{home}/registry,fork", f"TCP:127.0.0.1:{port}")
        engine = start(
            *("setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--net"),
            "sh",
            "-c",
            script,
            "sh",
            *arguments,
        )
        for _ in range(300):
            with contextlib.suppress(subprocess.CalledProcessError):
                docker(url, "version")
                break
            assert engine.poll() is None, (home / "log").read_text()[-2000:]
            time.sleep(0.1)
        inside = ("nsenter", f"--net=/proc/{engine.pid}/ns/net")
        start(
            *inside,
            "socat",
            f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr",
            f"UNIX-CONNECT:{home}/registry",
        )
        yield url
    finally:
        for one in reversed(started):
            one.terminate()
            one.wait(60)
        shutil.rmtree(home)


@pytest.fixture
def registry_image() -> str:
    """A small image that the new engine has to pull."""
    image = f"{REGISTRY}/lowtide-test-{secrets.token_hex(6)}:1"
    import_bare_image(DOCKER, image)
    docker(DOCKER, "push", image)
    docker(DOCKER, "rmi", image)
    return image


def networks(url: str) -> list[str]:
    return docker(url, "network", "ls", "-q", "--no-trunc", "--filter", f"name=^{NETWORK}$").split()


def make_network(url: str) -> None:
    """One more of lowtide's, whether there is one or not."""
    body = json.dumps({"Name": NETWORK, "CheckDuplicate": False, "Labels": {"lowtide-cache": "network"}})
    command = ["curl", "-sf", "--unix-socket", url.removeprefix("unix://"), "-d", body]
    command += ["-H", "Content-Type: application/json", "http://engine/v1.41/networks/create"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


needs_own_engine = [
    # On a busy machine thirty creates at once, with an engine that copies whole images, outlast every deadline.
    pytest.mark.alone,
    needs_docker[1],
    pytest.mark.skipif(
        os.getuid() != 0 or not all(shutil.which(one) for one in ("dockerd", "socat", "ip", "curl")),
        reason="no engine can be started here: it takes root, dockerd, socat, ip and curl",
    ),
    pytest.mark.skipif(
        not REGISTRY, reason="no registry: scripts/engines up registry, then eval its exports"
    ),
]


class TestANewEngine:
    pytestmark = needs_own_engine

    async def test_a_first_create_finds_no_image_no_network_and_no_program(
        self, new_engine: str, registry_image: str
    ) -> None:
        for what in ("network", "volume"):
            for one in docker(new_engine, what, "ls", "-q", "--filter", "label=lowtide-cache").split():
                docker(new_engine, what, "rm", one)
        assert networks(new_engine) == []
        async with boxes_on(new_engine) as boxes:
            box = await boxes.make(network=FULL, image=registry_image)
            assert await boxes.provider.destroy(box) is True

    async def test_thirty_first_creates_at_once_find_no_image_no_network_and_no_program(
        self, new_engine: str, registry_image: str
    ) -> None:
        """Three repairs, each with tries of its own, and one network for all."""
        async with boxes_on(new_engine) as boxes:
            made = await asyncio.gather(*(boxes.make(network=FULL, image=registry_image) for _ in range(30)))
            assert len(set(made)) == 30
            assert len(networks(new_engine)) == 1

    async def test_networks_of_one_name_are_no_ambiguity_and_the_surplus_goes(
        self, new_engine: str, registry_image: str
    ) -> None:
        """As an earlier version, or many processes at once, made them."""
        for _ in range(3):
            make_network(new_engine)
        foreign = docker(new_engine, "network", "create", f"{NETWORK}-of-somebody")
        before = networks(new_engine)
        assert len(before) >= 3
        try:
            async with boxes_on(new_engine) as boxes:
                box = await boxes.make(network=FULL, image=registry_image)
                (used,) = (await boxes.provider.inspect(box))["NetworkSettings"]["Networks"].values()
                assert networks(new_engine) == [used["NetworkID"]]
            assert foreign in docker(new_engine, "network", "ls", "-q", "--no-trunc").split()
        finally:
            docker(new_engine, "network", "rm", foreign)

    async def test_a_network_of_the_same_name_that_comes_later_is_removed(
        self, new_engine: str, registry_image: str
    ) -> None:
        """As another process makes it, that has looked before this one's was there."""
        async with boxes_on(new_engine) as boxes:
            first = await boxes.make(network=FULL, image=registry_image)
            (used,) = networks(new_engine)
            make_network(new_engine)
            assert await boxes.make(network=FULL, image=registry_image) != first
            assert networks(new_engine) == [used]

    async def test_a_network_that_somebody_removes_is_made_again(
        self, new_engine: str, registry_image: str
    ) -> None:
        async with boxes_on(new_engine) as boxes:
            first = await boxes.make(network=FULL, image=registry_image)
            await boxes.provider.destroy(first)
            docker(new_engine, "network", "rm", *networks(new_engine))
            assert await boxes.make(network=FULL, image=registry_image)

    async def test_many_processes_at_once(self, new_engine: str, registry_image: str) -> None:
        for network in networks(new_engine):
            docker(new_engine, "network", "rm", network)
        command = [sys.executable, "-c", _MAKES_TEN, new_engine, registry_image]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        try:
            said = [await asyncio.to_thread(one.communicate, timeout=120) for one in running]
        finally:
            for one in running:
                one.kill()
        assert [out for out, _ in said] == ["10\n"] * 3
        async with boxes_on(new_engine) as boxes:  # whoever comes next finds one network, or leaves one
            await boxes.make(network=FULL, image=registry_image)
            assert len(networks(new_engine)) == 1


_MAKES_TEN = """
import asyncio, sys
from tests.container_engine import boxes_on
from lowtide.providers.base import Network, NetworkMode

async def main():
    async with boxes_on(sys.argv[1]) as boxes:
        full = Network(mode=NetworkMode.INTERNET)
        print(len(await asyncio.gather(*(boxes.make(network=full, image=sys.argv[2]) for _ in range(10)))))

asyncio.run(main())
"""


# -- images and variables


@needs_docker[1]
@pytest.mark.parametrize("link_to_it", [False, True], ids=["itself", "by-a-link"])
async def test_an_image_whose_passwd_blocks_the_engine_is_refused_before_it_is_started(
    link_to_it: bool,
) -> None:
    """Started, the engine would wait at the FIFO for ever, and answer nothing about the container any more."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        fifo = tarfile.TarInfo("etc/waits" if link_to_it else "etc/passwd")
        fifo.type = tarfile.FIFOTYPE
        tar.addfile(fifo)
        if link_to_it:
            entry = tarfile.TarInfo("etc/passwd")
            entry.type, entry.linkname = tarfile.SYMTYPE, "waits"
            tar.addfile(entry)
    image = f"lowtide-test-fifo:{secrets.token_hex(6)}"
    docker(DOCKER, "import", "-", image, input=out.getvalue())
    try:
        async with boxes_on(DOCKER) as boxes:
            spec = boxes.spec(image=image)
            with pytest.raises(SandboxFailedError, match="/etc/passwd"):
                await asyncio.wait_for(boxes.provider.create(spec), 60)
            assert await boxes.provider.find(spec) is None
    finally:
        docker(DOCKER, "rmi", image)


@needs_docker[1]
async def test_no_snapshot_is_made_that_would_block_the_engine() -> None:
    async with boxes_on(DOCKER) as boxes:
        box = await boxes.make()
        script = "cp /etc/passwd /kept; rm /etc/passwd; mkfifo /etc/passwd"
        assert (await boxes.run(box, "sh", "-c", script))[0] == 0
        before = await boxes.provider.list_snapshots()
        with pytest.raises(SandboxError, match="/etc/passwd"):
            await boxes.provider.snapshot(box, "blocks")
        assert set(await boxes.provider.list_snapshots()) <= set(before)
        assert (await boxes.run(box, "sh", "-c", "rm /etc/passwd; mv /kept /etc/passwd"))[0] == 0
        snapshot = await boxes.provider.snapshot(box, "starts")
        assert await boxes.provider.delete_snapshot(snapshot)


@needs_docker[1]
async def test_a_passwd_that_becomes_a_fifo_costs_later_users_a_bounded_wait_and_the_end_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine reads it for every new channel into the sandbox."""
    monkeypatch.setattr("lowtide.providers.docker.provider._RESTART_SECONDS", 3.0)
    async with boxes_on(DOCKER) as boxes:
        box = await boxes.make()
        assert (await boxes.run(box, "sh", "-c", "rm /etc/passwd; mkfifo /etc/passwd"))[0] == 0
        second = DockerProvider.connect({**os.environ, "DOCKER_HOST": boxes.url})
        try:
            async with asyncio.timeout(60):
                with pytest.raises(SandboxUnavailableError):
                    await second.start_process(box, ProcessSpec(argv=("true",)))
                assert (await second.get(box)).state is SandboxState.RUNNING
                assert await second.destroy(box) is True
        finally:
            await second.aclose()
        assert await boxes.gone(box)


@pytest.mark.parametrize("name", ["LOWTIDE_KEY", "LOWTIDE_FIRST"])
async def test_variables_that_the_program_inside_takes_are_refused(boxes: Boxes, name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        await boxes.make(environment={name: "x"})
    assert [info async for info in boxes.provider.list({"lowtide-ledger": boxes.ledger_id})] == []
