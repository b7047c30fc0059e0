"""`lowtide image`: import a root filesystem, run on it, remove it."""

from __future__ import annotations

import io
import platform
import struct
import tarfile
from pathlib import Path

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the image's program is x86-64 code")


def _root_filesystem(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data, mode in (("etc/mark", b"from the image\n", 0o644), ("bin/answer", _program(), 0o755)):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))
    return path


def _program() -> bytes:
    """A static ELF by hand: header, one segment, `exit(42)`."""
    code = bytes.fromhex("bf2a000000b83c0000000f05")
    base, start = 0x400000, 64 + 56
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01" + bytes(9), 2, 0x3E, 1, base + start, 64, 0, 0, 64, 56, 1, 0, 0, 0,
    )  # fmt: skip
    length = start + len(code)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, length, length, 0x1000)
    return header + segment + code


def test_import_list_run_and_remove(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    file = _root_filesystem(tmp_path / "root.tar")
    image = cli.json("image", "import", "tiny:1", str(file))
    assert image["name"] == "tiny:1"
    assert [one["name"] for one in cli.json("image", "ls")] == ["tiny:1"]
    assert "tiny:1" in cli("image", "ls").stdout.decode()
    assert cli("run", "--image", "tiny:1", "--", "/bin/answer").returncode == 42
    assert cli("image", "rm", "tiny:1").returncode == 0
    assert b"no images" in cli("image", "ls").stdout
    done = cli("image", "rm", "tiny:1")
    assert done.returncode == 1
    assert "lowtide image ls" in one_line(done)
    assert cli("image", "rm", "--missing-ok", "tiny:1").returncode == 0


def test_what_is_no_image_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "not.tar").write_bytes(b"this is no archive" * 100)
    done = cli("image", "import", "broken", str(tmp_path / "not.tar"))
    assert done.returncode == 2
    assert "broken" in one_line(done) or "not.tar" in one_line(done)
    assert cli.json("image", "ls") == []


def test_an_image_in_use_stays(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    cli("image", "import", "used", str(_root_filesystem(tmp_path / "root.tar")))
    cli("run", "--image", "used", "--keep", "always", "--", "/bin/answer")
    (sandbox_id,) = cli.ids()
    try:
        done = cli("image", "rm", "used")
        assert done.returncode == 1
        one_line(done)
        assert [one["name"] for one in cli.json("image", "ls")] == ["used"]
    finally:
        cli("rm", sandbox_id)
    assert cli("image", "rm", "used").returncode == 0


def test_layers_that_emulators_built_are_shown_and_pruned(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    from lowtide.emulators.layer_cache import LayerCache

    source = tmp_path / "source"
    (source / "root").mkdir(parents=True)
    (source / "root" / "file").write_bytes(b"x" * 2000)
    (source / "manifest.json").write_text('{"working_dir": "/root"}')
    cache = LayerCache.of(cli.home)
    cache.keep("0" * 64, source)
    assert b"and 1 layers that emulators built" in cli("image", "ls").stdout
    assert cli.json("image", "ls") == []
    assert cli.json("image", "prune")["layers"] == 1
    assert b"0 layers" in cli("image", "prune").stdout
    assert b"layers" not in cli("image", "ls").stdout
    assert (source / "root" / "file").stat().st_nlink == 1
