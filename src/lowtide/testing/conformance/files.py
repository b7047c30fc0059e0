"""Conformance of single files: any size, any name, honest errors, links that stay inside."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import (
    SandboxFileError,
    SandboxFileExistsError,
    SandboxFileNotFoundError,
    SandboxIsADirectoryError,
    SandboxNotADirectoryError,
    SandboxPermissionError,
    ValidationError,
)
from lowtide.providers.optional import FileKind
from lowtide.testing.conformance.base import ANSWER_SECONDS, Conformance, ProviderUnderTest, sh

NAMES = [
    "plain",
    "with space",
    "new\nline",
    "ünïcødé 海",
    "-dash",
    "qu'ote\"s",
    "$HOME;*?",
    "back\\slash",
    " lead",
    "trail ",
    "tab\t",
]


class FilesConformance(Conformance):
    @pytest.mark.parametrize("size", [0, 1, 4095, 65_537, 1024 * 1024])
    def test_bytes_come_back_as_they_went(self, box: Sandbox, place: str, size: int) -> None:
        data = os.urandom(size)
        box.write_file(f"{place}/data", data).result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/data").result(ANSWER_SECONDS) == data
        assert sh(box, f"wc -c <{place}/data").strip() == str(size)

    @pytest.mark.parametrize("name", NAMES)
    def test_names_are_taken_as_they_are(self, box: Sandbox, place: str, name: str) -> None:
        path = f"{place}/{name}"
        box.write_file(path, name.encode()).result(ANSWER_SECONDS)
        assert box.read_file(path).result(ANSWER_SECONDS) == name.encode()
        assert [entry.name for entry in box.list_dir(place).result(ANSWER_SECONDS)] == [name]
        assert box.stat(path).result(ANSWER_SECONDS).size == len(name.encode())
        box.remove(path).result(ANSWER_SECONDS)
        assert not box.exists(path).result(ANSWER_SECONDS)

    def test_text_is_written_as_utf_8(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/text", "ü\n").result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/text").result(ANSWER_SECONDS) == b"\xc3\xbc\n"

    def test_a_shorter_file_replaces_a_longer_one(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/f", b"long" * 1000).result(ANSWER_SECONDS)
        box.write_file(f"{place}/f", b"short").result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/f").result(ANSWER_SECONDS) == b"short"

    def test_parents_are_made(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/a/b c/d", b"deep").result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/a/b c/d").result(ANSWER_SECONDS) == b"deep"

    def test_commands_see_what_was_written_and_the_other_way(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/in", b"from here").result(ANSWER_SECONDS)
        assert sh(box, f"cat {place}/in") == "from here"
        sh(box, f"printf 'from there' > {place}/out")
        assert box.read_file(f"{place}/out").result(ANSWER_SECONDS) == b"from there"

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_a_big_file_goes_in_and_out(
        self, box: Sandbox, place: str, provider_under_test: ProviderUnderTest, tmp_path: Path
    ) -> None:
        source, back = tmp_path / "source", tmp_path / "back"
        try:
            wanted = _fill(source, provider_under_test.big_file_bytes)
            box.upload(source, f"{place}/big").result(600)
            assert sh(box, f"wc -c <{place}/big").strip() == str(provider_under_test.big_file_bytes)
            box.download(f"{place}/big", back).result(600)
            assert _digest(back) == wanted
        finally:
            source.unlink(missing_ok=True)
            back.unlink(missing_ok=True)
            sh(box, f"rm -f {place}/big")

    def test_upload_and_download_of_a_file_keep_its_executable_bit(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        script = tmp_path / "script"
        script.write_text("#!/bin/sh\necho ran\n")
        script.chmod(0o755)
        box.upload(script, f"{place}/script").result(ANSWER_SECONDS)
        assert box.exec([f"{place}/script"]).result(ANSWER_SECONDS).stdout == "ran\n"
        box.download(f"{place}/script", tmp_path / "back").result(ANSWER_SECONDS)
        assert (tmp_path / "back").read_bytes() == script.read_bytes()

    def test_upload_of_a_local_file_that_is_not_there(self, box: Sandbox, place: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            box.upload(tmp_path / "nothing", f"{place}/x").result(ANSWER_SECONDS)
        assert not box.exists(f"{place}/x").result(ANSWER_SECONDS)

    def test_a_failed_download_leaves_the_local_file_as_it_was(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        local = tmp_path / "local"
        local.write_text("precious")
        with pytest.raises(SandboxFileNotFoundError):
            box.download(f"{place}/missing", local).result(ANSWER_SECONDS)
        assert local.read_text() == "precious"
        assert [entry.name for entry in tmp_path.iterdir()] == ["local"]

    def test_streaming_both_ways(self, box: Sandbox, place: str) -> None:
        pieces = [os.urandom(100_000) for _ in range(20)]
        box.write_file_streaming(f"{place}/s", iter(pieces)).result(ANSWER_SECONDS)
        assert b"".join(box.read_file_streaming(f"{place}/s")) == b"".join(pieces)

    def test_streaming_both_ways_in_async_code(self, box: Sandbox, place: str) -> None:
        async def round_trip() -> bytes:
            async def pieces() -> AsyncIterator[bytes]:
                for _ in range(5):
                    await asyncio.sleep(0)
                    yield b"async " * 1000

            await box.write_file_streaming(f"{place}/s", pieces())
            return b"".join([chunk async for chunk in box.read_file_streaming(f"{place}/s")])

        assert asyncio.run(round_trip()) == b"async " * 5000

    def test_a_write_whose_source_fails_does_not_replace_what_was_there(
        self, box: Sandbox, place: str
    ) -> None:
        box.write_file(f"{place}/f", b"the old one").result(ANSWER_SECONDS)

        def source() -> Iterator[bytes]:
            yield b"half of the new" * 10_000
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError, match="the source broke"):
            box.write_file_streaming(f"{place}/f", source()).result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/f").result(ANSWER_SECONDS) == b"the old one"
        assert [entry.name for entry in box.list_dir(place).result(ANSWER_SECONDS)] == ["f"]

    def test_missing_is_said_as_missing(self, box: Sandbox, place: str) -> None:
        missing = f"{place}/missing"
        for call in (box.read_file, box.stat, box.list_dir, box.remove):
            with pytest.raises(SandboxFileNotFoundError) as caught:
                call(missing).result(ANSWER_SECONDS)
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.path == missing
            assert caught.value.sandbox_id == box.sandbox_id
        assert box.exists(missing).result(ANSWER_SECONDS) is False

    def test_a_directory_where_a_file_is_meant(self, box: Sandbox, place: str) -> None:
        with pytest.raises(SandboxIsADirectoryError):
            box.read_file(place).result(ANSWER_SECONDS)
        with pytest.raises(SandboxIsADirectoryError):
            box.write_file(place, b"x").result(ANSWER_SECONDS)
        assert box.stat(place).result(ANSWER_SECONDS).kind is FileKind.DIRECTORY

    def test_a_file_where_a_directory_is_meant(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/f", b"x").result(ANSWER_SECONDS)
        with pytest.raises(SandboxNotADirectoryError):
            box.list_dir(f"{place}/f").result(ANSWER_SECONDS)
        with pytest.raises((SandboxNotADirectoryError, SandboxFileNotFoundError)):
            box.read_file(f"{place}/f/below").result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileError):
            box.write_file(f"{place}/f/below", b"y").result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileExistsError):
            box.make_dir(f"{place}/f").result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/f").result(ANSWER_SECONDS) == b"x"

    def test_permission_denied_is_said_as_that(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/closed/secret", b"x").result(ANSWER_SECONDS)
        sh(box, f"chmod 000 {place}/closed/secret && chmod 000 {place}/closed")
        try:
            if box.exec(["ls", f"{place}/closed"]).result(ANSWER_SECONDS).returncode == 0:
                pytest.skip("the sandbox's user may read everything here")
            with pytest.raises(SandboxPermissionError) as caught:
                box.read_file(f"{place}/closed/secret").result(ANSWER_SECONDS)
            assert isinstance(caught.value, PermissionError)
            with pytest.raises(SandboxPermissionError):
                box.write_file(f"{place}/closed/new", b"x").result(ANSWER_SECONDS)
            with pytest.raises(SandboxPermissionError):
                box.list_dir(f"{place}/closed").result(ANSWER_SECONDS)
        finally:
            sh(box, f"chmod 700 {place}/closed")

    def test_links_are_followed_inside(self, box: Sandbox, place: str) -> None:
        sh(
            box,
            f"echo one > {place}/target; ln -s target {place}/relative; ln -s {place}/target {place}/absolute",
        )
        for link in ("relative", "absolute"):
            assert box.read_file(f"{place}/{link}").result(ANSWER_SECONDS) == b"one\n"
        box.write_file(f"{place}/relative", b"two\n").result(ANSWER_SECONDS)
        assert sh(box, f"cat {place}/target") == "two\n"

    def test_links_that_lead_nowhere_are_missing_files(self, box: Sandbox, place: str) -> None:
        sh(box, f"ln -s nothing {place}/dangling; ln -s loop {place}/loop")
        with pytest.raises(SandboxFileNotFoundError):
            box.read_file(f"{place}/dangling").result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileError):
            box.read_file(f"{place}/loop").result(ANSWER_SECONDS)

    def test_removing_a_link_leaves_its_target(self, box: Sandbox, place: str) -> None:
        sh(box, f"mkdir {place}/d && echo x > {place}/d/f && ln -s d {place}/link")
        box.remove(f"{place}/link", recursive=True).result(ANSWER_SECONDS)
        assert box.read_file(f"{place}/d/f").result(ANSWER_SECONDS) == b"x\n"

    def test_listing_tells_kinds_sizes_modes_and_targets(self, box: Sandbox, place: str) -> None:
        sh(
            box,
            f"cd {place} && printf 12345 >file && chmod 640 file && mkdir dir && ln -s file link && mkfifo pipe",
        )
        entries = {entry.name: entry for entry in box.list_dir(place).result(ANSWER_SECONDS)}
        assert {name: entry.kind for name, entry in entries.items()} == {
            "file": FileKind.FILE,
            "dir": FileKind.DIRECTORY,
            "link": FileKind.SYMLINK,
            "pipe": FileKind.OTHER,
        }
        assert entries["file"].size == 5
        assert stat.S_IMODE(entries["file"].mode) == 0o640
        assert entries["file"].path == f"{place}/file"
        assert entries["link"].target == "file"
        assert entries["file"].modified_at is not None

    def test_a_thousand_entries_are_all_listed(self, box: Sandbox, place: str) -> None:
        sh(box, f"cd {place} && i=0; while [ $i -lt 1000 ]; do : > n$i; i=$((i+1)); done")
        assert len(box.list_dir(place).result(ANSWER_SECONDS)) == 1000

    def test_an_empty_directory_lists_nothing(self, box: Sandbox, place: str) -> None:
        assert list(box.list_dir(place).result(ANSWER_SECONDS)) == []

    def test_make_dir_makes_parents_and_is_silent_when_it_is_there(self, box: Sandbox, place: str) -> None:
        for _ in range(2):
            box.make_dir(f"{place}/a/b/c").result(ANSWER_SECONDS)
        assert box.stat(f"{place}/a/b/c").result(ANSWER_SECONDS).kind is FileKind.DIRECTORY

    def test_a_directory_with_content_goes_only_when_asked(self, box: Sandbox, place: str) -> None:
        box.write_file(f"{place}/d/sub/f", b"x").result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileError):
            box.remove(f"{place}/d").result(ANSWER_SECONDS)
        assert box.exists(f"{place}/d/sub/f").result(ANSWER_SECONDS)
        box.remove(f"{place}/d", recursive=True).result(ANSWER_SECONDS)
        assert not box.exists(f"{place}/d").result(ANSWER_SECONDS)

    def test_relative_paths_start_at_the_working_dir(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox(working_dir="/tmp")
        box.write_file("here.txt", b"x").result(ANSWER_SECONDS)
        assert sh(box, "pwd; cat here.txt") == "/tmp\nx"
        assert box.read_file("/tmp/here.txt").result(ANSWER_SECONDS) == b"x"

    @pytest.mark.parametrize("path", ["", "a\0b", 7], ids=["empty", "nul", "number"])
    def test_a_path_that_cannot_be_one_is_refused(self, box: Sandbox, path: str) -> None:
        with pytest.raises(ValidationError) as caught:
            box.read_file(path).result(ANSWER_SECONDS)
        assert caught.value.argument in ("path", "remote")

    def test_many_files_at_once(self, box: Sandbox, place: str) -> None:
        contents = {f"{place}/{n}": os.urandom(20_000) for n in range(24)}
        for writing in [box.write_file(path, data) for path, data in contents.items()]:
            writing.result(ANSWER_SECONDS)
        reading = {path: box.read_file(path) for path in contents}
        assert {path: operation.result(ANSWER_SECONDS) for path, operation in reading.items()} == contents


def _fill(path: Path, size: int) -> str:
    """Write `size` bytes that no compression or deduplication shortens much; their digest."""
    block = os.urandom(1_000_000)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        written = 0
        while written < size:
            piece = (written.to_bytes(8, "big") + block)[: size - written]
            digest.update(piece)
            written += file.write(piece)
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
