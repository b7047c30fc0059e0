"""Channels that break: no byte is lost, none comes twice, and no command runs twice."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.inside_program import Inside, PipeChannel, run, serving

from lowtide.errors import SandboxUnavailableError
from lowtide.providers.base import ProcessSpec
from lowtide.providers.inside import Asleep, Client, Clients, build, link, program

pytestmark = pytest.mark.timeout(300)

_COUNTED = """
import hashlib, sys
digest = hashlib.sha256()
for number in range(int(sys.argv[1])):
    data = hashlib.sha256(str(number).encode()).digest() * 2048
    digest.update(data)
    sys.stdout.buffer.write(data)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
"""


@pytest.mark.parametrize("text", [False, True], ids=["binary", "text"])
async def test_fifty_megabytes_across_ten_breaks(text: bool, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    breaks = random.Random(seed)
    counter = tmp_path / "counter"
    limits = [breaks.randrange(1, 5_000_000) for _ in range(10)]  # all of them within the fifty megabytes
    async with serving(text=text, limits=limits) as inside:
        script = f'echo ran >>"{counter}"; exec python3 -c "$1" 800'
        code, out, said = await run(inside.client(), "sh", "-c", script, "sh", _COUNTED)
        assert len(inside.channels) == 11
    assert code == 0
    assert len(out) == 800 * 65536
    assert hashlib.sha256(out).hexdigest() == said.decode()
    assert counter.read_text() == "ran\n"


async def test_input_goes_on_after_a_break() -> None:
    data = random.Random(7).randbytes(9_000_000)
    async with serving(limits=[2_000, 4_000, 8_000, 16_000]) as inside:
        code, out, _ = await run(inside.client(), "sha256sum", input=data)
        assert (code, out.split()[0].decode()) == (0, hashlib.sha256(data).hexdigest())


async def test_a_command_goes_on_without_a_channel_and_its_output_waits(tmp_path: Path) -> None:
    async with serving() as inside:
        client = inside.client()
        process = await client.start(
            ProcessSpec(argv=("sh", "-c", f"sleep 0.3; echo one; touch {tmp_path}/done; exit 4"))
        )
        inside.channels[0].close()
        while not (tmp_path / "done").exists():
            await asyncio.sleep(0.02)
        assert [chunk async for chunk in process.output()] == [(1, b"one\n")]
        assert await process.wait() == 4


async def test_a_break_that_lasts_is_an_error_that_says_so() -> None:
    async with serving() as inside:
        client = inside.client(bound_seconds=0.3)
        process = await client.start(ProcessSpec(argv=("sleep", "60")))
        inside.argv = ("false",)
        inside.channels[0].close()
        with pytest.raises(SandboxUnavailableError, match="broken for more than"):
            await process.wait()
        with pytest.raises(SandboxUnavailableError):
            await client.start(ProcessSpec(argv=("true",)))


async def test_an_engines_words_in_place_of_the_program_are_a_break_and_no_end() -> None:
    async with serving() as inside:
        client = inside.client()
        process = await client.start(ProcessSpec(argv=("sh", "-c", "read line; exit 5"), stdin=True))
        usual, inside.argv = inside.argv, ("echo", "cannot exec in a stopped state: unknown")
        inside.channels[0].close()
        while len(inside.channels) < 3:
            await asyncio.sleep(0.02)
        inside.argv = usual
        await process.write_stdin(b"go\n")
        assert await process.wait() == 5


@pytest.mark.parametrize("said", [b"", b"a banner without an end\n"], ids=["silent", "talkative"])
async def test_one_that_does_not_greet_is_given_up(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noise:
        async def send(self, data: bytes) -> None:
            pass

        async def receive(self) -> bytes:
            await asyncio.sleep(0.01 if said else 3600)
            return said

        def close(self) -> None:
            pass

    async def opener(first: bytes) -> Noise:
        return Noise()

    monkeypatch.setattr(link, "_GREETING_SECONDS", 0.3)
    client = Client(opener, key=b"k" * 16, provider="test", sandbox_id="s", text=True)
    with pytest.raises(SandboxUnavailableError, match=r"no answer from inside within 0\.3 seconds"):
        await asyncio.wait_for(client.start(ProcessSpec(argv=("true",))), 30)


@pytest.mark.parametrize("text", [False, True], ids=["binary", "text"])
async def test_a_channel_that_goes_silent_is_opened_anew_and_the_command_runs_once(
    text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side hears of an end. What the command prints meanwhile arrives, and later commands work."""
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.2)
    counter, go = tmp_path / "counter", tmp_path / "go"
    async with serving(text=text) as inside:
        client = inside.client()
        script = f'echo ran >>"{counter}"; until [ -e "{go}" ]; do sleep 0.02; done; echo one; exit 4'
        process = await client.start(ProcessSpec(argv=("sh", "-c", script)))
        inside.channels[0].silent = True
        go.touch()  # printed into the silence
        async with asyncio.timeout(60):
            assert [chunk async for chunk in process.output()] == [(1, b"one\n")]
            assert await process.wait() == 4
            assert (await run(client, "echo", "later"))[1] == b"later\n"
        assert len(inside.channels) == 2
    assert counter.read_text() == "ran\n"


async def test_a_channel_that_went_silent_while_idle_is_noticed_by_the_next_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.2)
    async with serving() as inside:
        client = inside.client()
        await run(client, "true")
        inside.channels[0].silent = True
        async with asyncio.timeout(60):
            assert (await run(client, "echo", "here"))[1] == b"here\n"
        assert len(inside.channels) == 2


async def test_a_quiet_command_and_an_idle_client_keep_their_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet is not silent: the program answers. Without a waiting caller it is not asked."""
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.1)
    async with serving() as inside:
        client = inside.client()
        assert (await run(client, "sleep", "2"))[0] == 0
        said = client._link._received
        await asyncio.sleep(1)
        assert client._link._received == said
        assert (await run(client, "echo", "here"))[1] == b"here\n"
        assert len(inside.channels) == 1


async def test_channels_that_all_go_silent_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.1)
    async with serving() as inside:
        client = inside.client(bound_seconds=0.3)
        process = await client.start(ProcessSpec(argv=("sleep", "60")))
        opened = inside.open

        async def opening(first: bytes) -> PipeChannel:
            channel = await opened(first)
            channel.silent = True
            return channel

        client._link._opener = opening
        inside.channels[0].silent = True
        with pytest.raises(SandboxUnavailableError, match="broken for more than"):
            await asyncio.wait_for(process.wait(), 60)


async def test_commands_of_a_paused_sandbox_wait_for_its_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_ASLEEP_SECONDS", 0.05)
    async with serving() as inside:
        client = inside.client(bound_seconds=0.3)
        process = await client.start(ProcessSpec(argv=("sh", "-c", "read line; exit 5"), stdin=True))
        opened, tried = inside.open, 0

        async def opening(first: bytes) -> PipeChannel:
            nonlocal tried
            tried += 1
            if tried < 20:  # for longer than a channel may be broken
                raise Asleep("the sandbox is paused", provider="test", sandbox_id="here")
            return await opened(first)

        client._link._opener = opening
        inside.channels[0].close()
        await process.write_stdin(b"go\n")
        assert await asyncio.wait_for(process.wait(), 60) == 5


async def test_another_program_in_its_place_is_not_believed() -> None:
    async with serving() as inside, serving() as other:
        client = inside.client()
        process = await client.start(ProcessSpec(argv=("sleep", "60")))
        await run(other.client(), "true")
        inside.name = other.name  # whoever killed the first one could answer under its name
        inside.channels[0].close()
        first = client.pid
        with pytest.raises(SandboxUnavailableError, match=r"another program|not there any more"):
            await process.wait()
        assert client.pid == first


async def test_a_client_that_leaves_lets_its_commands_go_on(tmp_path: Path) -> None:
    async with serving() as inside:
        first, second = inside.client(), inside.client()
        script = f"yes | head -c 5000000; touch {tmp_path}/done"
        await first.start(ProcessSpec(argv=("sh", "-c", script)))
        await run(second, "true")
        first.close()
        while not (tmp_path / "done").exists():
            await asyncio.sleep(0.02)
        assert (await run(second, "echo", "here"))[1] == b"here\n"


async def test_the_first_command_rides_along_with_the_greeting() -> None:
    async with serving() as inside:
        sent = []
        opened = inside.open

        async def opening(first: bytes) -> object:
            sent.append(first)
            return await opened(first)

        inside.open = opening  # type: ignore[method-assign,assignment]
        assert (await run(inside.client(), "echo", "along"))[1] == b"along\n"
        assert b"along\0" in sent[0]


async def test_a_line_of_shell_brings_it_in_with_the_first_command_and_leaves_no_file() -> None:
    async with serving() as inside:
        line = program.serve_line(os.uname().machine, inside.name)

        async def opening(first: bytes) -> PipeChannel:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", line),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**inside.environment, program.FIRST: base64.b64encode(first).decode()},
            )
            inside.channels.append(PipeChannel(process))
            return inside.channels[-1]

        inside.open = opening  # type: ignore[method-assign]
        client = inside.client()
        word = "x" * 60_000
        code, out, _ = await run(client, "sh", "-c", 'env; printf %s "$1"', "sh", word)
        assert (code, out[-60_000:].decode()) == (0, word)
        assert program.FIRST.encode() not in out
        assert not list(Path("/tmp").glob(f".lowtide-{inside.name}*"))
        assert (await run(client, "cat", input=b"over its own input"))[1] == b"over its own input"


async def test_commands_do_not_wait_for_ever_for_a_client_that_nobody_saw_go(tmp_path: Path) -> None:
    """As where a service keeps the program's streams open after their connection broke."""
    if shutil.which(build.COMPILERS[os.uname().machine]) is None:
        pytest.skip("no compiler")
    build.build(os.uname().machine, tmp_path / "hasty", build.FLAGS + " -DBOUND_MS=300")
    async with serving(argv=(str(tmp_path / "hasty"),)) as inside:
        client = inside.client()
        script = f"head -c 9000000 /dev/zero; touch {tmp_path}/done"
        await client.start(ProcessSpec(argv=("sh", "-c", script)))
        running = client._link._running
        assert running is not None
        running.cancel()
        async with asyncio.timeout(60):
            while not (tmp_path / "done").exists():
                await asyncio.sleep(0.02)


def test_another_event_loop_gets_a_client_of_its_own() -> None:
    inside = Inside()

    async def key(sandbox_id: str) -> bytes:
        return b"k" * 16

    clients = Clients("test", lambda sandbox_id, first: inside.open(first), key)

    async def once(*, last: bool) -> bytes:
        client = await clients.get("here")
        inside.clients.append(client)
        out = (await run(client, "echo", "here"))[1]
        if last:
            clients.close()
            await inside.aclose()
        while inside.channels:  # the first loop ends under its client
            channel = inside.channels.pop()
            channel.close()
            await channel.process.wait()
        return out

    assert asyncio.run(once(last=False)) == b"here\n"
    assert asyncio.run(once(last=True)) == b"here\n"


async def test_where_channels_are_few_the_one_that_is_idle_for_longest_lets_go() -> None:
    places = {name: Inside() for name in "abc"}

    async def key(sandbox_id: str) -> bytes:
        return b"k" * 16

    clients = Clients("test", lambda sandbox_id, first: places[sandbox_id].open(first), key, most=2)

    async def echo(name: str) -> bytes:
        client = await clients.get(name)
        if client not in places[name].clients:
            places[name].clients.append(client)
        return (await run(client, "echo", name))[1]

    try:
        busy = await (await clients.get("a")).start(ProcessSpec(argv=("cat",), stdin=True))
        for name in "bcbc":
            assert await echo(name) == name.encode() + b"\n"
        assert [len(places[name].channels) for name in "abc"] == [1, 2, 2]
        await busy.close_stdin()
        assert await busy.wait() == 0
        assert await echo("a") == b"a\n"
    finally:
        clients.close()
        for place in places.values():
            await place.aclose()


async def test_a_client_whose_sandbox_is_ending_under_a_command_ends_with_the_provider() -> None:
    inside = Inside()

    async def key(sandbox_id: str) -> bytes:
        return b"k" * 16

    clients = Clients("test", lambda sandbox_id, first: inside.open(first), key)
    client = await clients.get("here")
    inside.clients.append(client)
    try:
        command = await client.start(ProcessSpec(argv=("sleep", "60")))
        clients.forget("here")
        assert client.alive  # its command is to hear how it ended
        clients.close()
        assert not client.alive
        with pytest.raises(SandboxUnavailableError):
            await command.wait()
    finally:
        await inside.aclose()
