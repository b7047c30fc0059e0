"""The local provider at the seam: create, commands, files, ports, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lowtide.errors import (
    SandboxFailedError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxGone,
    SandboxIsADirectoryError,
    SandboxNotFoundError,
    SandboxPermissionError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.providers.base import Network, NetworkMode, ProcessSpec, SandboxState, TerminalSize
from lowtide.providers.local import LocalProvider, enter
from lowtide.providers.local import destroy as ending
from lowtide.providers.local.sandbox_directory import start_time
from lowtide.providers.local.spawner_client import SpawnerClient
from lowtide.providers.optional import FileKind
from lowtide.trees.remove import remove_tree

sys.path.insert(0, str(Path(__file__).parent))
from local_sandbox import chunks, new_id, read, run, shell, spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture
async def sandbox(provider: LocalProvider) -> str:
    return (await provider.create(spec())).sandbox_id


async def test_a_command_runs_and_its_streams_stay_apart(provider: LocalProvider, sandbox: str) -> None:
    assert await shell(provider, sandbox, "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")


async def test_what_cannot_be_run_counts_as_a_shell_counts_it(provider: LocalProvider, sandbox: str) -> None:
    code, _, err = await run(provider, sandbox, "no-such-command")
    assert code == 127
    assert "no-such-command" in err
    code, _, err = await run(provider, sandbox, "/etc/passwd")
    assert code == 126
    assert err
    code, _, err = await run(provider, sandbox, "true", cwd="/no/such/place")
    assert code in (126, 127)
    assert "/no/such/place" in err


async def test_a_signal_is_128_and_its_number(provider: LocalProvider, sandbox: str) -> None:
    assert (await shell(provider, sandbox, "kill -9 $$"))[0] == 137
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sleep", "100")))
    await asyncio.sleep(0.2)
    await process.signal(signal.SIGINT)
    assert await process.wait() == 130


async def test_environment_directory_and_stdin(provider: LocalProvider) -> None:
    made = await provider.create(spec(environment={"A": "1", "B": "2"}, working_dir="/opt/work"))
    code, out, _ = await shell(
        provider, made.sandbox_id, "echo $A $B $C; pwd", environment={"B": "x", "C": "3"}
    )
    assert (code, out) == (0, "1 x 3\n/opt/work\n")
    process = await provider.start_process(made.sandbox_id, ProcessSpec(argv=("cat",), stdin=True))
    data = os.urandom(300_000)

    async def feed() -> None:
        await process.write_stdin(data)
        await process.close_stdin()

    feeding = asyncio.create_task(feed())
    assert b"".join([chunk async for _, chunk in process.output()]) == data
    await feeding
    assert await process.wait() == 0
    with pytest.raises(BrokenPipeError):
        await process.write_stdin(b"late")


async def test_nothing_of_this_process_environment_is_inside(
    provider: LocalProvider, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_TEST_SECRET", "hush")
    assert "hush" not in (await run(provider, sandbox, "env"))[1]


async def test_a_long_command_line_arrives_whole(provider: LocalProvider, sandbox: str) -> None:
    words = [f"{number:08d}" for number in range(20_000)]
    code, out, _ = await run(provider, sandbox, "echo", *words)
    assert code == 0
    assert out.split() == words


async def test_a_background_job_that_holds_stdout_does_not_hold_the_call(
    provider: LocalProvider, sandbox: str
) -> None:
    async with asyncio.timeout(20):
        assert await shell(provider, sandbox, "sleep 300 & echo started") == (0, "started\n", "")


async def test_terminate_ends_the_whole_tree(provider: LocalProvider, sandbox: str) -> None:
    script = "setsid sleep 4001 & (trap '' TERM; while :; do sleep 4002; done) & sleep 4003"
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sh", "-c", script)))
    bystander = await provider.start_process(sandbox, ProcessSpec(argv=("sleep", "4009")))
    await asyncio.sleep(0.3)
    await process.terminate(0.3)
    assert await process.wait() in (137, 143)
    _code, out, _ = await shell(provider, sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "400" in out
    assert "4009" in out
    assert not any(number in out for number in ("4001", "4002", "4003"))
    await bystander.terminate(1.0)


async def test_a_terminal_is_one_with_a_size(provider: LocalProvider, sandbox: str) -> None:
    size = TerminalSize(columns=100, rows=30)
    argv = ("sh", "-c", "stty size; test -t 0 && test -t 1 && echo yes; read x; stty size; echo got $x")
    process = await provider.start_process(sandbox, ProcessSpec(argv=argv, tty=size))
    await asyncio.sleep(0.3)
    await process.resize(TerminalSize(columns=70, rows=20))
    await process.write_stdin(b"abc\n")
    out = b"".join([chunk async for _, chunk in process.output()])
    assert await process.wait() == 0
    assert b"30 100" in out
    assert b"yes" in out
    assert b"20 70" in out
    assert b"got abc" in out


async def test_zombies_are_reaped(provider: LocalProvider, sandbox: str) -> None:
    await shell(provider, sandbox, "for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
    await asyncio.sleep(0.3)
    _, out, _ = await shell(provider, sandbox, "cat /proc/[0-9]*/stat | cut -d' ' -f3")
    assert "Z" not in out


async def test_dev_stdout_can_be_opened_again(provider: LocalProvider, sandbox: str) -> None:
    assert (await shell(provider, sandbox, "echo x >/dev/stdout; echo y >/dev/stderr"))[1:] == ("x\n", "y\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox has one user")
async def test_exec_as_another_user(provider: LocalProvider, sandbox: str) -> None:
    code, out, _ = await shell(provider, sandbox, "id -u; echo $HOME; echo x >/dev/stdout", user="user")
    assert (code, out) == (0, "1000\n/home/user\nx\n")
    assert (await run(provider, sandbox, "id", "-u", user="1234"))[1] == "1234\n"
    with pytest.raises(ValidationError, match="knows no user nobody-here"):
        await run(provider, sandbox, "id", user="nobody-here")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox has one user")
async def test_a_user_can_be_added_as_the_page_says_though_nothing_can_be_given_away(
    provider: LocalProvider, sandbox: str
) -> None:
    assert (
        "useradd bob && mkdir\n-m 1777 /home/bob" in (Path(__file__).parents[2] / "docs/local.md").read_text()
    )
    code, _, said = await shell(provider, sandbox, "useradd bob && mkdir -m 1777 /home/bob")
    assert code == 0, said
    own = "id -un; cd ~ && echo x > y && stat -c '%U %n' ~/y"
    assert (await shell(provider, sandbox, own, user="bob"))[1] == "bob\nbob /home/bob/y\n"
    code, _, said = await shell(provider, sandbox, "chown bob /home/bob")
    assert code != 0
    assert "Operation not permitted" in said


async def test_files_in_and_out(provider: LocalProvider, sandbox: str) -> None:
    name = "/data/a b/ü\nñ"
    for data in (b"", b"hello", os.urandom(1 << 20)):
        assert await provider.write_file(sandbox, name, chunks(data[:100], data[100:]), mode=0o600) == len(
            data
        )
        assert await read(provider, sandbox, name) == data
    entry = await provider.stat(sandbox, name)
    assert (entry.kind, entry.size, entry.mode) == (FileKind.FILE, 1 << 20, 0o600)
    assert [e.name for e in await provider.list_dir(sandbox, "/data/a b")] == ["ü\nñ"]
    await provider.make_dir(sandbox, "/data/x/y")
    await provider.make_dir(sandbox, "/data/x/y")
    await provider.remove(sandbox, "/data", recursive=True)
    with pytest.raises(SandboxFileNotFoundError):
        await provider.stat(sandbox, "/data")


async def test_file_errors_have_their_own_types(provider: LocalProvider, sandbox: str) -> None:
    with pytest.raises(SandboxFileNotFoundError):
        await read(provider, sandbox, "/nope")
    with pytest.raises(SandboxIsADirectoryError):
        await read(provider, sandbox, "/etc")
    with pytest.raises(SandboxIsADirectoryError):
        await provider.write_file(sandbox, "/etc", chunks(b"x"))
    await shell(provider, sandbox, "echo x >/f; chmod 0 /f; mkfifo /fifo")
    with pytest.raises(SandboxPermissionError):
        await read(provider, sandbox, "/f")
    with pytest.raises(OSError, match="not a regular file"):
        await read(provider, sandbox, "/fifo")


async def test_a_write_that_breaks_off_leaves_the_old_file(provider: LocalProvider, sandbox: str) -> None:
    await provider.write_file(sandbox, "/root/f", chunks(b"old"))

    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        await provider.write_file(sandbox, "/root/f", broken())
    assert await read(provider, sandbox, "/root/f") == b"old"
    for _ in range(100):
        if len(await provider.list_dir(sandbox, "/root")) <= 2:
            break
        await asyncio.sleep(0.02)
    assert not [e.name for e in await provider.list_dir(sandbox, "/root") if e.name.startswith(".lowtide")]


async def test_links_lead_only_inside(provider: LocalProvider, sandbox: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("outside")
    script = f"ln -s {secret} /root/abs; ln -s ../../../../../../../..{secret} /root/rel; ln -s {tmp_path} /root/dir"
    await shell(provider, sandbox, script)
    for path in ("/root/abs", "/root/rel", "/root/dir/secret", f"/root/../../..{secret}"):
        with pytest.raises(OSError, match="No such file"):
            await read(provider, sandbox, path)
    await provider.write_file(sandbox, "/root/abs", chunks(b"changed"))
    assert secret.read_text() == "outside"
    assert await read(provider, sandbox, str(secret)) == b"changed"


async def test_trees_in_and_out(provider: LocalProvider, sandbox: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in (("d/one", b"1"), ("d/e/two", b"22")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("d/link")
        link.type, link.linkname = tarfile.SYMTYPE, "one"
        archive.addfile(link)
    await provider.write_tree(sandbox, "/root/t", chunks(packed.getvalue()))
    assert await read(provider, sandbox, "/root/t/d/link") == b"1"
    out = b"".join([chunk async for chunk in provider.read_tree(sandbox, "/root/t")])
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        assert sorted(archive.getnames()) == ["d", "d/e", "d/e/two", "d/link", "d/one"]
    with pytest.raises(SandboxFileNotFoundError):
        [chunk async for chunk in provider.read_tree(sandbox, "/nope")]
    with pytest.raises(OSError, match="tar"):
        await provider.write_tree(sandbox, "/root/bad", chunks(b"this is no archive" * 100))


async def test_a_tree_with_a_name_that_leads_out_of_it_is_refused(
    provider: LocalProvider, sandbox: str
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("../escape")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(OSError, match="leads out of the directory"):
        await provider.write_tree(sandbox, "/root/t/u", chunks(packed.getvalue()))
    for path in ("/root/t/escape", "/root/t/u/escape"):
        with pytest.raises(SandboxFileNotFoundError):
            await provider.stat(sandbox, path)


async def test_a_port_is_reachable_without_a_network(provider: LocalProvider, sandbox: str) -> None:
    await provider.write_file(sandbox, "/srv/index.html", chunks(b"from inside"))
    server = await provider.start_process(
        sandbox, ProcessSpec(argv=("python3", "-m", "http.server", "8123", "-d", "/srv", "-b", "127.0.0.1"))
    )
    url = (await provider.url(sandbox, 8123)).url
    assert url == (await provider.url(sandbox, 8123)).url

    def fetch() -> bytes:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bytes(answer.read())

    for _ in range(100):
        try:
            assert await asyncio.to_thread(fetch) == b"from inside"
            break
        except OSError:
            await asyncio.sleep(0.1)
    else:
        pytest.fail("the port never answered")
    await server.terminate(1.0)


async def test_network_host_is_this_machines(provider: LocalProvider) -> None:
    async with _loopback_service() as script:
        made = await provider.create(spec(network=Network(mode=NetworkMode.HOST)))
        assert (await run(provider, made.sandbox_id, "python3", "-c", script))[0] == 0
        other = await provider.create(spec())
        assert (await run(provider, other.sandbox_id, "python3", "-c", script))[0] != 0


async def test_network_internet_is_not_this_machines(provider: LocalProvider) -> None:
    async with _loopback_service() as script:
        made = await provider.create(spec(network=Network(mode=NetworkMode.INTERNET)))
        assert (await run(provider, made.sandbox_id, "true"))[0] == 0
        assert (await run(provider, made.sandbox_id, "python3", "-c", script))[0] != 0


@contextlib.asynccontextmanager
async def _loopback_service() -> AsyncIterator[str]:
    """A program that connects to a service on this machine's loopback address, while the service runs."""
    listener = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
    finally:
        listener.close()


async def test_destroy_ends_everything_and_is_calm(provider: LocalProvider, tmp_path: Path) -> None:
    made = await provider.create(spec())
    directory = provider._directory(made.sandbox_id)
    marks = directory.processes()
    process = await provider.start_process(made.sandbox_id, ProcessSpec(argv=("sleep", "1000")))
    assert await provider.destroy(made.sandbox_id) is True
    assert not any(mark is not None and mark.alive() for mark in marks)
    with pytest.raises(SandboxGone):
        await process.wait()
    assert await provider.destroy(made.sandbox_id) is False
    with pytest.raises(SandboxNotFoundError):
        await provider.get(made.sandbox_id)
    with pytest.raises((SandboxGone, SandboxNotFoundError)):
        await provider.start_process(made.sandbox_id, ProcessSpec(argv=("true",)))


async def test_grace_lets_processes_end_by_themselves(provider: LocalProvider, sandbox: str) -> None:
    script = "trap 'echo bye; exit 3' TERM; echo on; while :; do sleep 0.05; done"
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sh", "-c", script)))
    stream = process.output()
    assert (await anext(stream))[1] == b"on\n"
    assert await provider.destroy(sandbox, grace_seconds=10) is True
    assert b"bye\n" in b"".join([chunk async for _, chunk in stream])
    assert await process.wait() == 3


async def test_another_process_sees_enters_and_ends_it(provider: LocalProvider) -> None:
    made = await provider.create(spec(environment={"A": "1"}))
    other = LocalProvider.connect(provider.credentials())
    try:
        assert other.account == provider.account
        assert [info.sandbox_id async for info in other.list(made.labels)] == [made.sandbox_id]
        assert [info async for info in other.list({"lowtide-lease": "another"})] == []
        assert (await shell(other, made.sandbox_id, "echo $A"))[1] == "1\n"
        assert await other.destroy(made.sandbox_id) is True
    finally:
        await other.aclose()
    with pytest.raises(SandboxGone):
        await provider.start_process(made.sandbox_id, ProcessSpec(argv=("true",)))


async def test_the_sandbox_outlives_its_spawner(provider: LocalProvider, sandbox: str) -> None:
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sleep", "1000")))
    assert provider._prerequisites.client is not None
    os.kill(provider._prerequisites.client._pid, signal.SIGKILL)
    with pytest.raises(SandboxUnavailableError):
        await process.wait()
    for _ in range(50):
        try:
            assert (await run(provider, sandbox, "echo", "on"))[1] == "on\n"
            break
        except SandboxUnavailableError:
            await asyncio.sleep(0.05)
    else:
        pytest.fail("no new spawner was started")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_command_is_ended_without_its_spawner(
    provider: LocalProvider, sandbox: str, number: signal.Signals
) -> None:
    process = await provider.start_process(
        sandbox, ProcessSpec(argv=("sh", "-c", "trap '' TERM; while :; do sleep 1; done"))
    )
    inner = provider._entrance.known(sandbox).inner
    client = provider._prerequisites.client
    assert client is not None

    def running() -> list[int]:
        return [
            pid for pid in ending.members(inner.pid) if pid != inner.pid and ending.state(pid) not in "ZX"
        ]

    while not running():
        await asyncio.sleep(0.01)
    os.kill(client._pid, number)
    try:
        await process.terminate(0.2)
        assert not running()
        assert inner.alive()
    finally:
        if number == signal.SIGSTOP:
            os.kill(client._pid, signal.SIGCONT)
        await process.aclose()


async def test_killing_either_bwrap_ends_the_sandbox(provider: LocalProvider) -> None:
    for which in (0, 1):
        made = await provider.create(spec())
        marks = provider._directory(made.sandbox_id).processes()
        victim, other = marks[which], marks[1 - which]
        assert victim is not None
        assert other is not None
        os.kill(victim.pid, signal.SIGKILL)
        for _ in range(200):
            if not other.left() and not victim.left():
                break
            await asyncio.sleep(0.02)
        assert not other.alive()
        assert (await provider.get(made.sandbox_id)).state is SandboxState.FAILED
        with pytest.raises(SandboxGone):
            await provider.start_process(made.sandbox_id, ProcessSpec(argv=("true",)))
        assert await provider.destroy(made.sandbox_id) is True


async def test_a_hard_lifetime_needs_nobody(provider: LocalProvider) -> None:
    made = await provider.create(spec(lifetime_seconds=0.5))
    for _ in range(300):
        if (await provider.get(made.sandbox_id)).state is not SandboxState.RUNNING:
            break
        await asyncio.sleep(0.02)
    info = await provider.get(made.sandbox_id)
    assert info.state is SandboxState.FAILED
    assert info.reason == "its lifetime is over"


async def test_the_main_command_is_the_sandbox(provider: LocalProvider) -> None:
    for code, state in ((0, SandboxState.COMPLETED), (3, SandboxState.FAILED)):
        made = await provider.create(spec(command=("sh", "-c", f"sleep 0.2; exit {code}")))
        for _ in range(300):
            info = await provider.get(made.sandbox_id)
            if info.state is not SandboxState.RUNNING:
                break
            await asyncio.sleep(0.02)
        assert (info.state, info.exit_code) == (state, code)
    lost = spec(command=("no-such-command",))
    with pytest.raises(SandboxFailedError, match="no-such-command"):
        await provider.create(lost)
    assert await provider.find(lost) is None


async def test_the_same_lease_twice_is_one_sandbox(provider: LocalProvider) -> None:
    wanted = spec()
    first, second = await provider.create(wanted), await provider.create(wanted)
    assert first.sandbox_id == second.sandbox_id
    assert len([info async for info in provider.list({})]) == 1
    found = await provider.find(wanted)
    assert found is not None
    assert found.sandbox_id == first.sandbox_id


async def test_a_destroy_during_create_leaves_nothing(provider: LocalProvider) -> None:
    await provider.create(spec())
    for delay in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
        wanted = spec()
        task = asyncio.create_task(provider.create(wanted))
        await asyncio.sleep(delay)
        await provider.destroy(wanted.lease_id)
        with contextlib.suppress(SandboxFailedError, SandboxGone, SandboxNotFoundError):
            await task
        await provider.destroy(wanted.lease_id)
        assert await provider.find(wanted) is None
        await asyncio.to_thread(ending.wait_removed)  # a thread of ours that deletes its files holds them too
        assert not _processes_of(wanted.lease_id)


def _processes_of(lease_id: str) -> list[str]:
    """Processes that still hold the sandbox's directory as a mount or a descriptor."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
            if any(lease_id in link for link in links) or lease_id in (process / "mountinfo").read_text():
                found.append(process.name)
    return found


async def test_many_at_once(provider: LocalProvider) -> None:
    async def one() -> str:
        made = await provider.create(spec())
        _, out, _ = await run(provider, made.sandbox_id, "hostname")
        assert await provider.destroy(made.sandbox_id) is True
        return out

    assert len(set(await asyncio.gather(*(one() for _ in range(30))))) == 30


async def test_ids_that_lead_elsewhere_are_not_found(provider: LocalProvider) -> None:
    for bad in ("../../etc", "a/b", ".", "..", "", "a\0b"):
        with pytest.raises(SandboxNotFoundError):
            await provider.get(bad)
        assert await provider.destroy(bad) is False


async def test_an_image_that_is_missing_says_what_to_run(provider: LocalProvider) -> None:
    with pytest.raises(ValidationError, match=r"lowtide image import ubuntu:24\.04"):
        await provider.create(spec(image="ubuntu:24.04"))
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    missing = (
        f"python:{own}-{os.urandom(4).hex()}"  # one warning a process and image: a name no other test used
    )
    with pytest.warns(UserWarning, match="stands in"):
        made = await provider.create(spec(image=missing))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await provider.create(spec(image=missing))
    _code, out, _ = await run(provider, made.sandbox_id, "python3", "-V")
    assert out.startswith(f"Python {own}.")


async def test_no_secret_is_written_down_or_shown(provider: LocalProvider) -> None:
    made = await provider.create(spec(environment={"TOKEN": "s3cr3t-value"}))
    directory = provider._directory(made.sandbox_id)
    assert "s3cr3t-value" not in (directory.path / "spec.json").read_text()
    for mark in directory.processes():
        assert mark is not None
        assert b"s3cr3t-value" not in Path(f"/proc/{mark.pid}/cmdline").read_bytes()


async def test_trash_of_a_killed_process_is_swept(tmp_path: Path) -> None:
    first = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    made = await first.create(spec())
    directory = first._directory(made.sandbox_id)
    marks = directory.processes()
    trash = first.home / "trash"
    trash.mkdir(exist_ok=True)
    os.rename(directory.path, trash / new_id())  # died between taking the name away and killing
    await first.aclose()
    second = LocalProvider.connect({"LOWTIDE_HOME": str(tmp_path / "home")})
    kept = await second.create(spec())
    await second.destroy(kept.sandbox_id)
    await second.aclose()
    assert not any(mark is not None and mark.alive() for mark in marks)
    assert list(trash.iterdir()) == []


def test_hostile_trees_are_removed_without_following_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    top = tmp_path / "top"
    (top / "closed").mkdir(parents=True)
    (top / "closed/file").write_text("x")
    (top / "link").symlink_to(outside)
    (top / "closed").chmod(0)
    fd = os.open(top, os.O_RDONLY)
    for _ in range(1500):  # deeper than the stack and than descriptors reach
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    remove_tree(top)
    assert not top.exists()
    assert (outside / "keep").exists()


async def test_a_file_goes_in_and_out_by_descriptor(
    provider: LocalProvider, sandbox: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    content = os.urandom(40 << 20)  # more than one step of the copy
    source.write_bytes(content)
    with source.open("rb") as file:
        assert await provider.write_from(sandbox, "/new/place/file", file.fileno(), mode=0o640) == len(
            content
        )
    assert (await provider.stat(sandbox, "/new/place/file")).mode == 0o640
    with target.open("wb") as file:
        assert await provider.read_into(sandbox, "/new/place/file", file.fileno()) == len(content)
    assert target.read_bytes() == content
    for path, error in (("/no/such", SandboxFileNotFoundError), ("/etc", SandboxIsADirectoryError)):
        with target.open("wb") as file, pytest.raises(error):
            await provider.read_into(sandbox, path, file.fileno())
    with source.open("rb") as file, pytest.raises(SandboxIsADirectoryError):
        await provider.write_from(sandbox, "/etc", file.fileno())
    assert [entry.name for entry in await provider.list_dir(sandbox, "/new/place")] == ["file"]


async def test_a_copy_that_is_cancelled_replaces_nothing(provider: LocalProvider, sandbox: str) -> None:
    await provider.write_file(sandbox, "/srv/place/file", chunks(b"before"))
    with open("/dev/zero", "rb") as file:  # there is no end to it
        copying = asyncio.ensure_future(provider.write_from(sandbox, "/srv/place/file", file.fileno()))
        await asyncio.sleep(0.05)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
    for _ in range(200):
        if [entry.name for entry in await provider.list_dir(sandbox, "/srv/place")] == ["file"]:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("what was copied so far is still there")
    assert await read(provider, sandbox, "/srv/place/file") == b"before"


async def test_commands_of_a_killed_owner_are_reaped_by_the_spawner_it_leaves(tmp_path: Path) -> None:
    """Not by the machine's init: a sandbox is dead only when the last zombie in it is reaped."""
    home = str(tmp_path / "home")
    program = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from local_sandbox import spec\n"
        "from lowtide.providers.base import ProcessSpec\n"
        "from lowtide.providers.local import LocalProvider\n"
        "async def main():\n"
        f"    provider = LocalProvider.connect({{'LOWTIDE_HOME': {home!r}}})\n"
        "    made = await provider.create(spec())\n"
        "    await provider.start_process(made.sandbox_id, ProcessSpec(argv=('sleep', '1000')))\n"
        "    print(made.sandbox_id, provider._prerequisites.client._pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    sandbox_id, spawner = (await owner.stdout.readline()).decode().split()
    pidfd = os.pidfd_open(int(spawner))
    try:
        owner.kill()
        await owner.wait()
        await asyncio.sleep(0.3)
        assert start_time(int(spawner)) is not None
        other = LocalProvider.connect({"LOWTIDE_HOME": home})
        assert await other.destroy(sandbox_id) is True
        await other.aclose()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert await asyncio.to_thread(poll.poll, 20_000), (
            "the spawner stays although nothing is left to reap"
        )
    finally:
        os.close(pidfd)


async def test_later_commands_are_what_the_first_one_is(provider: LocalProvider, sandbox: str) -> None:
    """From the second on they are started by a command starter: nothing about them may be different."""
    script = (
        "grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp|NSpid|Sig(Blk|Ign|Cgt)|Umask)' /proc/self/status; ulimit -a | grep -v locks; "
        "pwd; env | grep -v LOWTIDE | sort; ls -l /proc/self/fd | wc -l; cat /proc/self/oom_score_adj; readlink /proc/self/ns/*"
    )
    seen = [await shell(provider, sandbox, script) for _ in range(3)]
    cleaned = [re.sub(r"NSpid:.*", "", out) for _, out, _ in seen]
    assert cleaned[0] == cleaned[1] == cleaned[2]
    assert [code for code, _, _ in seen] == [0, 0, 0]
    for _ in range(2):
        code, out, _ = await shell(provider, sandbox, "cut -d' ' -f4-8 /proc/$$/stat; echo $LOWTIDE_PROCESS")
        parent, group, session, terminal, _ = out.split()[:5]
        assert (parent, terminal) == ("0", "0")
        assert group == session
    for argv, expected in ((("no-such",), 127), (("/etc/passwd",), 126), (("/root",), 126)):
        code, _, err = await run(provider, sandbox, *argv)
        assert code == expected
        assert argv[0] in err
    await provider.write_file(sandbox, "/opt/bad", chunks(b"#!/no/such/interpreter\n"), mode=0o755)
    assert (await run(provider, sandbox, "/opt/bad"))[0] in (126, 127)
    assert (await run(provider, sandbox, "true", cwd="/no/such/place"))[0] in (126, 127)


async def test_a_command_keeps_its_signals_when_nothing_else_happens(
    provider: LocalProvider, sandbox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enter, "_COMMAND_STARTER_SECONDS", 0.05)
    await run(provider, sandbox, "true")
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sleep", "1000")))
    await asyncio.sleep(0.5)
    await process.signal(signal.SIGTERM)
    assert await process.wait() == 143
    await asyncio.sleep(0.3)  # now nothing runs, and the command starter has left
    assert provider._entrance.known(sandbox).command_starter is None
    assert (await run(provider, sandbox, "echo", "on"))[1] == "on\n"


async def test_a_command_starter_leaves_with_its_sandbox(provider: LocalProvider, sandbox: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's sandboxes have none")
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sleep", "1000")))
    second = await provider.start_process(sandbox, ProcessSpec(argv=("sleep", "1000")))
    assert provider._entrance.known(sandbox).command_starter is not None
    assert provider._prerequisites.client is not None
    spawner = provider._prerequisites.client._pid

    def inside() -> list[int]:
        """Another command starter may wait there, for the next sandbox: it is still where the spawner is."""
        found, home = [], os.readlink(f"/proc/{spawner}/ns/mnt")
        for pid in ending._children(spawner):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/mnt") != home:
                    found.append(pid)
        return found

    for _ in range(200):
        if any(ending._children(pid) for pid in inside()):
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("there is no command starter at work")
    other = LocalProvider.connect(provider.credentials())
    try:
        assert await other.destroy(sandbox) is True  # by somebody who knows of no command starter
    finally:
        await other.aclose()
    for each in (process, second):
        with pytest.raises(SandboxGone):
            await each.wait()
    for _ in range(200):
        if not inside():
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the command starter is still there")


async def test_many_commands_at_once_all_come_to_their_end(provider: LocalProvider, sandbox: str) -> None:
    async def some(number: int) -> None:
        for turn in range(25):
            code, out, err = await shell(
                provider, sandbox, f"echo {number}-{turn}; echo x >&2; exit {turn % 7}"
            )
            assert (code, out, err) == (turn % 7, f"{number}-{turn}\n", "x\n")

    async with asyncio.timeout(240):
        await asyncio.gather(*(some(number) for number in range(16)))


async def test_nothing_runs_in_a_paused_sandbox(provider: LocalProvider, sandbox: str) -> None:
    script = "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; (:) & wait; done"
    process = await provider.start_process(sandbox, ProcessSpec(argv=("sh", "-c", script)))
    for _ in range(200):
        with contextlib.suppress(SandboxFileNotFoundError):
            await provider.stat(sandbox, "/tmp/count")
            break
        await asyncio.sleep(0.05)
    await provider.pause(sandbox)
    assert (await provider.get(sandbox)).state is SandboxState.PAUSED
    upper = provider.home / "sandboxes" / sandbox / "root/tmp/count"
    seen = upper.read_bytes()
    await asyncio.sleep(0.5)
    assert upper.read_bytes() == seen
    with pytest.raises(SandboxUnavailableError, match="paused"):
        await run(provider, sandbox, "true")
    await provider.resume(sandbox)
    assert (await provider.get(sandbox)).state is SandboxState.RUNNING
    for _ in range(200):
        if upper.read_bytes() not in (seen, b""):
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("it does not go on")
    await provider.pause(sandbox)
    assert await provider.destroy(sandbox) is True
    await process.aclose()
    with pytest.raises(SandboxGone):
        await provider.pause(sandbox)


async def test_a_command_that_is_just_starting_does_not_run_in_a_paused_sandbox(
    provider: LocalProvider, sandbox: str
) -> None:
    place = provider.home / "sandboxes" / sandbox / "root/tmp"

    def written() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in place.glob("of-*")}

    for turn in range(6):  # the first ones by the spawner, later ones by a command starter
        starts = [
            asyncio.ensure_future(
                provider.start_process(
                    sandbox,
                    ProcessSpec(argv=("sh", "-c", f"while :; do echo >> /tmp/of-{turn}-{number}; done")),
                )
            )
            for number in range(16)
        ]
        await asyncio.sleep(0.001 * turn)
        await provider.pause(sandbox)
        began = await asyncio.gather(*starts, return_exceptions=True)
        before = written()
        await asyncio.sleep(0.3)
        assert written() == before
        await provider.resume(sandbox)
        for process in began:
            if isinstance(process, BaseException):
                assert isinstance(process, SandboxUnavailableError)
            elif not process.exited:
                await process.terminate(0.0)
                with contextlib.suppress(SandboxUnavailableError):  # it was not let in
                    assert await process.wait() == 137
            if not isinstance(process, BaseException):
                await process.aclose()


CHAIN = """
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void) {
    int fd = open("/tmp/chain", O_RDWR | O_CREAT, 0644);
    if (fd < 0 || ftruncate(fd, 4096) != 0) return 1;
    volatile unsigned long *links = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    signal(SIGCHLD, SIG_IGN);
    if (fork() > 0) for (;;) pause();
    for (;;) { if (fork() > 0) _exit(0); ++*links; }
}
"""


async def test_a_chain_of_processes_that_each_fork_the_next_one_is_paused_and_ended(
    provider: LocalProvider, sandbox: str, tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "chain.c").write_text(CHAIN)
    command = [compiler, "-O1", "-o", str(tmp_path / "chain"), str(tmp_path / "chain.c")]
    subprocess.run(command, check=True, capture_output=True)
    await provider.write_file(sandbox, "/root/chain", chunks((tmp_path / "chain").read_bytes()), mode=0o755)

    async def links() -> int:
        with contextlib.suppress(SandboxFileNotFoundError):
            return int.from_bytes((await read(provider, sandbox, "/tmp/chain"))[:8], sys.byteorder)
        return 0

    async def stands_still() -> bool:
        before = await links()
        await asyncio.sleep(0.1)
        return await links() == before

    for _ in range(6):
        process = await provider.start_process(sandbox, ProcessSpec(argv=("/root/chain",)))
        while await stands_still():
            pass
        await provider.pause(sandbox)
        assert await stands_still()
        await provider.resume(sandbox)
        while await stands_still():
            pass
        await process.terminate(0.0)
        assert await stands_still()
        await process.aclose()


async def test_a_file_of_proc_that_takes_the_kernel_long_does_not_hold_up_others(
    provider: LocalProvider, sandbox: str
) -> None:
    script = """if True:
        import mmap, os, time
        fd = os.memfd_create("x")
        os.ftruncate(fd, 64 << 20)
        maps = [mmap.mmap(fd, 64 << 20, flags=mmap.MAP_SHARED | 0x8000) for _ in range(150)]  # populated
        os.symlink(f"/proc/{os.getpid()}/smaps_rollup", "/tmp/answer")
        time.sleep(1000)
    """
    process = await provider.start_process(sandbox, ProcessSpec(argv=("python3", "-c", script)))
    for _ in range(600):
        with contextlib.suppress(SandboxFileNotFoundError):
            await provider.stat(sandbox, "/tmp/answer")
            break
        await asyncio.sleep(0.05)
    loop, turns = asyncio.get_running_loop(), 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    others = asyncio.ensure_future(turn())
    await asyncio.sleep(0.01)
    chunks_read = provider.read_file(sandbox, "/tmp/answer")
    try:
        began, first = loop.time(), turns
        data = b"".join([chunk async for chunk in chunks_read])
    except SandboxFileError as error:
        pytest.skip(f"this kernel has no smaps_rollup: {error}")
    finally:
        others.cancel()
    assert b"Rss" in data
    if loop.time() - began < 0.05:
        pytest.skip("this kernel is too fast for the question")
    assert turns - first > 10
    await process.aclose()


async def test_pausing_does_not_wait_for_a_child_it_stopped_before_its_program_began(
    provider: LocalProvider, sandbox: str
) -> None:
    # The child waits for a writer of the pipe before its program begins, and its parent waits for that.
    script = (
        "import os; os.mkfifo('/tmp/pipe'); print('here', flush=True); os.posix_spawn('/bin/true', ['true'],"
        " {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, '/tmp/pipe', os.O_RDONLY, 0)]); os.wait(); print('on')"
    )
    process = await provider.start_process(sandbox, ProcessSpec(argv=(sys.executable, "-c", script)))
    output = process.output()
    assert await anext(output) == (1, b"here\n")
    await asyncio.sleep(0.5)
    await provider.pause(sandbox)
    await provider.resume(sandbox)
    await run(provider, sandbox, "sh", "-c", ": > /tmp/pipe")
    assert await anext(output) == (1, b"on\n")
    await process.aclose()


async def test_a_create_cut_off_after_its_directory_is_found_and_ended(
    provider: LocalProvider, tmp_path: Path
) -> None:
    asked = spec()
    (tmp_path / "home/local/sandboxes" / asked.lease_id).mkdir(parents=True)
    found = await provider.find(asked)
    assert found is not None
    assert await provider.destroy(found.sandbox_id)
    assert await provider.find(asked) is None


async def test_creates_that_come_while_the_spawner_starts_wait_for_its_answer(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has answered nobody knows where it sees the layers: a create would use the wrong paths."""
    ask = SpawnerClient._ask
    starting = asyncio.Event()

    async def slowly(client: SpawnerClient, message: dict[str, object], fds: list[int]) -> object:
        reply = await ask(client, message, fds)
        if message["op"] == "configure":
            starting.set()
            await asyncio.sleep(0.3)
        return reply

    monkeypatch.setattr(SpawnerClient, "_ask", slowly)
    first = asyncio.ensure_future(provider.create(spec()))
    await starting.wait()
    made = [await provider.create(spec()), await first]
    for info in made:
        # The id-mapped /usr: as the machine has it, it would belong to nobody.
        assert (await run(provider, info.sandbox_id, "test", "-O", "/usr/bin"))[0] == 0


async def test_the_end_of_input_waits_for_a_terminal_that_is_full(
    provider: LocalProvider, sandbox: str
) -> None:
    script = "while [ ! -e /tmp/go ]; do sleep 0.05; done; exec cat > /dev/null"
    process = await provider.start_process(
        sandbox, ProcessSpec(argv=("sh", "-c", script), tty=TerminalSize(columns=80, rows=24))
    )

    async def ends() -> int:
        async for _ in process.output():
            pass
        return await process.wait()

    ending = asyncio.create_task(ends())
    for _ in range(10):  # the kernel moves what it has taken, and then takes some more
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(process._stdin, b"\n")  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
    closing = asyncio.create_task(process.close_stdin())
    assert (await run(provider, sandbox, "touch", "/tmp/go"))[0] == 0
    async with asyncio.timeout(60):
        await closing
        assert await ending == 0
    await process.aclose()


async def test_what_is_mounted_in_a_directory_is_named_where_it_is_left_out(
    provider: LocalProvider, sandbox: str
) -> None:
    packed = b"".join([block async for block in provider.read_tree(sandbox, "/dev")])
    assert b"LOWTIDE.skipped=shm\n" in packed


async def test_a_directory_is_removed_by_its_own_name_only(provider: LocalProvider, sandbox: str) -> None:
    await provider.make_dir(sandbox, "/tmp/a/b")
    for path in ("/tmp/a/.", "/tmp/a/b/.."):
        with pytest.raises(SandboxFileError) as refused:
            await provider.remove(sandbox, path, recursive=True)
        assert refused.value.errno == errno.EINVAL
    assert (await provider.stat(sandbox, "/tmp/a/b")).kind is FileKind.DIRECTORY


async def test_hundreds_of_file_calls_at_once_all_succeed(provider: LocalProvider, sandbox: str) -> None:
    many = 900
    async with asyncio.timeout(120):
        await asyncio.gather(
            *(provider.write_file(sandbox, f"/tmp/{n}", chunks(b"%d" % n)) for n in range(many))
        )
        found = await asyncio.gather(*(read(provider, sandbox, f"/tmp/{n}") for n in range(many)))
    assert found == [b"%d" % n for n in range(many)]
    assert (await run(provider, sandbox, "echo", "on"))[1] == "on\n"


HOLD_DESCRIPTORS = """
import array, os, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
pairs, held = [], 0
try:
    while held < 3000:
        pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        for _ in range(5):
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))
            pairs[-1][0].sendmsg([b"x"], [rights])
            held += 200
except OSError:
    pass
print(held, flush=True)
sys.stdin.read()
"""


async def test_descriptors_that_one_sandbox_keeps_under_way_stop_no_other(
    provider: LocalProvider, sandbox: str
) -> None:
    hostile = (await provider.create(spec())).sandbox_id
    process = await provider.start_process(
        hostile, ProcessSpec(argv=("python3", "-c", HOLD_DESCRIPTORS), stdin=True)
    )
    try:
        async for _, data in process.output():
            assert int(data) >= 1000
            break
        async with asyncio.timeout(60):
            await provider.write_file(sandbox, "/tmp/it", chunks(b"here"))
            assert await read(provider, sandbox, "/tmp/it") == b"here"
            assert (await run(provider, sandbox, "echo", "on"))[1] == "on\n"
    finally:
        await process.terminate(0)
        await process.aclose()
