"""Processes: streams, input, limits, timeouts and cancellation, with real commands."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowtide import (
    CommandTimeoutError,
    OutputLimitError,
    ProcessResult,
    Sandbox,
    SandboxExecutionError,
    UnsupportedError,
    ValidationError,
)
from lowtide.process_driver import Command
from lowtide.providers.base import ProcessSpec
from lowtide.stream import StreamReader


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    from lowtide.providers import registry

    provider = registry.provider("faulty", directory=str(tmp_path_factory.mktemp("service")))
    with Sandbox.run(provider=provider) as sandbox:
        yield sandbox


def sh(box: Sandbox, script: str, **keywords: object) -> ProcessResult:
    return box.exec(["sh", "-c", script], **keywords).result(120)  # type: ignore[arg-type]


def test_a_long_command_is_not_shown_whole(box: Sandbox) -> None:
    result = sh(box, "true " + "x" * 100_000)
    assert len(repr(result)) < 600
    assert repr(result).endswith(" characters))")


def test_stdout_stderr_and_exit_code_come_apart(box: Sandbox) -> None:
    result = sh(box, "echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.returncode) == ("out\n", "err\n", 3)
    assert result.stdout_bytes == b"out\n"
    assert result.command == ("sh", "-c", "echo out; echo err >&2; exit 3")


def test_bytes_that_are_no_text_are_kept_and_text_is_decoded_across_chunks(box: Sandbox) -> None:
    process = box.exec(["sh", "-c", r"printf '\303'; sleep 0.3; printf '\244 \377'"])
    assert "".join(process.stdout) == "ä �"
    assert process.result(120).stdout_bytes == b"\xc3\xa4 \xff"


def test_check_raises_with_the_result_and_wait_does_not(box: Sandbox) -> None:
    process = box.exec(["sh", "-c", "echo broken >&2; exit 7"], check=True)
    with pytest.raises(SandboxExecutionError, match="broken") as caught:
        process.result(120)
    assert caught.value.result is not None
    assert caught.value.result.returncode == 7
    assert process.wait(120) == process.poll() == process.returncode == 7


def test_a_program_that_does_not_exist_is_exit_code_127(box: Sandbox) -> None:
    assert box.exec(["no-such-program"]).wait(120) == 127


def test_output_arrives_while_the_command_runs(box: Sandbox) -> None:
    process = box.exec(["sh", "-c", "echo first; read line; echo $line"], stdin=True)
    assert next(process.stdout) == "first\n"
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.writeline("second").result(120)
    assert list(process.stdout) == ["second\n"]
    assert process.wait(120) == 0


def test_streams_and_results_can_be_awaited_in_the_callers_own_loop(box: Sandbox) -> None:
    async def main() -> tuple[list[str], int]:
        process = box.exec(["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done"])
        chunks = [chunk async for chunk in process.stdout]
        return chunks, (await process).returncode

    chunks, code = asyncio.run(main())
    assert ("".join(chunks), code) == ("1\n2\n3\n", 0)


def test_input_given_whole_is_read_to_its_end(box: Sandbox) -> None:
    data = os.urandom(3_000_000)
    assert box.exec(["cat"], stdin=data).result(120).stdout_bytes == data
    assert sh(box, "cat", stdin="text").stdout == "text"
    assert sh(box, "cat", stdin=b"").stdout == ""


def test_input_that_nobody_reads_is_no_error(box: Sandbox) -> None:
    assert box.exec(["true"], stdin=b"x" * 3_000_000).wait(120) == 0


def test_writing_to_a_command_that_has_ended_is_a_broken_pipe(box: Sandbox) -> None:
    process = box.exec(["true"], stdin=True)
    process.wait(120)
    assert process.stdin is not None
    with pytest.raises(BrokenPipeError):
        process.stdin.write("more").result(120)
    process.stdin.close().result(120)
    process.send_signal(15).result(120)
    process.terminate().result(120)


def test_a_timeout_ends_the_tree_and_keeps_the_output_so_far(box: Sandbox, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = box.exec(
        ["sh", "-c", f"echo begun; (sleep 600 & echo $! > {pids}; wait); echo never"], timeout_seconds=2
    )
    with pytest.raises(CommandTimeoutError) as caught:
        process.result(120)
    assert caught.value.result is not None
    assert caught.value.result.stdout == "begun\n"
    with pytest.raises(CommandTimeoutError):
        list(process.stdout)
    assert gone(int(pids.read_text()))


def test_a_timeout_that_is_not_reached_changes_nothing(box: Sandbox) -> None:
    assert sh(box, "echo fine", timeout_seconds=60).stdout == "fine\n"


def test_too_much_output_ends_the_command_and_keeps_what_was_allowed(box: Sandbox) -> None:
    with pytest.raises(OutputLimitError) as caught:
        sh(box, "yes", max_output_bytes=10_000)
    assert caught.value.result is not None
    assert caught.value.result.stdout_bytes == b"y\n" * 5_000
    assert sh(box, "printf 12345", max_output_bytes=5).stdout == "12345"


def test_cancelling_ends_the_tree(box: Sandbox, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = box.exec(["sh", "-c", f"sleep 600 & echo $! > {pids}; echo begun; wait"])
    assert next(process.stdout) == "begun\n"
    process.cancel()
    assert gone(int(pids.read_text()))


def test_cancelling_the_task_that_awaits_it_ends_the_tree(box: Sandbox, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def main() -> None:
        process = box.exec(["sh", "-c", f"sleep 600 & echo $! > {pids}; echo begun; wait"])
        await anext(process.stdout)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await process

    asyncio.run(main())
    assert gone(int(pids.read_text()))


def test_a_signal_shows_in_the_exit_code(box: Sandbox) -> None:
    process = box.exec(["sh", "-c", "echo begun; exec sleep 600"])
    assert next(process.stdout) == "begun\n"
    process.send_signal(2).result(120)
    assert process.wait(120) == 130


def test_closing_a_stream_lets_the_command_go_on(box: Sandbox) -> None:
    process = box.exec(["sh", "-c", "echo a; sleep 0.2; echo b"])
    process.stdout.close()
    assert list(process.stdout) == []
    assert process.result(120).stdout == "a\nb\n"


def test_wrong_arguments_are_refused_by_name(box: Sandbox) -> None:
    wrong: list[tuple[str, dict[str, object]]] = [
        ("command", {"command": "echo hello"}),
        ("command", {"command": []}),
        ("command", {"command": ["a\0b"]}),
        ("cwd", {"cwd": "relative"}),
        ("env", {"env": {"A B": "x"}}),
        ("stdin", {"stdin": 5}),
        ("timeout_seconds", {"timeout_seconds": 0}),
        ("max_output_bytes", {"max_output_bytes": -1}),
    ]
    for argument, keywords in wrong:
        with pytest.raises(ValidationError) as caught:
            box.exec(**{"command": ["true"], **keywords})  # type: ignore[arg-type]
        assert caught.value.argument == argument


def test_what_the_provider_cannot_do_is_refused_before_it_is_tried(box: Sandbox) -> None:
    with pytest.raises(UnsupportedError):
        box.exec(["true"], tty=True)
    with pytest.raises(UnsupportedError):
        box.exec(["true"], user="somebody")


def test_a_reader_that_falls_behind_makes_the_producer_wait() -> None:
    reader: StreamReader[bytes] = StreamReader(text=False)
    progress: list[int] = []

    async def produce() -> None:
        for number in range(64):
            reader.put(b"x" * (1 << 20))
            progress.append(number)
            await reader.room()
        reader.end()

    producer = threading.Thread(target=lambda: asyncio.run(produce()))
    producer.start()
    time.sleep(0.3)
    assert len(progress) < 16
    assert sum(map(len, reader)) == 64 << 20
    producer.join(60)


@pytest.mark.parametrize("exited", [False, True])
async def test_a_slow_reader_uses_up_no_time_in_which_others_still_print(exited: bool) -> None:
    async def output() -> AsyncIterator[tuple[int, bytes]]:
        for _ in range(12):
            yield 1, bytes(1 << 20)

    readers: Any = (StreamReader(text=False), StreamReader(text=False))
    readers[0].wanted = True
    command = Command(_nowhere, ProcessSpec(argv=("sh",)), readers=readers, capture=False)
    command._handle = cast("Any", SimpleNamespace(exited=exited))
    reading = asyncio.create_task(command._read(output()))
    await asyncio.wait({reading}, timeout=60 if exited else 0.1)
    assert (reading.done(), readers[0].buffered == 12 << 20) == (exited, exited)
    readers[0].close()
    await reading


async def _nowhere() -> Any:
    raise NotImplementedError


def gone(pid: int, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_loop_over_lines_that_is_left_loses_nothing() -> None:
    reader: StreamReader[str] = StreamReader(text=True)
    reader.put(b"1\n2\n3\n4\n5")
    reader.put(b"5\n6\n7")
    reader.end(RuntimeError("the sandbox is gone"))
    for line in reader.lines():
        if line == "2\n":
            break
    assert next(reader.lines()) == "3\n"
    assert next(iter(reader)) == "4\n5"
    rest = reader.lines()
    assert [next(rest), next(rest), next(rest)] == ["5\n", "6\n", "7"]
    with pytest.raises(RuntimeError):
        next(rest)
    with pytest.raises(RuntimeError):
        next(reader)


async def test_lines_go_on_in_async_code_and_after_their_end() -> None:
    reader: StreamReader[bytes] = StreamReader(text=False)
    reader.put(b"1\n2\n3")
    reader.end()
    async for line in reader.lines():
        assert line == b"1\n"
        break
    assert [line async for line in reader.lines()] == [b"2\n", b"3"]
    assert [line async for line in reader.lines()] == []
    assert [chunk async for chunk in reader] == []
