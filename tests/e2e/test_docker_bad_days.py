"""What goes wrong with containers and engines, and what the docker provider says about it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.container_engine import IMAGE, Boxes, docker

from lowtide.errors import (
    SandboxFailedError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import Limits, ProcessSpec, SandboxState
from lowtide.providers.docker import DockerOptions, DockerProvider


async def test_no_engine(tmp_path: Path) -> None:
    boxes = Boxes(f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(SandboxUnavailableError, match="DOCKER_HOST") as caught:
        await boxes.make()
    assert caught.value.retryable
    with pytest.raises(SandboxUnavailableError):
        _ = boxes.provider.account
    await boxes.provider.aclose()


_AS_NOBODY = """
import asyncio, os, sys
from lowtide.errors import AuthenticationError
from lowtide.providers.docker import DockerProvider
import aiodocker
os.setgroups([]); os.setgid(65534); os.setuid(65534)

async def main():
    provider = DockerProvider.connect({"DOCKER_HOST": sys.argv[1]})
    try:
        await provider.get("01h00000000000000000000000")
    except AuthenticationError as error:
        print(error)
    await provider.aclose()

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become nobody")
def test_no_permission_on_the_socket() -> None:
    path = f"/tmp/lowtide-test-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        try:
            command = [sys.executable, "-c", _AS_NOBODY, f"unix://{path}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        finally:
            os.unlink(path)
    assert "no permission on the engine's socket" in done.stdout, done.stderr


@pytest.mark.parametrize("pull", ["never", "missing"])
async def test_an_image_that_is_not_there(boxes: Boxes, pull: str) -> None:
    image = "127.0.0.1:1/nobody/nothing:1"
    with pytest.raises((SandboxFailedError, SandboxUnavailableError), match="nothing"):
        await boxes.make(image=image, options=DockerOptions(pull=pull))  # type: ignore[arg-type]


async def test_a_user_the_image_does_not_know(boxes: Boxes) -> None:
    box = await boxes.make()
    with pytest.raises(ValidationError):
        code, out, err = await boxes.run(box, "true", user="nobody-of-that-name")
        pytest.fail(f"ran: {code} {out} {err}")


async def test_a_name_that_is_taken_by_somebody_else(boxes: Boxes) -> None:
    spec = boxes.spec()
    other = docker(boxes.url, "create", "--name", spec.lease_id, IMAGE, "true")
    try:
        with pytest.raises(SandboxFailedError) as caught:
            await boxes.provider.create(spec)
        assert caught.value.reason == "name-taken"
        assert await boxes.provider.find(spec) is None
        assert await boxes.provider.destroy(spec.lease_id) is False
        assert docker(boxes.url, "inspect", "--format", "{{.Name}}", other).lstrip("/") == spec.lease_id
    finally:
        docker(boxes.url, "rm", "-f", other)


async def test_the_same_create_twice_makes_one_sandbox(boxes: Boxes) -> None:
    spec = boxes.spec()
    first, second = await boxes.provider.create(spec), await boxes.provider.create(spec)
    assert first.sandbox_id == second.sandbox_id
    found = [info async for info in boxes.provider.list({"lowtide-lease": spec.lease_id})]
    assert len(found) == 1
    assert await boxes.run(first.sandbox_id, "echo", "alive") == (0, "alive\n", "")


async def test_other_peoples_containers_with_similar_names_are_untouched(boxes: Boxes) -> None:
    spec = boxes.spec(tags=("shared",))
    await boxes.provider.create(spec)
    others = [
        docker(boxes.url, "create", "--name", f"{spec.lease_id}x", IMAGE, "true"),
        docker(boxes.url, "create", "--name", f"lowtide-{spec.lease_id}", "--label", f"lowtide-lease={spec.lease_id}", IMAGE, "true"),
        docker(
            boxes.url, "create", "--name", f"other-{spec.lease_id}", "--label", f"lowtide-ledger={boxes.ledger_id}",
            "--label", "lowtide-tag-shared=1", IMAGE, "true",
        ),
    ]  # fmt: skip
    try:
        found = [info async for info in boxes.provider.list({"lowtide-tag-shared": "1"})]
        assert [info.sandbox_id for info in found] == [spec.lease_id]
        for other in (*others, f"{spec.lease_id}x"):
            with pytest.raises(SandboxNotFoundError):
                await boxes.provider.get(other)
            assert await boxes.provider.destroy(other) is False
            assert await boxes.provider.destroy(other, grace_seconds=1) is False
        assert await boxes.provider.destroy(spec.lease_id) is True
        for other in others:
            assert docker(boxes.url, "inspect", "--format", "{{.State.Status}}", other) == "created"
    finally:
        docker(boxes.url, "rm", "-f", *others)


async def test_a_container_that_somebody_deletes_under_a_command(boxes: Boxes) -> None:
    box = await boxes.make()
    handle = await boxes.provider.start_process(box, ProcessSpec(argv=("sleep", "1000")))
    docker(boxes.url, "rm", "-f", box)
    with pytest.raises(SandboxGone) as caught:
        await asyncio.wait_for(handle.wait(), 60)
    assert caught.value.reason == "deleted"
    with pytest.raises(SandboxGone):
        await boxes.run(box, "true")
    with pytest.raises(SandboxGone):
        async for _ in boxes.provider.read_file(box, "/etc/hostname"):
            pass
    assert await boxes.provider.destroy(box) is False


async def test_an_expired_sandbox_says_so(boxes: Boxes) -> None:
    box = await boxes.make(lifetime_seconds=2)
    assert await boxes.gone(box)
    with pytest.raises(SandboxGone) as caught:
        await boxes.run(box, "true")
    assert caught.value.reason == "expired"


async def test_memory_used_up_ends_the_command_and_not_the_sandbox(boxes: Boxes) -> None:
    box = await boxes.make(limits=Limits(memory_bytes=64 << 20))
    code, _, _ = await boxes.run(box, "python3", "-c", "x = bytearray(512 << 20)")
    assert code == 137
    assert await boxes.run(box, "echo", "alive") == (0, "alive\n", "")


async def test_a_command_survives_that_the_connection_into_the_sandbox_is_killed(boxes: Boxes) -> None:
    box = await boxes.make()
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.2; done; exit 5"
    handle = await boxes.provider.start_process(box, ProcessSpec(argv=("sh", "-c", script)))
    for _ in range(3):
        await boxes.run(box, "pkill", "-KILL", "-f", "^/.lowtide/inside attach")
    said = b"".join([data async for _, data in handle.output()])
    assert said.split() == [b"%d" % n for n in range(1, 10)]
    assert await handle.wait() == 5
    assert await boxes.run(box, "echo", "again") == (0, "again\n", "")


async def test_terminate_ends_what_left_the_session_under_another_user_and_a_terminal(boxes: Boxes) -> None:
    from lowtide.providers.base import TerminalSize

    box = await boxes.make()
    script = (
        "setsid sleep 4242 & (trap '' TERM; exec sleep 4243) & env -i setsid sh -c 'sleep 4244 & wait' & wait"
    )
    for keywords in ({}, {"user": "65534"}, {"tty": TerminalSize()}):
        handle = await boxes.provider.start_process(box, ProcessSpec(argv=("sh", "-c", script), **keywords))
        for _ in range(100):
            _, out, _ = await boxes.run(box, "ps", "-eo", "args=")
            if all(f"sleep 424{n}" in out for n in (2, 3, 4)):
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail(f"never started: {out}")
        await handle.terminate(0.3)
        _, out, _ = await boxes.run(box, "ps", "-eo", "args=")
        assert "sleep 424" not in out, keywords
        assert await handle.wait() != 0
        await handle.aclose()


async def test_read_only_root_user_and_tmpfs(boxes: Boxes) -> None:
    options = DockerOptions(user="65534:65534", read_only_root=True, tmpfs={"/scratch": "mode=1777"})
    box = await boxes.make(options=options)

    async def content() -> AsyncIterator[bytes]:
        yield b"hello"

    assert (await boxes.run(box, "id", "-u"))[1] == "65534\n"
    assert await boxes.provider.write_file(box, "/scratch/a/b", content()) == 5
    assert await boxes.run(box, "cat", "/scratch/a/b") == (0, "hello", "")
    with pytest.raises(PermissionError):
        await boxes.provider.write_file(box, "/usr/nope", content())
    tree = b"".join([chunk async for chunk in boxes.provider.read_tree(box, "/scratch")])

    async def again() -> AsyncIterator[bytes]:
        yield tree

    await boxes.provider.write_tree(box, "/scratch/copy", again())
    assert await boxes.run(box, "cat", "/scratch/copy/a/b") == (0, "hello", "")


async def test_how_the_callers_own_main_process_ended_is_known_after_it_is_removed(boxes: Boxes) -> None:
    box = await boxes.make(command=("sh", "-c", "sleep 1; exit 3"))
    assert await boxes.gone(box)
    info = await boxes.provider.get(box)
    assert (info.state, info.exit_code) == (SandboxState.FAILED, 3)
    assert await boxes.provider.destroy(box) is False
    with pytest.raises(SandboxNotFoundError):
        await boxes.provider.get(box)


async def test_another_process_finds_uses_and_ends_the_sandbox(boxes: Boxes) -> None:
    box = await boxes.make()
    other = DockerProvider.connect(boxes.provider.credentials())
    try:
        assert other.account == boxes.provider.account
        assert (await other.get(box)).state is SandboxState.RUNNING
        handle = await other.start_process(box, ProcessSpec(argv=("true",)))
        assert await handle.wait() == 0
        assert await other.destroy(box, grace_seconds=5) is True
    finally:
        await other.aclose()
    assert await boxes.provider.destroy(box) is False


async def test_a_command_that_nobody_reads_any_more_goes_on(boxes: Boxes) -> None:
    box = await boxes.make()
    script = "head -c 20000000 /dev/zero; echo done > /tmp/done"
    handle = await boxes.provider.start_process(box, ProcessSpec(argv=("sh", "-c", script)))
    await handle.aclose()
    for _ in range(200):
        if (await boxes.run(box, "cat", "/tmp/done"))[1] == "done\n":
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("the command waits for a reader")


async def test_a_command_given_up_while_it_starts_is_ended(boxes: Boxes) -> None:
    box = await boxes.make()
    await boxes.run(box, "true")
    starting = asyncio.ensure_future(boxes.provider.start_process(box, ProcessSpec(argv=("sleep", "4245"))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for _ in range(100):
        if "sleep 4245" not in (await boxes.run(box, "ps", "-eo", "args="))[1]:
            break
        await asyncio.sleep(0.1)
    else:
        pytest.fail("nobody ended it")


async def test_a_slow_reader_does_not_hold_up_other_commands(boxes: Boxes) -> None:
    box = await boxes.make()
    flood = await boxes.provider.start_process(box, ProcessSpec(argv=("head", "-c", "50000000", "/dev/zero")))
    for _ in range(3):
        assert await boxes.run(box, "echo", "through") == (0, "through\n", "")
    total = 0
    async for _, data in flood.output():
        total += len(data)
    assert total == 50_000_000
    assert await flood.wait() == 0
