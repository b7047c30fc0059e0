"""A Sandbox held by threads, loops and forked children, on the local provider."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from pathlib import Path

import pytest

from lowtide import (
    Sandbox,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SandboxState,
    ValidationError,
    results,
)
from lowtide.testing import FaultyService


def test_an_unstarted_handle_makes_nothing_and_starts_on_its_first_use() -> None:
    sandbox = Sandbox()
    assert (sandbox.sandbox_id, sandbox.status, sandbox.lease_id) == (None, None, None)
    assert sandbox.exec(["echo", "x"]).result(120).stdout == "x\n"
    assert sandbox.status is SandboxState.RUNNING
    assert sandbox.created_at is not None
    assert sandbox.owner is not None
    assert sandbox.owner.pid == os.getpid()
    sandbox.stop().result(120)
    assert sandbox.status is SandboxState.GONE
    assert sandbox.get_status() is SandboxState.GONE


def test_one_that_was_never_started_ends_without_a_word() -> None:
    sandbox = Sandbox()
    assert sandbox.stop().result(60).sandbox_id is None
    with pytest.raises(SandboxGone):
        sandbox.exec(["true"]).result(60)


def test_run_inside_a_loop_does_not_block_it(tmp_path: Path) -> None:
    async def main() -> str:
        sandbox = Sandbox.run(provider="faulty")
        assert sandbox.status is SandboxState.PENDING
        async with sandbox:
            await sandbox
            return (await sandbox.exec(["echo", "x"])).stdout

    with FaultyService(tmp_path) as service:
        service.fault("create", hold_seconds=0.5)
        assert asyncio.run(main()) == "x\n"
        assert not service.pending()


def test_threads_and_two_loops_use_sandboxes_at_once() -> None:
    seen: list[str] = []
    with Sandbox.run() as shared:

        def in_thread(number: int) -> None:
            for _ in range(3):
                seen.append(shared.exec(["echo", str(number)]).result(120).stdout)

        def in_loop(number: int) -> None:
            async def one() -> str:
                return (await shared.exec(["echo", str(number)])).stdout

            async def main() -> list[str]:
                return await asyncio.gather(*(one() for _ in range(3)))

            seen.extend(asyncio.run(main()))

        threads = [threading.Thread(target=in_thread, args=(n,)) for n in range(12)]
        threads += [threading.Thread(target=in_loop, args=(n,)) for n in (12, 13)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
    assert sorted(seen) == sorted(f"{n}\n" for n in range(14) for _ in range(3))


def test_a_forked_child_can_use_its_parents_sandbox_but_does_not_end_it() -> None:
    with Sandbox.run() as sandbox:
        sandbox.wait(120)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with sandbox:  # leaving the block in the child must not end it
                    code = 0 if sandbox.exec(["echo", "child"]).result(120).stdout == "child\n" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert sandbox.exec(["echo", "parent"]).result(120).stdout == "parent\n"


def test_files_of_every_kind_go_in_and_out(tmp_path: Path) -> None:
    with Sandbox.run(working_dir="/tmp") as sandbox:
        data = os.urandom(3_000_000)
        name = f"odd\nname {secrets.token_hex(4)} ü"
        sandbox.write_file(name, data).result(120)
        assert sandbox.read_file(f"/tmp/{name}").result(120) == data
        assert b"".join(sandbox.read_file_streaming(name)) == data
        assert sandbox.stat(name).result(120).size == len(data)
        assert name in [entry.name for entry in sandbox.list_dir().result(120)]

        assert (
            sandbox.write_file_streaming("streamed", (b"%d\n" % n for n in range(1000))).result(120) == 3890
        )
        assert sandbox.download("streamed", tmp_path / "streamed").result(120).bytes == 3890
        assert sandbox.upload(tmp_path / "streamed", "/tmp/new/dir/back").result(120).bytes == 3890
        assert sandbox.read_file("/tmp/new/dir/back").result(120) == (tmp_path / "streamed").read_bytes()

        (tmp_path / "tree" / "sub").mkdir(parents=True)
        (tmp_path / "tree" / "sub" / "x").write_text("x")
        (tmp_path / "tree" / "link").symlink_to("sub/x")
        assert sandbox.upload(tmp_path / "tree", "tree").result(120).files == 1
        sandbox.exec(["ln", "-s", "/etc/passwd", "/tmp/tree/out"], check=True).result(120)
        moved = sandbox.download("tree", tmp_path / "back").result(120)
        assert moved.skipped == ("out",)
        assert (tmp_path / "back" / "link").read_text() == "x"
        sandbox.download("tree", tmp_path / "back").result(120)  # over what is there

        sandbox.remove("tree", recursive=True).result(120)
        assert sandbox.exists("tree").result(120) is False
        with pytest.raises(FileNotFoundError):
            sandbox.download("tree", tmp_path / "none").result(120)
        with pytest.raises(SandboxFileError):
            list(sandbox.read_file_streaming("none"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "streamed", "tree"]


def test_an_async_source_is_read_in_the_loop_it_belongs_to() -> None:
    async def main() -> bytes:
        home = asyncio.get_running_loop()
        gate = asyncio.Event()
        home.call_later(0.1, gate.set)

        async def source() -> object:
            await gate.wait()
            assert asyncio.get_running_loop() is home
            yield b"from "
            yield b"here"

        async with Sandbox.run() as sandbox:
            assert await sandbox.write_file_streaming("/tmp/x", source()) == 9  # type: ignore[arg-type]
            return await sandbox.read_file("/tmp/x")

    assert asyncio.run(main()) == b"from here"


def test_a_stream_that_is_closed_early_ends_the_transfer() -> None:
    with Sandbox.run() as sandbox:
        sandbox.exec(["truncate", "-s", "2G", "/tmp/big"], check=True).result(120)
        stream = sandbox.read_file_streaming("/tmp/big")
        next(stream)
        stream.close()
        assert list(stream) == []
        assert sandbox.exec(["echo", "fine"]).result(120).stdout == "fine\n"


def test_a_terminal_session_talks_and_ends() -> None:
    with Sandbox.run() as sandbox:
        shell = sandbox.shell(["sh", "-c", "stty size; read x; echo got $x; exit 4"], width=100, height=30)
        shown = next(shell.output)
        shell.stdin.write("word\n").result(120)
        shown += b"".join(shell.output)
        assert b"30 100" in shown
        assert b"got word" in shown
        assert shell.wait(120) == 4


def test_a_sandbox_that_ended_behind_our_back_is_gone_and_not_an_exit_code() -> None:
    sandbox = Sandbox.run()
    assert sandbox.sandbox_id is not None
    Sandbox.delete(sandbox.sandbox_id).result(120)
    with pytest.raises(SandboxError):
        sandbox.exec(["true"]).result(120)
    sandbox.stop().result(120)


def test_many_sandboxes_start_and_stop_in_parallel() -> None:
    boxes = [Sandbox() for _ in range(10)]
    results([box.start() for box in boxes])
    assert [r.stdout for r in results([box.exec(["echo", "x"]) for box in boxes])] == ["x\n"] * 10
    results([box.stop() for box in boxes])


def test_what_is_kept_while_it_is_being_created_is_there() -> None:
    box = Sandbox(provider="local", keep_for_seconds=60)
    starting = box.start()
    report = box.stop(keep=True).result(60)
    assert report.sandbox_id is not None
    try:
        assert (report.outcome, starting.exception(60)) == ("kept", None)
        again = Sandbox.from_id(report.sandbox_id, provider="local").result(60)
        assert again.exec(["echo", "here"]).result(60).stdout == "here\n"
    finally:
        Sandbox.delete(report.sandbox_id, missing_ok=True).result(60)


def test_what_was_ended_while_it_was_being_created_is_not_said_to_be_kept() -> None:
    box = Sandbox(provider="local", keep="always", keep_for_seconds=60)
    starting = box.start()
    report = box.stop().result(60)
    if starting.exception(60) is not None:  # else it was there in time, and is kept
        assert report.outcome != "kept"
        assert box.kept_until is None
    if report.sandbox_id is not None:
        Sandbox.delete(report.sandbox_id, missing_ok=True).result(60)


def test_the_decision_to_keep_it_can_be_made_at_its_end() -> None:
    box = Sandbox.run(provider="local", keep_for_seconds=60)
    sandbox_id = box.sandbox_id
    assert sandbox_id is not None
    try:
        report = box.stop(keep=True).result()
        assert (report.outcome, report.why, box.kept_until is not None) == (
            "kept",
            "kept on request",
            True,
        )
        again = Sandbox.from_id(sandbox_id, provider="local").result()
        assert again.exec(["echo", "still here"]).result().stdout == "still here\n"
        with pytest.raises(ValidationError):
            box.stop(keep=True, snapshot_on_stop=True)
        with pytest.raises(ValidationError):
            box.stop(keep="never")  # type: ignore[arg-type]
    finally:
        Sandbox.delete(sandbox_id, missing_ok=True).result()
