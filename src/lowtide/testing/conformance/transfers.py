"""Conformance of what must survive a transfer: every byte, old or new and nothing between, and the truth about the rest."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxFileError, SandboxPermissionError, ValidationError
from lowtide.testing.conformance.base import ANSWER_SECONDS, Conformance, eventually, sh

MOMENT = 1_000_000_000
MOMENT_NS = MOMENT * 10**9 + 250_000_000


class TransfersConformance(Conformance):
    def test_a_download_goes_into_what_is_no_file_and_through_a_link(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        box.write_file(f"{place}/f", b"content").result(ANSWER_SECONDS)
        pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "elsewhere" / "real"
        os.mkfifo(pipe)
        real.parent.mkdir()
        real.write_bytes(b"old")
        link.symlink_to(real)
        got: list[bytes] = []
        reading = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
        reading.start()
        box.download(f"{place}/f", pipe).result(ANSWER_SECONDS)
        reading.join(ANSWER_SECONDS)
        box.download(f"{place}/f", link).result(ANSWER_SECONDS)
        device = os.stat("/dev/null").st_rdev
        box.download(f"{place}/f", "/dev/null").result(ANSWER_SECONDS)
        assert (got, real.read_bytes(), link.is_symlink()) == ([b"content"], b"content", True)
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert (stat.S_ISCHR(os.stat("/dev/null").st_mode), os.stat("/dev/null").st_rdev) == (True, device)

    def test_a_tree_does_not_replace_what_is_no_file(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        box.write_file(f"{place}/tree/pipe", b"content").result(ANSWER_SECONDS)
        (tmp_path / "out").mkdir()
        os.mkfifo(tmp_path / "out" / "pipe")
        with pytest.raises(FileExistsError) as caught:
            box.download(f"{place}/tree", tmp_path / "out").result(ANSWER_SECONDS)
        assert caught.value.filename == str(tmp_path / "out" / "pipe")
        assert [path.name for path in tmp_path.rglob("*")] == ["out", "pipe"]

    def test_a_file_that_becomes_shorter_or_longer_on_its_way_out_is_named_and_not_padded(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        sh(
            box,
            f"mkdir {place}/t; head -c 64000000 /dev/zero | tr '\\0' x > {place}/t/a; echo fine > {place}/t/z",
        )
        changing = box.exec(
            ["sh", "-c", f"while :; do head -c 999 {place}/t/a > {place}/b; cat {place}/b > {place}/t/a;"
             f" head -c 64000000 /dev/zero | tr '\\0' x > {place}/t/a; done"]
        )  # fmt: skip
        try:
            for attempt in range(20):
                moved = box.download(f"{place}/t", tmp_path / f"out{attempt}").result(ANSWER_SECONDS)
                data = (tmp_path / f"out{attempt}" / "a").read_bytes()
                assert not data.strip(b"x"), "nothing that was never in it"
                assert (tmp_path / f"out{attempt}" / "z").read_bytes() == b"fine\n"
                assert moved.bytes == len(data) + 5
                if moved.changed:
                    break
        finally:
            changing.kill().result(ANSWER_SECONDS)
        assert moved.changed == ("a",)

    def test_a_file_that_grows_is_taken_as_long_as_it_was(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        growing = box.exec(["sh", "-c", f"while :; do echo line; done > {place}/log"])
        log, stop = tmp_path / "log", threading.Event()
        log.touch()
        writing = threading.Thread(target=_grow, args=(log, stop))
        writing.start()
        try:
            eventually(lambda: box.exists(f"{place}/log").result() and log.stat().st_size > 0, what="a line")
            out = box.download(f"{place}/log", tmp_path / "out").result(ANSWER_SECONDS)
            into = box.upload(log, f"{place}/in").result(ANSWER_SECONDS)
        finally:
            stop.set()
            writing.join()
            growing.kill().result(ANSWER_SECONDS)
        assert not (tmp_path / "out").read_bytes().replace(b"line\n", b"").strip(b"line")
        assert out.bytes == (tmp_path / "out").stat().st_size
        assert box.stat(f"{place}/in").result(ANSWER_SECONDS).size == into.bytes <= log.stat().st_size

    @pytest.mark.parametrize("size", [0, 3, 9], ids=["none", "less", "more"])
    def test_a_wrong_size_replaces_nothing(self, box: Sandbox, place: str, size: int) -> None:
        box.write_file(f"{place}/f", b"old").result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileError, match="nothing was replaced"):
            box.write_file_streaming(f"{place}/f", [b"new", b"er"], size=size).result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/f").result(ANSWER_SECONDS) == b"old"
        assert sh(box, f"ls -A {place}") == "f\n"

    def test_a_source_that_fails_replaces_nothing(self, box: Sandbox, place: str) -> None:
        def source() -> Iterator[bytes]:
            yield b"new"
            raise ZeroDivisionError

        box.write_file(f"{place}/f", b"old").result(ANSWER_SECONDS)
        with pytest.raises(ZeroDivisionError):
            box.write_file_streaming(f"{place}/f", source()).result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/f").result(ANSWER_SECONDS) == b"old"
        eventually(lambda: sh(box, f"ls -A {place}") == "f\n", what="the end of the half file")

    def test_a_cancelled_upload_of_a_tree_leaves_whole_files(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        for name in "abcdefgh":
            (tmp_path / name).write_bytes(name.encode() * 20_000_000)
        uploading = box.upload(tmp_path, f"{place}/t")
        eventually(lambda: box.exists(f"{place}/t/a").result(), what="the first file")
        uploading.cancel()

        def settled() -> bool:
            return ".lowtide" not in sh(box, f"ls -A {place}/t")

        eventually(settled, what="the end of the half file")
        sizes = {entry.name: entry.size for entry in box.list_dir(f"{place}/t").result(ANSWER_SECONDS)}
        assert set(sizes.values()) == {20_000_000}, sizes

    def test_a_tree_is_uploaded_onto_itself(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        (tmp_path / "t" / "closed").mkdir(parents=True)
        (tmp_path / "t" / "closed" / "object").write_text("one")
        (tmp_path / "t" / "closed" / "object").chmod(0o444)
        (tmp_path / "t" / "first").write_text("two")
        os.link(tmp_path / "t" / "first", tmp_path / "t" / "second")
        (tmp_path / "t" / "link").symlink_to("first")
        (tmp_path / "t" / "closed").chmod(0o555)
        for _ in range(2):
            moved = box.upload(tmp_path / "t", f"{place}/t").result(ANSWER_SECONDS)
        (tmp_path / "t" / "closed").chmod(0o755)
        assert (moved.files, moved.skipped, moved.changed) == (3, (), ())
        assert sh(
            box, f"cd {place}/t && cat closed/object first second link; stat -c %a closed closed/object"
        ) == ("onetwotwotwo555\n444\n")
        sh(box, f"test {place}/t/first -ef {place}/t/second")
        back = tmp_path / "back"
        assert box.download(f"{place}/t", back).result(ANSWER_SECONDS).files == 3
        assert (back / "first").samefile(back / "second"), "one file with two names is not two"
        box.remove(f"{place}/t", recursive=True).result(ANSWER_SECONDS)
        assert sh(box, f"ls -A {place}") == ""

    def test_a_tree_that_has_no_place_changes_nothing(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        for name in ("a", "b/file", "c/file", "z"):
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_text("new")
        sh(
            box,
            f"mkdir -p {place}/t {place}/u/z && cd {place} && for f in t/a t/c u/a; do echo old >$f; done",
        )
        with pytest.raises(NotADirectoryError):
            box.upload(tmp_path / "in", f"{place}/t").result(ANSWER_SECONDS)
        with pytest.raises(IsADirectoryError):
            box.upload(tmp_path / "in", f"{place}/u").result(ANSWER_SECONDS)
        assert sh(box, f"cd {place} && find t u | sort && cat t/a t/c u/a").split() == [
            "t", "t/a", "t/c", "u", "u/a", "u/z", "old", "old", "old"
        ]  # fmt: skip
        with pytest.raises(IsADirectoryError):
            box.download(f"{place}/t", tmp_path / "in").result(ANSWER_SECONDS)
        assert {path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {"new"}

    def test_files_of_a_tree_that_do_not_say_their_size_come_whole(
        self, box: Sandbox, tmp_path: Path
    ) -> None:
        moved = box.download("/proc/sys/kernel/random", tmp_path / "out").result(ANSWER_SECONDS)
        assert (tmp_path / "out" / "boot_id").read_text() == sh(box, "cat /proc/sys/kernel/random/boot_id")
        assert moved.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())

    def test_a_file_without_end_is_given_up(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        """/proc has one for each process, which reports no size: a link to it, under a name that promises another."""
        link = f"ln -s /proc/$$/pagemap {place}/results.csv; exec sleep 1000"
        running = box.exec(["sh", "-c", link])
        eventually(lambda: box.exists(f"{place}/results.csv").result(ANSWER_SECONDS))
        with pytest.raises(SandboxFileError):
            box.download(f"{place}/results.csv", tmp_path / "results.csv").result(ANSWER_SECONDS)
        assert list(tmp_path.iterdir()) == []
        running.cancel()

    def test_no_more_than_max_bytes_are_downloaded(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        sh(box, f"mkdir {place}/t && head -c 300000 /dev/urandom > {place}/t/f && ln -s t/f {place}/link")
        for name in ("t/f", "link", "t"):
            with pytest.raises(SandboxFileError, match="max_bytes=100000"):
                box.download(f"{place}/{name}", tmp_path / "out", max_bytes=100_000).result(ANSWER_SECONDS)
            assert list(tmp_path.iterdir()) == []
        for number, most in enumerate((400_000, None)):
            for name in ("t/f", "link", "t"):
                out = tmp_path / f"{number}-{name.replace('/', '-')}"
                moved = box.download(f"{place}/{name}", out, max_bytes=most).result(ANSWER_SECONDS)
                assert moved.bytes == 300_000

    def test_what_is_no_file_is_refused_before_it_is_opened(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(ValidationError, match=path.name):
                box.upload(path, f"{place}/f")
        box.upload("/proc/self/status", f"{place}/status").result(ANSWER_SECONDS)
        assert b"Name:" in box.read_file(f"{place}/status").result(ANSWER_SECONDS)

    def test_set_id_bits_survive_the_way_in(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"content")
        (tmp_path / "f").chmod(0o6755)
        box.upload(tmp_path / "f", f"{place}/up").result(ANSWER_SECONDS)
        box.write_file(f"{place}/whole", b"content", mode=0o4711).result(ANSWER_SECONDS)
        box.write_file_streaming(f"{place}/pieces", [b"con", b"tent"], mode=0o2750).result(ANSWER_SECONDS)
        box.write_file(f"{place}/whole", b"newer").result(ANSWER_SECONDS)
        modes = {entry.name: entry.mode for entry in box.list_dir(place).result(ANSWER_SECONDS)}
        assert modes == {"up": 0o6755, "whole": 0o4711, "pieces": 0o2750}

    def test_what_may_not_be_read_in_a_tree_is_named(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        box.write_file(f"{place}/t/a/secret", b"x", mode=0).result(ANSWER_SECONDS)
        if box.exec(["cat", f"{place}/t/a/secret"]).result(ANSWER_SECONDS).returncode == 0:
            pytest.skip("the sandbox's user may read everything here")
        with pytest.raises(SandboxPermissionError) as caught:
            box.download(f"{place}/t", tmp_path / "back").result(ANSWER_SECONDS)
        assert caught.value.filename == f"{place}/t/a/secret"
        assert list(tmp_path.iterdir()) == []

    def test_times_survive_both_ways(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        (tmp_path / "t" / "d").mkdir(parents=True)
        for path in (tmp_path / "t" / "d" / "f", tmp_path / "single"):
            path.write_text("x")
            os.utime(path, ns=(MOMENT_NS, MOMENT_NS))
        os.utime(tmp_path / "t" / "d", ns=(MOMENT_NS, MOMENT_NS))
        box.upload(tmp_path / "single", f"{place}/single").result(ANSWER_SECONDS)
        box.upload(tmp_path / "t", f"{place}/t").result(ANSWER_SECONDS)
        there = sh(box, f"stat -c %Y {place}/single {place}/t/d {place}/t/d/f")
        assert there.split() == [str(MOMENT)] * 3
        box.download(f"{place}/single", tmp_path / "out").result(ANSWER_SECONDS)
        box.download(f"{place}/t", tmp_path / "back").result(ANSWER_SECONDS)
        for path in (tmp_path / "out", tmp_path / "back" / "d", tmp_path / "back" / "d" / "f"):
            assert path.stat().st_mtime_ns == MOMENT_NS, path

    def test_what_cannot_come_is_named(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        sh(box, f"mkdir {place}/t && cd {place}/t && mkfifo pipe && echo x > run && chmod 6755 run")
        moved = box.download(f"{place}/t", tmp_path / "back").result(ANSWER_SECONDS)
        assert (moved.skipped, moved.stripped) == (("pipe",), ("run",))
        single = box.download(f"{place}/t/run", tmp_path / "run").result(ANSWER_SECONDS)
        assert single.stripped == (f"{place}/t/run",)
        (tmp_path / "up").mkdir()
        os.mkfifo(tmp_path / "up" / "pipe")
        assert box.upload(tmp_path / "up", f"{place}/up").result(ANSWER_SECONDS).skipped == ("pipe",)

    def test_a_tree_deeper_than_a_path_can_say(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        name, levels = "n" * 200, 25
        top = os.open(tmp_path, os.O_RDONLY)
        fd = os.dup(top)
        for part in ["source", *[name] * levels]:
            os.mkdir(part, dir_fd=fd)
            fd, above = os.open(part, os.O_RDONLY, dir_fd=fd), fd
            os.close(above)
        with open(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "w") as file:
            file.write("deep")
        os.close(fd)
        os.close(top)
        for _ in range(2):
            there = box.upload(tmp_path / "source", f"{place}/t").result(ANSWER_SECONDS)
            back = box.download(f"{place}/t", tmp_path / "back").result(ANSWER_SECONDS)
            assert (there.files, there.bytes, back.files, back.bytes) == (1, 4, 1, 4)
        box.remove(f"{place}/t", recursive=True).result(ANSWER_SECONDS)
        assert not box.exists(f"{place}/t").result(ANSWER_SECONDS)

    def test_a_failed_upload_of_a_tree_is_one_error_and_no_noise(
        self, box: Sandbox, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "f").write_bytes(bytes(3_000_000))
        box.write_file(f"{place}/file", b"x").result(ANSWER_SECONDS)

        async def upload() -> None:
            with pytest.raises(NotADirectoryError):
                await box.upload(tmp_path, f"{place}/file/t")

        asyncio.run(upload())
        assert "never retrieved" not in capfd.readouterr().err


def _grow(path: Path, stop: threading.Event) -> None:
    with path.open("ab") as file:
        while not stop.is_set():
            file.write(b"line\n" * 1000)
            file.flush()
