"""What a hostile sandbox can do to the memory and the disk of the process that owns it."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxFileError
from lowtide.providers.local import LocalProvider
from lowtide.trees.copy import copy_tree
from lowtide.trees.remove import remove_tree
from lowtide.trees.walk import size

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import run, shell, spec

DEEP = """
import os, sys
os.makedirs(sys.argv[1], exist_ok=True)
os.chdir(sys.argv[1])
for _ in range(int(sys.argv[2])):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").write("x")
"""


def test_reading_a_file_is_bounded_and_names_the_other_ways() -> None:
    with Sandbox.run(provider="local") as sandbox:
        sandbox.exec(["truncate", "-s", "1T", "/root/huge"], check=True).result()
        sandbox.write_file("/root/small", b"12345").result()
        with pytest.raises(SandboxFileError, match=r"download\(\)"):
            sandbox.read_file("/root/huge").result()
        with pytest.raises(SandboxFileError, match="max_bytes"):
            sandbox.read_file("/root/small", max_bytes=4).result()
        assert sandbox.read_file("/root/small", max_bytes=5).result() == b"12345"
        assert sandbox.read_file("/root/small", max_bytes=None).result() == b"12345"


_READ = """
import resource, sys
from lowtide import Sandbox
with Sandbox.run(provider="local") as sandbox:
    sandbox.exec(["truncate", "-s", "1T", "/root/huge"], check=True).result()
    sandbox.read_file("/etc/hosts").result()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        sandbox.read_file("/root/huge").result()
    except OSError:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_sparse_file_fills_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _READ], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10  # kilobytes


def test_a_download_keeps_holes(tmp_path: Path) -> None:
    make = "truncate -s 1T /root/f; printf end | dd of=/root/f bs=1 seek=1000000 conv=notrunc status=none"
    tree = "mkdir /root/t; truncate -s 200M /root/t/g; printf x >>/root/t/g"
    with Sandbox.run(provider="local") as sandbox:
        sandbox.exec(["sh", "-c", f"{make}; {tree}"], check=True).result()
        sandbox.download("/root/f", tmp_path / "f").result()
        sandbox.download("/root/t", tmp_path / "t").result()
        found = (tmp_path / "f").stat()
        assert (found.st_size, found.st_blocks < 1000) == (1 << 40, True)
        with open(tmp_path / "f", "rb") as file:
            file.seek(1_000_000)
            assert file.read(4) == b"end\0"
        below = (tmp_path / "t/g").stat()
        assert (below.st_size, below.st_blocks < 20_000) == ((200 << 20) + 1, True)
        os.truncate(tmp_path / "f", 1 << 30)
        sandbox.upload(tmp_path / "f", "/root/back").result()
        said = sandbox.exec(["stat", "-c", "%s %b", "/root/back"]).result().stdout.split()
        assert said[0] == str(1 << 30)
        assert int(said[1]) < 1000


_LARGE_ENVIRONMENT = """
import ctypes, mmap, struct, time
libc = ctypes.CDLL(None, use_errno=True)
size = 512 << 20
room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, size, 1 << 20):
    room[at : at + 2] = b"A="
start = ctypes.addressof(ctypes.c_char.from_buffer(room))
fields = {}
with open("/proc/self/stat", "rb") as file:
    words = file.read().rpartition(b")")[2].split()
number = lambda index: int(words[index - 3])
# start_code end_code start_data end_data start_brk brk start_stack arg_start arg_end env_start env_end auxv size fd
record = [number(26), number(27), number(45), number(46), number(47), libc.sbrk(0) and 0, number(28),
          number(48), number(49), start, start + size, 0]
libc.sbrk.restype = ctypes.c_void_p
record[5] = libc.sbrk(0)
packed = struct.pack("12QII", *record, 0, 0xFFFFFFFF)
buffer = ctypes.create_string_buffer(packed)
done = libc.prctl(35, 14, buffer, ctypes.c_ulong(len(packed)), 0)
open("/done", "w").write(str(done if done == 0 else -ctypes.get_errno()))
time.sleep(1000)
"""


async def test_attaching_reads_no_endless_environment(provider: LocalProvider) -> None:
    made = await provider.create(spec(command=("python3", "-c", _LARGE_ENVIRONMENT)))
    for _ in range(200):
        if (await shell(provider, made.sandbox_id, "test -s /done"))[0] == 0:
            break
        await asyncio.sleep(0.05)
    if (await run(provider, made.sandbox_id, "cat", "/done"))[1] != "0":
        pytest.skip("the kernel does not let it move its environment")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    other = LocalProvider.connect({"LOWTIDE_HOME": str(provider.home.parent)})
    try:
        _, out, _ = await run(other, made.sandbox_id, "env")
        assert "A=" not in out.splitlines()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes
    finally:
        await other.aclose()


@pytest.mark.parametrize("depth", [1500])
async def test_a_tree_as_deep_as_one_likes(provider: LocalProvider, depth: int) -> None:
    made = await provider.create(spec())
    assert (await run(provider, made.sandbox_id, "python3", "-c", DEEP, "/root/a", str(depth)))[0] == 0
    taken = await provider.snapshot(made.sandbox_id, "deep")
    assert size(str(provider.home / "snapshots" / taken / "root")) >= 1
    await provider.remove(made.sandbox_id, "/root/a", recursive=True)
    assert "a" not in {entry.name for entry in await provider.list_dir(made.sandbox_id, "/root")}
    assert (await run(provider, made.sandbox_id, "python3", "-c", DEEP, "/root/b", str(depth)))[0] == 0
    assert await provider.destroy(made.sandbox_id) is True
    assert await provider.delete_snapshot(taken) is True


@pytest.mark.slow
def test_a_deep_directory_is_downloaded_twice(tmp_path: Path) -> None:
    with Sandbox.run(provider="local") as sandbox:
        sandbox.exec(["python3", "-c", DEEP, "/root/a", "1500"], check=True).result()
        for _ in range(2):
            sandbox.download("/root/a", tmp_path / "a").result()
        sandbox.exec(["python3", "-c", DEEP, "/root/b", "8500"], check=True).result()
        with pytest.raises(SandboxFileError, match="longer than"):
            sandbox.download("/root/b", tmp_path / "b").result()
    bottom = tmp_path / "a"
    assert size(str(bottom)) == 1
    remove_tree(bottom)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_keeps_hard_links_and_deep_ones_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run([sys.executable, "-c", DEEP, str(source), "3000"], check=True)
    (source / "one").write_text("1")
    os.link(source / "one", source / "two")
    copy_tree(str(source), str(tmp_path / "target"))
    assert (tmp_path / "target/one").stat().st_ino == (tmp_path / "target/two").stat().st_ino
    assert size(str(tmp_path / "target")) == size(str(source))
    remove_tree(source)
    remove_tree(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
