"""Attempts to get out of a local sandbox through the file API: dots, links, swaps, special files, /proc."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from pathlib import Path

import pytest
from isolation_attempts import ANSWER_SECONDS

from lowtide import Sandbox
from lowtide.errors import LowtideError, SandboxFileError
from lowtide.machine import home

SECONDS = 4.0  # how long a race is tried


@pytest.fixture
def place(box: Sandbox) -> str:
    path = f"/opt/{secrets.token_hex(6)}"
    box.make_dir(path).result(ANSWER_SECONDS)
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "host" / "secret"
    path.parent.mkdir()
    path.write_text("host secret")
    return path


@pytest.mark.parametrize(
    "path",
    [
        "../../../../../../../../../../etc/passwd",
        "/../../../../../etc/passwd",
        "/opt/../../../../etc/passwd",
        "/proc/self/root/etc/passwd",
        "/proc/1/root/etc/passwd",
    ],
)
def test_dots_and_proc_roots_resolve_inside(box: Sandbox, path: str) -> None:
    inside = box.exec(["cat", "/etc/passwd"]).result(ANSWER_SECONDS).stdout_bytes
    with contextlib.suppress(SandboxFileError):  # refusing is as good
        assert box.read_file(path).result(ANSWER_SECONDS) == inside


def test_writing_up_the_tree_writes_inside(box: Sandbox, secret: Path) -> None:
    box.write_file("../" * 30 + str(secret).lstrip("/"), b"inside").result(ANSWER_SECONDS)
    assert secret.read_text() == "host secret"
    assert box.exec(["cat", str(secret)]).result(ANSWER_SECONDS).stdout == "inside"


@pytest.mark.parametrize("kind", ["absolute", "relative", "proc-root", "proc-cwd"])
def test_links_to_the_host_lead_nowhere(
    box: Sandbox, place: str, secret: Path, kind: str, tmp_path: Path
) -> None:
    target = {
        "absolute": str(secret),
        "relative": "../" * 30 + str(secret).lstrip("/"),
        "proc-root": f"/proc/self/root{secret}",
        "proc-cwd": f"/proc/self/cwd{secret}",
    }[kind]
    box.exec(["ln", "-s", target, f"{place}/link"], check=True).result(ANSWER_SECONDS)
    box.exec(["ln", "-s", os.path.dirname(target), f"{place}/folder"], check=True).result(ANSWER_SECONDS)
    for path in (f"{place}/link", f"{place}/folder/secret"):
        with pytest.raises(SandboxFileError):
            box.read_file(path).result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileError):
            box.download(path, tmp_path / "out").result(ANSWER_SECONDS)
    # Writing through them makes files inside, at the same path; outside nothing changes.
    for path in (f"{place}/link", f"{place}/folder/secret"):
        box.write_file(path, b"overwritten").exception(ANSWER_SECONDS)
        box.remove(path).exception(ANSWER_SECONDS)
    box.remove(f"{place}/folder", recursive=True).exception(ANSWER_SECONDS)
    assert secret.read_text() == "host secret"


def test_descriptors_of_the_helper_are_not_a_way_out(box: Sandbox, place: str) -> None:
    """A path such as /proc/self/fd/5 is resolved by whoever opens it; nothing of the host may stand behind it."""
    for number in range(64):
        path = f"/proc/self/fd/{number}"
        for candidate in (path, f"{path}/ledger.db", f"{path}/local", f"{path}/../../etc/shadow"):
            operation = box.read_file(candidate)
            if operation.exception(ANSWER_SECONDS) is None:
                data = operation.result(ANSWER_SECONDS)
                assert not data.startswith(b"SQLite format 3")
                assert b"root:$" not in data
            listing = box.list_dir(candidate)
            if listing.exception(ANSWER_SECONDS) is None:
                names = {entry.name for entry in listing.result(ANSWER_SECONDS)}
                assert not names & {"sandboxes", "ledger.db", "snapshots", "base"}, candidate
        wrote = box.write_file(path, b"scribble")
        wrote.exception(ANSWER_SECONDS)
    assert box.exec(["echo", "alive"]).result(ANSWER_SECONDS).stdout == "alive\n"


@pytest.mark.parametrize("name", ["environ", "cmdline", "maps", "mem", "auxv", "stack"])
def test_the_helpers_own_proc_files_tell_nothing(box: Sandbox, name: str) -> None:
    operation = box.read_file(f"/proc/self/{name}")
    if operation.exception(ANSWER_SECONDS) is None:
        data = operation.result(ANSWER_SECONDS)
        assert str(home()).encode() not in data
        assert b"LOWTIDE_HOME" not in data
        assert b"PYTEST" not in data


@pytest.mark.timeout(120)
def test_special_files_are_refused_and_do_not_hang(box: Sandbox, place: str, tmp_path: Path) -> None:
    code = f"""
import os, socket
os.mkfifo("{place}/fifo")
s = socket.socket(socket.AF_UNIX); s.bind("{place}/socket")
os.symlink("/dev/zero", "{place}/zero-link")
"""
    box.exec(["python3", "-c", code], check=True).result(ANSWER_SECONDS)
    for path in (
        f"{place}/fifo",
        f"{place}/socket",
        f"{place}/zero-link",
        "/dev/zero",
        "/dev/tty",
        "/dev/ptmx",
        "/dev/random",
    ):
        with pytest.raises(SandboxFileError):
            box.read_file(path).result(30)
        with pytest.raises(SandboxFileError):
            box.download(path, tmp_path / "out").result(30)
    # Writing to one replaces it by a file or is refused; it never blocks on it.
    for path in (f"{place}/fifo", f"{place}/socket"):
        box.write_file(path, b"x" * 200_000).exception(30)
    assert not (tmp_path / "out").exists()


def test_a_file_swapped_for_a_link_while_it_is_read(
    box: Sandbox, place: str, secret: Path, tmp_path: Path
) -> None:
    process = box.exec(
        [
            "python3",
            "-c",
            f"""
import os
print("up", flush=True)
os.chdir("{place}")
while True:
    with open("plain", "w") as file: file.write("inside")
    os.replace("plain", "f")
    os.symlink("{secret}", "link")
    os.replace("link", "f")
    os.symlink("../../../../../../..{secret}", "link")
    os.replace("link", "f")
""",
        ]
    )
    next(iter(process.stdout))
    end, reads = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        for operation in (box.read_file(f"{place}/f"), box.download(f"{place}/f", tmp_path / "out")):
            operation.exception(ANSWER_SECONDS)
        read = box.read_file(f"{place}/f")
        if read.exception(ANSWER_SECONDS) is None:
            reads += 1
            assert read.result(ANSWER_SECONDS) in (b"inside", b"")
        if (tmp_path / "out").exists():
            assert (tmp_path / "out").read_text() in ("inside", "")
        box.write_file(f"{place}/f", b"inside").exception(ANSWER_SECONDS)
    process.cancel()
    assert reads, "the race never let a read through, so it proved nothing"
    assert secret.read_text() == "host secret"


def test_a_directory_swapped_for_a_link_while_trees_go_in_and_out(
    box: Sandbox, place: str, secret: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "sub" / "deep").mkdir(parents=True)
    for n in range(40):
        (tree / "sub" / "deep" / f"f{n}").write_text("from here")
    before = {entry.name for entry in secret.parent.iterdir()}
    process = box.exec(
        [
            "python3",
            "-c",
            f"""
import os, shutil
print("up", flush=True)
os.makedirs("{place}/t", exist_ok=True)
os.chdir("{place}/t")
while True:
    try:
        os.makedirs("aside", exist_ok=True)
        if os.path.isdir("sub") and not os.path.islink("sub"): shutil.rmtree("sub", ignore_errors=True)
        os.symlink("{secret.parent}", "sub")
        os.unlink("sub")
        os.makedirs("sub/deep", exist_ok=True)
        shutil.rmtree("sub/deep", ignore_errors=True)
        os.symlink("{secret.parent}", "sub/deep")
        os.unlink("sub/deep")
    except OSError:
        pass
""",
        ]
    )
    next(iter(process.stdout))
    end, rounds = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        rounds += 1
        box.upload(tree, f"{place}/t").exception(ANSWER_SECONDS)
        out = tmp_path / f"out{rounds}"
        box.download(f"{place}/t", out).exception(ANSWER_SECONDS)
        if out.exists():
            assert not [path for path in out.rglob("secret")]
        box.remove(f"{place}/t/sub", recursive=True).exception(ANSWER_SECONDS)
    process.cancel()
    assert {entry.name for entry in secret.parent.iterdir()} == before
    assert secret.read_text() == "host secret"


def test_ending_a_sandbox_does_not_follow_its_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (victim / "deep" / "file").write_text("precious")
    with Sandbox.run(provider="local") as box:
        script = f"ln -s {victim} /opt/link; ln -s / /opt/root; mkdir -p /opt/a/b; chmod 000 /opt/a; mkdir -p /usr/local/x; ln -s {victim}/deep /usr/local/x/deep"
        box.exec(["sh", "-c", script], check=True).result(ANSWER_SECONDS)
    assert (victim / "deep" / "file").read_text() == "precious"
    assert not list((home() / "local" / "sandboxes").glob(f"*{box.lease_id}*"))


def test_a_name_as_long_and_a_path_as_deep_as_it_gets(box: Sandbox, place: str, tmp_path: Path) -> None:
    """Deeper than PATH_MAX and full of odd names: it can be listed, downloaded or refused, and removed."""
    code = f"""
import os
os.chdir("{place}")
for n in range(60):
    os.mkdir("d" * 200); os.chdir("d" * 200)
open("x" * 255, "w").close()
"""
    box.exec(["python3", "-c", code], check=True).result(ANSWER_SECONDS)
    box.download(place, tmp_path / "deep").exception(ANSWER_SECONDS)
    removing = box.remove(place, recursive=True)
    assert removing.exception(ANSWER_SECONDS) is None
    assert not box.exists(place).result(ANSWER_SECONDS)


def test_a_sandbox_with_a_tree_deeper_than_path_max_is_ended_completely() -> None:
    with Sandbox.run(provider="local") as box:
        code = 'import os\nos.chdir("/opt")\nfor n in range(60):\n  os.mkdir("d" * 200); os.chdir("d" * 200)\nos.chmod(".", 0)'
        box.exec(["python3", "-c", code], check=True).result(ANSWER_SECONDS)
    assert not list((home() / "local" / "sandboxes").glob(f"*{box.lease_id}*"))


def test_transfers_in_parallel_with_hostile_changes_never_raise_anything_strange(
    box: Sandbox, place: str
) -> None:
    process = box.exec(
        [
            "sh",
            "-c",
            f"echo up; cd {place}; while :; do mkdir -p d; echo x > d/f; rm -rf d; mkfifo d 2>/dev/null; rm -f d; done",
        ]
    )
    next(iter(process.stdout))
    strange: list[BaseException] = []

    def use() -> None:
        end = time.monotonic() + SECONDS / 2
        while time.monotonic() < end:
            for operation in (
                box.read_file(f"{place}/d/f"),
                box.list_dir(f"{place}/d"),
                box.stat(f"{place}/d"),
                box.write_file(f"{place}/d/g", b"y"),
            ):
                error = operation.exception(ANSWER_SECONDS)
                if error is not None and not isinstance(error, LowtideError):
                    strange.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_SECONDS)
    process.cancel()
    assert strange == []
