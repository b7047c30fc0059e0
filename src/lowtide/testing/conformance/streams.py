"""Conformance of a command's streams: apart, complete, binary, incremental, both ways, and as a terminal."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import ValidationError
from lowtide.providers.base import Capability
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    duration_token,
    eventually,
    requires,
)

ALL_BYTES = bytes(range(256))


class StreamsConformance(Conformance):
    def test_stdout_and_stderr_stay_apart(self, box: Sandbox) -> None:
        result = box.exec(["sh", "-c", "echo out; echo err >&2; echo out2"]).result(ANSWER_SECONDS)
        assert (result.stdout, result.stderr) == ("out\nout2\n", "err\n")

    def test_no_output_is_empty(self, box: Sandbox) -> None:
        result = box.exec(["true"]).result(ANSWER_SECONDS)
        assert (result.stdout_bytes, result.stderr_bytes, result.stdout, result.stderr) == (b"", b"", "", "")

    def test_fifty_megabytes_of_output_arrive_complete(
        self, box: Sandbox, provider_under_test: ProviderUnderTest
    ) -> None:
        size = provider_under_test.output_bytes
        line = b"the quick brown fox jumps over the lazy dog\n"
        result = box.exec(["sh", "-c", f"yes '{line.decode().strip()}' | head -c {size}"]).result(
            ANSWER_SECONDS
        )
        assert result.returncode == 0
        assert len(result.stdout_bytes) == size
        expected = hashlib.sha256((line * (size // len(line) + 1))[:size])
        assert hashlib.sha256(result.stdout_bytes).digest() == expected.digest()

    def test_both_streams_full_at_once_do_not_lock_up(self, box: Sandbox) -> None:
        script = "yes out | head -c 3000000 & yes err | head -c 3000000 >&2; wait"
        result = box.exec(["sh", "-c", script]).result(ANSWER_SECONDS)
        assert len(result.stdout_bytes) == len(result.stderr_bytes) == 3_000_000
        assert b"err" not in result.stdout_bytes
        assert b"out" not in result.stderr_bytes

    def test_every_byte_value_passes_both_ways(self, box: Sandbox) -> None:
        data = ALL_BYTES * 300
        assert box.exec(["cat"], stdin=data).result(ANSWER_SECONDS).stdout_bytes == data

    def test_text_that_is_not_utf_8_is_replaced_and_its_bytes_are_kept(self, box: Sandbox) -> None:
        result = box.exec(["sh", "-c", r"printf 'a\377\376b'"]).result(ANSWER_SECONDS)
        assert result.stdout_bytes == b"a\xff\xfeb"
        assert result.stdout == "a\ufffd\ufffdb"

    def test_a_character_split_between_two_writes_is_one_character(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", r"printf '\303'; sleep 0.3; printf '\251'"])
        assert "".join(process.stdout) == "é"
        assert process.result(ANSWER_SECONDS).stdout == "é"

    def test_output_streams_while_the_command_runs(self, box: Sandbox) -> None:
        process = box.exec(
            ["sh", "-c", "echo first; read line; echo second $line; echo aside >&2"], stdin=True
        )
        chunks = iter(process.stdout)
        assert next(chunks) == "first\n"
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.writeline("go").result(ANSWER_SECONDS)
        assert "".join(chunks) == "second go\n"
        assert "".join(process.stderr) == "aside\n"
        assert process.result(ANSWER_SECONDS).stdout == "first\nsecond go\n", "the result has all of it"

    def test_output_streams_to_async_code(self, box: Sandbox) -> None:
        async def read() -> tuple[str, str, int]:
            process = box.exec(
                ["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done; echo e >&2; exit 4"]
            )
            out = "".join([chunk async for chunk in process.stdout])
            err = "".join([chunk async for chunk in process.stderr])
            return out, err, (await process).returncode

        assert asyncio.run(read()) == ("1\n2\n3\n", "e\n", 4)

    def test_a_reader_that_is_closed_does_not_hold_the_command(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", "echo first; yes | head -c 5000000; exit 6"])
        next(iter(process.stdout))
        process.stdout.close()
        assert process.result(ANSWER_SECONDS).returncode == 6

    def test_nobody_reading_does_not_hold_the_command(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", "yes | head -c 5000000; yes | head -c 5000000 >&2; exit 6"])
        assert process.wait(ANSWER_SECONDS) == 6

    @requires(Capability.STDIN)
    @pytest.mark.parametrize(
        "data", [b"", b"x", b"line\n", "täxt\n", os.urandom(100_000)], ids=["0", "1", "line", "str", "100k"]
    )
    def test_given_stdin_arrives_and_ends(self, box: Sandbox, data: bytes | str) -> None:
        result = box.exec(["cat"], stdin=data).result(ANSWER_SECONDS)
        assert result.stdout_bytes == (data.encode() if isinstance(data, str) else data)

    def test_without_stdin_the_command_reads_an_end_at_once(self, box: Sandbox) -> None:
        result = box.exec(["sh", "-c", "cat; echo end"]).result(ANSWER_SECONDS)
        assert result.stdout == "end\n"

    @requires(Capability.STDIN)
    def test_ten_megabytes_through_a_command_do_not_lock_up(self, box: Sandbox) -> None:
        data = os.urandom(1_000_000) * 10
        result = box.exec(["cat"], stdin=data).result(ANSWER_SECONDS)
        assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(data).digest()

    @requires(Capability.STDIN)
    def test_a_command_that_does_not_read_its_stdin_ends_normally(self, box: Sandbox) -> None:
        result = box.exec(["sh", "-c", "exit 8"], stdin=b"x" * 5_000_000).result(ANSWER_SECONDS)
        assert result.returncode == 8

    @requires(Capability.STDIN)
    def test_stdin_is_written_piece_by_piece(self, box: Sandbox) -> None:
        process = box.exec(["cat"], stdin=True)
        assert process.stdin is not None
        chunks = iter(process.stdout)
        for text in ("one\n", "two\n"):
            process.stdin.write(text.encode()).result(ANSWER_SECONDS)
            assert next(chunks) == text
        process.stdin.close().result(ANSWER_SECONDS)
        assert process.result(ANSWER_SECONDS).stdout == "one\ntwo\n"

    @requires(Capability.STDIN)
    def test_writing_to_a_command_that_has_ended_says_so(self, box: Sandbox) -> None:
        process = box.exec(["true"], stdin=True)
        process.wait(ANSWER_SECONDS)
        assert process.stdin is not None
        with pytest.raises(BrokenPipeError):
            for _ in range(50):  # a pipe's buffer may swallow the first ones
                process.stdin.write(b"x" * 65536).result(ANSWER_SECONDS)
        process.stdin.close().result(ANSWER_SECONDS)

    @requires(Capability.TTY)
    def test_a_tty_is_a_terminal_and_one_stream(self, box: Sandbox) -> None:
        script = "test -t 0 && test -t 1 && test -t 2 && echo terminal; echo err >&2"
        result = box.exec(["sh", "-c", script], tty=True).result(ANSWER_SECONDS)
        assert result.stdout == "terminal\r\nerr\r\n"
        assert result.stderr == ""

    @requires(Capability.TTY)
    def test_a_terminal_has_the_asked_size_and_follows_a_resize(self, box: Sandbox) -> None:
        shell = box.shell(
            ["sh", "-c", "trap 'stty size; exit 3' WINCH; stty size; while :; do sleep 0.1; done"],
            width=101,
            height=33,
        )
        output = _Terminal(shell)
        output.until("33 101")
        shell.resize(132, 43)
        output.until("43 132")
        assert shell.wait(ANSWER_SECONDS) == 3

    @requires(Capability.TTY)
    def test_a_terminal_talks_both_ways_and_ctrl_c_goes_inside(self, box: Sandbox) -> None:
        token = duration_token()
        shell = box.shell(["sh"], width=80, height=24)
        output = _Terminal(shell)
        assert shell.stdin is not None
        shell.stdin.write(b"echo $((40+2))\n").result(ANSWER_SECONDS)
        output.until("42")
        shell.stdin.write(f"sleep {token}; echo interrupted-$?\n".encode()).result(ANSWER_SECONDS)
        eventually(lambda: f"sleep {token}" in _commands(box), what="the start of the command")
        shell.stdin.write(b"\x03").result(ANSWER_SECONDS)
        eventually(lambda: f"sleep {token}" not in _commands(box), what="the end by Ctrl+C")
        shell.stdin.write(b"exit 5\n").result(ANSWER_SECONDS)
        assert shell.wait(ANSWER_SECONDS) == 5

    def test_what_is_written_after_the_end_of_the_command_is_not_lost(self, box: Sandbox) -> None:
        # What `exec > >(tee log)` of bash does, for any shell: the copy is written by another process, later.
        script = "f=/tmp/$$.f; mkfifo $f; (sleep 0.1; cat $f; rm $f) & exec >$f; echo hello; echo world"
        for _ in range(5):
            result = box.exec(["sh", "-c", script]).result(ANSWER_SECONDS)
            assert (result.stdout, result.streams_open, result.returncode) == ("hello\nworld\n", False, 0)

    def test_a_background_job_that_holds_the_streams_is_said_and_waited_for_no_longer_than_asked(
        self, box: Sandbox
    ) -> None:
        token = duration_token()
        result = box.exec(["sh", "-c", f"sleep {token} & echo said; exit 3"], drain_seconds=0.2).result(30)
        assert (result.stdout, result.returncode, result.streams_open) == ("said\n", 3, True)
        chatty = box.exec(["sh", "-c", "yes & echo $!; exit 4"], drain_seconds=0.2, timeout_seconds=60)
        result = chatty.result(50)
        assert (result.returncode, result.streams_open) == (4, True)
        box.exec(["sh", "-c", f"pkill yes; pkill -f 'sleep {token}'; kill {result.stdout.split()[0]}"]).wait(
            30
        )
        assert not box.exec(["true"]).result(ANSWER_SECONDS).streams_open

    @requires(Capability.TTY)
    def test_a_job_that_outlives_its_terminal_is_heard_and_said(self, box: Sandbox) -> None:
        # What does not ignore the hang-up at the command's end is ended by it, as on every terminal.
        script = "trap '' HUP; (sleep 0.2; echo late) & echo said"
        result = box.exec(["sh", "-c", script], tty=True).result(ANSWER_SECONDS)
        assert (result.stdout, result.streams_open) == ("said\r\nlate\r\n", False)
        script = "trap '' HUP; sleep 30 & echo $!; exit 3"
        result = box.exec(["sh", "-c", script], tty=True, drain_seconds=0.2).result(30)
        assert (result.returncode, result.streams_open) == (3, True)
        box.exec(["kill", "-9", result.stdout.strip()]).wait(ANSWER_SECONDS)

    def test_a_command_that_ended_in_time_has_not_timed_out(self, box: Sandbox) -> None:
        script = "sleep 30 & echo done; exit 5"
        result = box.exec(["sh", "-c", script], timeout_seconds=2, drain_seconds=4).result(ANSWER_SECONDS)
        assert (result.returncode, result.stdout) == (5, "done\n")

    def test_a_stream_that_is_only_read_waits_for_its_reader(
        self, box: Sandbox, provider_under_test: ProviderUnderTest
    ) -> None:
        size = provider_under_test.output_bytes
        process = box.exec(
            ["sh", "-c", f"yes | head -c {size}; echo aside >&2"], capture=False, max_output_bytes=1 << 20
        )
        most = count = 0
        for chunk in process.stdout:
            count += len(chunk)
            most = max(most, process.stdout.buffered)
        assert count == size
        assert most < 12 << 20
        result = process.result(ANSWER_SECONDS)
        assert (result.returncode, result.stdout_bytes) == (0, b"")
        assert "".join(process.stderr) == "aside\n"

    def test_lines(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", r"printf 'one\ntw'; sleep 0.2; printf 'o\n\nlast'"])
        assert list(process.stdout.lines()) == ["one\n", "two\n", "\n", "last"]

        async def read() -> list[str]:
            process = box.exec(["printf", "a\nb"])
            return [line async for line in process.stdout.lines()]

        assert asyncio.run(read()) == ["a\n", "b"]

    @requires(Capability.STDIN)
    def test_stdin_from_a_file_an_iterator_and_nothing(self, box: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "in").write_bytes(ALL_BYTES * 1000)
        with (tmp_path / "in").open("rb") as file:
            assert box.exec(["cat"], stdin=file).result(ANSWER_SECONDS).stdout_bytes == ALL_BYTES * 1000
        with (tmp_path / "in").open("w") as text:
            text.write("täxt")
        with (tmp_path / "in").open() as text:
            assert box.exec(["cat"], stdin=text).result(ANSWER_SECONDS).stdout == "täxt"
        numbers = (b"%d\n" % n for n in range(3))
        assert box.exec(["cat"], stdin=numbers).result(ANSWER_SECONDS).stdout == "0\n1\n2\n"
        assert box.exec(["cat"], stdin=None).result(ANSWER_SECONDS).stdout == ""

        def failing() -> Iterator[bytes]:
            yield b"x"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            box.exec(["sleep", "1000"], stdin=failing()).result(ANSWER_SECONDS)

    @requires(Capability.TTY)
    @pytest.mark.parametrize("data", [b"abc", b"abc\n", b""])
    def test_given_input_ends_on_a_terminal_too(self, box: Sandbox, data: bytes) -> None:
        result = box.exec(["cat"], tty=True, stdin=data).result(ANSWER_SECONDS)
        assert result.returncode == 0
        assert data.strip() in result.stdout_bytes

    def test_bytes_that_are_no_text_pass_as_arguments_and_half_characters_do_not(self, box: Sandbox) -> None:
        result = box.exec(["printf", "%s", os.fsdecode(b"a\xff\xfeb")]).result(ANSWER_SECONDS)
        assert result.stdout_bytes == b"a\xff\xfeb"
        for keywords in ({"command": ["echo", "\ud800"]}, {"command": ["cat"], "stdin": "\ud800"}):
            with pytest.raises(ValidationError):
                box.exec(**keywords)
        assert box.exec(["echo", "on"]).result(ANSWER_SECONDS).stdout == "on\n"

    def test_operations_are_tasks(self, box: Sandbox) -> None:
        async def tasks() -> list[str]:
            one = asyncio.create_task(box.exec(["echo", "one"]))
            async with asyncio.TaskGroup() as group:
                two = group.create_task(box.exec(["echo", "two"]))
            three = await asyncio.gather(box.exec(["echo", "three"]), asyncio.wait_for(one, ANSWER_SECONDS))
            long = asyncio.create_task(box.exec(["sleep", "1000"]))
            await asyncio.sleep(0.1)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            return [two.result().stdout, *(done.stdout for done in three)]

        assert asyncio.run(tasks()) == ["two\n", "three\n", "one\n"]


def _commands(box: Sandbox) -> str:
    """Command lines with their arguments, without those of the shell that was told to start them."""
    script = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done"
    lines = box.exec(["sh", "-c", script]).result(ANSWER_SECONDS).stdout.splitlines()
    return "\n".join(line for line in lines if line.startswith("sleep"))


class _Terminal:
    """Reads a terminal session until something has been printed."""

    def __init__(self, shell: object) -> None:
        self._chunks = iter(shell.output)  # type: ignore[attr-defined]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.seen = ""

    def until(self, text: str) -> None:
        while text not in self.seen:
            chunk = next(self._chunks, None)
            assert chunk is not None, f"the terminal ended before {text!r}; it printed {self.seen!r}"
            self.seen += self._decoder.decode(chunk)
