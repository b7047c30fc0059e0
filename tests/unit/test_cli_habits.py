"""What people type without thinking: `cp` as docker's, input through a pipe, narrow terminals, a shell's completion."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import signal
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import LOWTIDE, Cli, cli  # noqa: F401 (fixture)


@pytest.fixture
def box(cli: Cli) -> Iterator[str]:  # noqa: F811
    assert cli("run", "--keep", "always", "--tag", "a-rather-long-tag", "--", "true").returncode == 0
    (sandbox_id,) = cli.ids()
    yield sandbox_id
    assert cli("rm", sandbox_id).returncode == 0


def test_cp_is_docker_cp(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_text("x")
    os.utime(tree / "f", (10**9, 10**9))
    for source, target in (
        (tree, "/one"),
        (tree, "/one"),
        (f"{tree}/.", "/two"),
        (f"{tree}/.", "/two"),
        (tree, "/3/4/"),
    ):
        assert cli("cp", str(source), f"{box}:{target}").returncode == 0
    found = cli(
        "exec", box, "--", "sh", "-c", "find /one /two /3 -type f | sort; stat -c %Y /one/f"
    ).stdout.split()
    assert found == [b"/3/4/f", b"/one/f", b"/one/tree/f", b"/two/f", b"1000000000"]

    (tmp_path / "here").mkdir()
    for source, target in (("/two", "new"), ("/two", "here"), ("/two/.", "here"), ("/two/f", "a/b/c")):
        assert cli("cp", f"{box}:{source}", str(tmp_path / target)).returncode == 0
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert names == ["a/b/c", "here/f", "here/two/f", "new/f", "tree/f"]
    assert (tmp_path / "a/b/c").stat().st_mtime == 10**9


def test_cp_of_a_tar_stream(cli: Cli, box: str) -> None:  # noqa: F811
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("d/" + "n" * 150)
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    for compress in (bytes, gzip.compress, bz2.compress, lzma.compress):
        assert cli("exec", box, "--", "rm", "-rf", "/in").returncode == 0
        assert cli("cp", "-", f"{box}:/in", input=compress(packed.getvalue())).returncode == 0
    cut = cli("cp", "-", f"{box}:/cut", input=gzip.compress(packed.getvalue())[:-9])
    assert (cut.returncode, cut.stderr.count(b"\n")) == (1, 1)
    out = cli("cp", f"{box}:/in", "-")
    assert out.returncode == 0, out.stderr
    with tarfile.open(fileobj=io.BytesIO(out.stdout)) as tar:
        assert tar.getnames()[:2] == ["in", "in/d"], "the directory itself, and once"
        member = tar.getmember("in/d/" + "n" * 150)
        content = tar.extractfile(member)
        assert content is not None
        assert content.read() == b"abc"
    with tarfile.open(fileobj=io.BytesIO(cli("cp", f"{box}:/etc/hostname", "-").stdout)) as tar:
        assert tar.getnames() == ["hostname"]


def test_cp_never_replaces_a_device_or_standard_output(cli: Cli, box: str, tmp_path: Path) -> None:  # noqa: F811
    done = cli("cp", f"{box}:/etc/hostname", "/dev/stdout")
    assert (done.returncode, done.stdout) == (0, b"sandbox\n")
    with (tmp_path / "out").open("ab") as file:
        file.write(b"before\n")
        file.flush()
        arguments = ["cp", f"{box}:/etc/hostname", "/dev/stdout"]
        subprocess.run([*LOWTIDE, *arguments], stdout=file, env=cli.environ, check=True)
    assert (tmp_path / "out").read_bytes() == b"before\nsandbox\n"
    assert cli("cp", f"{box}:/etc/hostname", "/dev/null").returncode == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("arguments", [("run", "--", "echo", "hi"), ("ls",), ("cp", "BOX:/etc", "-")])
def test_output_that_cannot_be_written_is_one_line(cli: Cli, box: str, arguments: tuple[str, ...]) -> None:  # noqa: F811
    """A closed output's number must not become another file's: then this would be written into that."""
    words = [word.replace("BOX", box) for word in arguments]
    for output in (">&-", ">/dev/full"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {output}', "sh", *LOWTIDE, *words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=cli.environ,
            timeout=120,
        )
        assert done.returncode == (125 if "run" in words else 1), done.stderr
        assert done.stderr.startswith(b"lowtide: [Errno ")
        assert done.stderr.count(b"\n") == 1


def test_input_that_cannot_be_read_ends_the_command(cli: Cli, box: str) -> None:  # noqa: F811
    with open("/proc/self/mem", "rb") as unreadable:  # nothing is mapped at its start
        done = subprocess.run(
            [*LOWTIDE, "exec", box, "--", "cat"],
            stdin=unreadable,
            capture_output=True,
            env=cli.environ,
            timeout=120,
        )
    assert (done.returncode, b"standard input" in done.stderr) == (125, True), done.stderr


def test_input_through_a_pipe_goes_inside(cli: Cli, box: str) -> None:  # noqa: F811
    assert cli("run", "--", "cat", input=b"hi\n").stdout == b"hi\n"
    assert cli("exec", box, "--", "cat", input=b"hi\n").stdout == b"hi\n"
    assert cli("run", "--no-stdin", "--", "cat", input=b"hi\n").stdout == b""


def test_no_time_is_refused_as_the_api_refuses_it(cli: Cli) -> None:  # noqa: F811
    for option in ("--timeout", "--max-lifetime", "--keep-for"):
        done = cli("run", option, "0", "--", "true")
        assert done.returncode == 2, done.stderr


def test_a_list_fits_forty_columns(cli: Cli, box: str) -> None:  # noqa: F811
    lines = cli("ls", COLUMNS="40").stdout.decode().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0] == box
    assert "a-rather-long-tag" in "".join(line.strip() for line in lines)


def test_a_list_is_watched_until_ctrl_c(cli: Cli, box: str) -> None:  # noqa: F811
    watching = cli.start("ls", "--watch", "--quiet")
    assert watching.stdout is not None
    seen = [watching.stdout.readline(), watching.stdout.readline()]
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=60)
    assert (seen, watching.returncode) == ([f"{box}\n".encode()] * 2, 0)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes(cli: Cli, shell: str) -> None:  # noqa: F811
    done = cli("completion", shell)
    assert done.returncode == 0
    assert b"_LOWTIDE_COMPLETE" in done.stdout
    at = "comp" if shell == "fish" else "1"
    words = {"COMP_WORDS": "lowtide comp", "COMP_CWORD": at, "_LOWTIDE_COMPLETE": f"{shell}_complete"}
    assert b"completion" in cli(**words).stdout
