"""`lowtide cp`: files and directories, both ways, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Cli, cli, one_line  # noqa: F401 (fixture)


@pytest.fixture
def box(cli: Cli) -> Iterator[str]:  # noqa: F811
    """A kept sandbox: it lives without a process that holds it."""
    assert cli("run", "--keep", "always", "--", "true").returncode == 0
    (sandbox_id,) = cli.ids()
    yield sandbox_id
    assert cli("rm", sandbox_id).returncode == 0


def test_a_file_in_and_out_keeps_its_bytes_and_mode(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    data = os.urandom(3_000_000)
    script = tmp_path / "in put"
    script.write_bytes(data)
    script.chmod(0o755)
    done = cli("cp", str(script), f"{box}:/root/there")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert cli("exec", box, "--", "stat", "-c", "%a %s", "/root/there").stdout.split() == [b"755", b"3000000"]
    assert cli("cp", f"{box}:/root/there", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == data
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o755


def test_a_directory_as_target_takes_the_name(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "a.txt").write_text("one")
    assert cli("cp", str(tmp_path / "a.txt"), f"{box}:/tmp").returncode == 0
    assert cli("cp", str(tmp_path / "a.txt"), f"{box}:/new/dir/").returncode == 0
    assert cli("exec", box, "--", "cat", "/tmp/a.txt", "/new/dir/a.txt").stdout == b"oneone"
    (tmp_path / "out").mkdir()
    assert cli("cp", f"{box}:/tmp/a.txt", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out" / "a.txt").read_text() == "one"


def test_directories_both_ways(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    tree = tmp_path / "tree"
    (tree / "sub dir").mkdir(parents=True)
    (tree / "sub dir" / "f\n1").write_text("x")
    (tree / "empty").mkdir()
    assert cli("cp", str(tree), f"{box}:/root/tree").returncode == 0
    assert cli("cp", f"{box}:/root/tree", str(tmp_path / "again")).returncode == 0
    assert (tmp_path / "again" / "sub dir" / "f\n1").read_text() == "x"
    assert (tmp_path / "again" / "empty").is_dir()


def test_what_is_missing_is_one_line_and_leaves_no_half_file(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    done = cli("cp", f"{box}:/no/such/file", str(tmp_path / "x"))
    assert done.returncode == 1
    assert "/no/such/file" in one_line(done)
    assert cli("cp", str(tmp_path / "not here"), f"{box}:/root/x").returncode == 1
    assert list(tmp_path.iterdir()) == []
    assert cli("exec", box, "--", "ls", "/root/x").returncode != 0


def test_an_error_on_this_side_names_what_was_asked_for(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "file").write_text("old")
    for source, target in (
        ("/etc", f"{tmp_path}/file"),
        ("/etc", "/proc/none"),
        ("/etc/hostname", "/proc/none"),
        ("/etc/hostname", "/dev/full"),
    ):
        done = cli("cp", f"{box}:{source}", target)
        assert done.returncode == 1
        assert one_line(done).endswith(f": '{target}'\n"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_copy_out_applies_the_umask_and_is_bounded(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    make = "mkdir -m 777 /root/wide; head -c 300000 /dev/zero > /root/wide/f; chmod 777 /root/wide/f"
    cli("exec", box, "--", "sh", "-c", make)
    before = os.umask(0o027)
    try:
        for path, name in (("wide", "tree"), ("wide/f", "file")):
            assert cli("cp", f"{box}:/root/{path}", str(tmp_path / name)).returncode == 0
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("tree", "tree/f", "file")]
    assert modes == [0o750] * 3
    for path in ("wide", "wide/f"):
        refused = cli("cp", "--max-bytes", "100000", f"{box}:/root/{path}", str(tmp_path / "no"))
        assert refused.returncode == 1
        assert "--max-bytes" in one_line(refused)
        assert not (tmp_path / "no").exists()
