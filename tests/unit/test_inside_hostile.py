"""Both sides of a channel treat the other as hostile: random and malicious bytes end in an error, never worse."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.inside_program import Inside, run

from lowtide.errors import LowtideError
from lowtide.providers.base import ProcessSpec
from lowtide.providers.inside import Client, frames
from lowtide.providers.inside.link import GREETING, HEAD, MAGIC, WELCOME
from lowtide.trees import tar_stream

pytestmark = pytest.mark.timeout(300)
_settings = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


# -- at the program

_NUMBERS = st.one_of(
    st.integers(0, 40), st.sampled_from([0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 4 << 20, (4 << 20) - 4, 65536])
)
_BYTES = st.one_of(st.binary(max_size=200), st.builds(lambda n: b"\0" * n, st.integers(0, 2000)))
_START = st.builds(
    lambda flags, rows, argc, count, words: (
        struct.pack("<BHHHH", flags, rows, 9, argc, count) + b"\0".join(words) + b"\0"
    ),
    st.integers(0, 7),
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 1, 2, 3, 0xFFFF]),
    st.sampled_from([0, 1, 2, 0xFFFF]),
    st.lists(
        st.sampled_from(
            [
                b"",
                b"/",
                b"true",
                b"cat",
                b"read",
                b"write",
                b"unpack",
                b"list",
                b"A=b",
                b"-",
                b"nobody",
                b"/nowhere",
            ]
        ),
        max_size=6,
    ),
)
_FRAMES = st.one_of(
    st.builds(
        lambda kind, number, data: frames.frame(kind, number, data),
        st.integers(0, 255),
        st.integers(0, 3),
        _BYTES,
    ),
    st.builds(lambda number, data: frames.frame(frames.START, number, data), st.integers(0, 3), _START),
    st.builds(
        lambda kind, number, value: frames.frame(kind, number, struct.pack("<L", value)),
        st.integers(1, 9),
        st.integers(0, 3),
        _NUMBERS,
    ),
    st.builds(lambda length, rest: struct.pack("<L", length) + rest, _NUMBERS, _BYTES),
)


def _packet(payload: bytes, offset: int = 0, taken: int = 0) -> bytes:
    return HEAD.pack(len(payload) + 16, offset, taken) + payload


def _greeting(number: int) -> bytes:
    return _packet(GREETING.pack(MAGIC, b"k" * 16, number, 0, 0))


async def _attack(inside: Inside, data: bytes) -> None:
    """Say it, and read what comes for a moment."""
    channel = await inside.open(b"")
    try:
        await channel.send(data)
        async with asyncio.timeout(0.05):
            while await channel.receive():
                pass
    except (TimeoutError, OSError):
        pass
    finally:
        channel.close()
        await channel.process.wait()


async def _survived(inside: Inside, data: bytes) -> None:
    client = inside.client()
    try:
        await run(client, "true")
        await _attack(inside, data)
        for _ in range(3):  # hostile requests of our own key may have ended commands: never the server
            assert (await run(client, "echo", "still"))[:2] == (0, b"still\n")
    finally:
        await inside.aclose()


def _sanitized_inside(sanitized: Path, *, text: bool = False) -> Inside:
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "ASAN_OPTIONS": "detect_leaks=0"}
    return Inside(text=text, argv=(str(sanitized),), environment=environment)


@_settings
@given(data=st.binary(max_size=400))
def test_random_bytes_before_the_greeting(sanitized: Path, data: bytes) -> None:
    asyncio.run(_survived(_sanitized_inside(sanitized), data))


@_settings
@given(data=st.binary(max_size=200), lines=st.lists(st.binary(max_size=50), max_size=5))
def test_random_lines_in_text_mode(sanitized: Path, data: bytes, lines: list[bytes]) -> None:
    noise = data + b"\n~" + b"\n~".join(lines) + b"\n"
    asyncio.run(_survived(_sanitized_inside(sanitized, text=True), noise))


@_settings
@given(said=st.lists(_FRAMES, max_size=12), number=st.integers(1, 1 << 60))
def test_hostile_frames_from_a_client_with_the_key(sanitized: Path, said: list[bytes], number: int) -> None:
    asyncio.run(_survived(_sanitized_inside(sanitized), _greeting(number) + _packet(b"".join(said)[:32000])))


@_settings
@given(
    packets=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 64), st.sampled_from([2**64 - 1, 2**63, 1 << 32])),
            st.one_of(st.integers(0, 64), st.sampled_from([2**64 - 1, 2**63])),
            st.binary(max_size=64),
        ),
        max_size=6,
    )
)
def test_hostile_offsets_from_a_client_with_the_key(
    sanitized: Path, packets: list[tuple[int, int, bytes]]
) -> None:
    data = b"".join(_packet(payload, offset, taken) for offset, taken, payload in packets)
    asyncio.run(_survived(_sanitized_inside(sanitized), _greeting(5) + data))


@_settings
@given(
    kinds=st.lists(st.sampled_from(b"0125xLKg76S\0"), min_size=1, max_size=5),
    names=st.lists(st.binary(max_size=120), min_size=5, max_size=5),
    sizes=st.lists(st.sampled_from([0, 1, 511, 512, 513, 8**11 - 1, 40_000, None]), min_size=5, max_size=5),
    body=st.one_of(
        st.binary(max_size=1500),
        st.builds(
            tar_stream._record,
            st.sampled_from([b"LOWTIDE.wanted", b"mtime", b"path", b"size"]),
            st.one_of(
                st.lists(st.sampled_from([b"d", b"f", b"a", b"../", b"/", b"\0", b"-", b"."])).map(b"".join),
                st.binary(max_size=1000),
            ),
        ),
    ),
)
def test_a_hostile_tar_stream(
    sanitized: Path,
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[int],
    names: list[bytes],
    sizes: list[int | None],
    body: bytes,
) -> None:
    from lowtide.providers.inside import files

    stream = b""
    for kind, name, size in zip(kinds, names, sizes, strict=False):
        head = bytearray(512)
        head[: min(100, len(name))] = name[:100]
        head[100:108], head[124:136] = b"0000644\0", b"%011o\0" % (len(body) if size is None else size)
        head[500:512] = (b"ns" + name)[:12].ljust(12, b"9")
        head[156] = kind
        stream += bytes(head) + body.ljust((len(body) + 511) // 512 * 512, b"\0")

    async def attempt() -> None:
        inside = _sanitized_inside(sanitized)
        client = inside.client()

        async def chunks() -> AsyncIterator[bytes]:
            yield stream

        try:
            said = ""
            try:
                await files.write_tree(client, str(tmp_path_factory.mktemp("tree") / "t"), chunks())
            except LowtideError as error:
                said = str(error)
            assert "file call was cut short" not in said  # which is how a sanitizer's abort looks from here
            assert (await run(client, "echo", "still"))[1] == b"still\n"
        finally:
            await inside.aclose()

    asyncio.run(attempt())


async def test_a_flood_of_starts_without_reading_is_held_back(sanitized: Path) -> None:
    inside = _sanitized_inside(sanitized)
    words = struct.pack("<BHHHH", 0, 0, 0, 3, 0) + b"\0\0sh\0-c\0yes\0"
    flood = b"".join(frames.frame(frames.START, number, words) for number in range(40))
    await _survived(inside, _greeting(9) + _packet(flood))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("files", [0, 40], ids=["none", "fewer-than-polled"])
async def test_a_lowered_limit_on_descriptors_does_not_make_it_spin(files: int) -> None:
    """A root in the sandbox may lower it for process 1. What runs goes on; new channels and commands may be refused."""
    inside, server = Inside(), 0
    try:
        client = inside.client()
        process = await client.start(
            ProcessSpec(argv=("sh", "-c", "read line; echo $line; exit 3"), stdin=True)
        )
        server = client.pid or 0
        resource.prlimit(server, resource.RLIMIT_NOFILE, (files, files))
        waiting = await inside.open(_greeting(77))  # at the listener, which is ready from now on
        before = _processor_seconds(server)
        await asyncio.sleep(2)
        assert _processor_seconds(server) - before < 0.5
        await process.write_stdin(b"still\n")
        await process.close_stdin()
        async with asyncio.timeout(60):
            assert [chunk async for chunk in process.output()] == [(1, b"still\n")]
            assert await process.wait() == 3
        waiting.close()
    finally:
        if server:
            os.kill(server, signal.SIGKILL)
        await inside.aclose()


# -- at the client


class _Liar:
    """A channel whose other side says what it was told to say."""

    def __init__(self, said: list[bytes]) -> None:
        self._said = said

    async def send(self, data: bytes) -> None:
        return None

    async def receive(self) -> bytes:
        return self._said.pop(0) if self._said else b""

    def close(self) -> None:
        self._said.clear()


def _welcome(status: int = 0, stored: int = 0) -> bytes:
    return _packet(WELCOME.pack(MAGIC, b"p" * 16, stored, status, 1))


async def _believed(said: list[bytes], *, text: bool = False) -> None:
    """The client ends with an error of ours, soon, whatever the program says."""

    async def opener(first: bytes) -> _Liar:
        return _Liar(list(said))

    client = Client(opener, key=b"k" * 16, provider="test", sandbox_id="x", text=text, bound_seconds=0.02)
    try:
        async with asyncio.timeout(20):
            process = await client.start(ProcessSpec(argv=("true",)))
            async for _ in process.output():
                pass
            assert 0 <= await process.wait() <= 255
    except LowtideError:
        pass
    finally:
        client.close()


@_settings
@given(said=st.lists(st.binary(max_size=300), max_size=5), text=st.booleans())
def test_a_program_that_says_anything(said: list[bytes], text: bool) -> None:
    asyncio.run(_believed(said, text=text))
    asyncio.run(_believed([_welcome(), *said]))


@_settings
@given(
    said=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.binary(max_size=12)), max_size=12),
    stored=st.integers(0, 200),
)
@example(said=[(frames.EXITED, 1, bytes(4))], stored=20)
def test_a_program_that_answers_in_any_order(said: list[tuple[int, int, bytes]], stored: int) -> None:
    stream = b"".join(frames.frame(kind, number, data) for kind, number, data in said)
    asyncio.run(_believed([_welcome(0, stored) + _packet(stream)]))


@_settings
@given(length=st.integers(0, 2**32 - 1), rest=st.binary(max_size=30))
def test_a_program_that_lies_about_lengths(length: int, rest: bytes) -> None:
    asyncio.run(_believed([_welcome() + struct.pack("<L", length) + rest]))
    asyncio.run(_believed([_welcome() + _packet(struct.pack("<L", length) + rest)]))


@_settings
@given(answer=st.binary(max_size=200), call=st.sampled_from(["stat", "list", "read", "remove"]))
def test_a_program_that_answers_file_calls_with_anything(answer: bytes, call: str) -> None:
    from lowtide.providers.inside import files

    said = frames.frame(frames.STARTED, 1) + frames.frame(frames.STDOUT, 1, answer)
    said += frames.frame(frames.EXITED, 1, struct.pack("<L", 0))

    async def attempt() -> None:
        async def opener(first: bytes) -> _Liar:
            return _Liar([_welcome() + _packet(said)])

        client = Client(opener, key=b"k" * 16, provider="test", sandbox_id="x", bound_seconds=0.02)
        try:
            if call == "stat":
                await files.stat(client, "/x")
            elif call == "list":
                await files.list_dir(client, "/x")
            elif call == "remove":
                await files.remove(client, "/x", recursive=False)
            else:
                async for _ in files.read_file(client, "/x"):
                    pass
        except LowtideError:
            pass
        finally:
            client.close()

    asyncio.run(attempt())


@pytest.mark.parametrize("name", [b"../../etc/passwd", b"/etc/passwd", b"..", b""])
async def test_a_program_that_lists_names_that_lead_out(name: bytes) -> None:
    with pytest.raises(LowtideError, match="cut short"):
        await _listed(b"f 1 420 0\0" + name + b"\0\0\0")


async def test_a_program_that_lists_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.providers.inside import files

    monkeypatch.setattr(files, "_MOST_LISTED_BYTES", 100)
    with pytest.raises(LowtideError, match="too much"):
        await _listed(b"f 1 420 0\0name\0\0" * 10 + b"\0")


async def _listed(records: bytes) -> None:
    from lowtide.providers.inside import files

    said = frames.frame(frames.STARTED, 1) + frames.frame(frames.STDOUT, 1, b"ok\n" + records)
    said += frames.frame(frames.EXITED, 1, struct.pack("<L", 0))

    async def opener(first: bytes) -> _Liar:
        return _Liar([_welcome() + _packet(said)])

    client = Client(opener, key=b"k" * 16, provider="test", sandbox_id="x", bound_seconds=0.02)
    try:
        await files.list_dir(client, "/x")
    finally:
        client.close()


async def test_a_program_that_talks_without_an_end_keeps_nobody_waiting() -> None:
    heard = turns = 0

    async def somebody_else() -> None:
        nonlocal turns
        while heard < 500:
            turns += 1
            await asyncio.sleep(0)

    class Endless(_Liar):
        async def receive(self) -> bytes:
            nonlocal heard
            heard += 1
            return await super().receive() or (_packet(b"") if heard < 500 else b"")

    async def opener(first: bytes) -> _Liar:
        return Endless([_welcome() + _packet(frames.frame(frames.STARTED, 1))])

    client = Client(opener, key=b"k" * 16, provider="test", sandbox_id="x", bound_seconds=0.02)
    try:
        process = await client.start(ProcessSpec(argv=("true",)))
        await somebody_else()
        assert turns > 400
        await process.aclose()
    finally:
        client.close()


async def test_a_program_that_says_more_than_it_was_given_credit_for() -> None:
    said, at = [_welcome() + _packet(frames.frame(frames.STARTED, 1))], 9
    for _ in range(2 * frames.MOST_UNREAD // frames.PIECE):
        stream = frames.frame(frames.STDOUT, 1, bytes(frames.PIECE - 9))
        said.append(_packet(stream, offset=at))
        at += len(stream)

    async def opener(first: bytes) -> _Liar:
        return _Liar(said)

    client = Client(opener, key=b"k" * 16, provider="test", sandbox_id="x", bound_seconds=0.02)
    try:
        process = await client.start(ProcessSpec(argv=("true",)))
        with pytest.raises(LowtideError, match="more output than was asked for"):
            await process.wait()
    finally:
        client.close()
