"""Commands through the program inside: streams, users, terminals, ends. The program itself runs here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.inside_program import PROGRAM, run, serving, wrapped_by

from lowtide.errors import ResourceExhaustedError, SandboxUnavailableError, ValidationError
from lowtide.providers.base import ProcessSpec, TerminalSize
from lowtide.providers.inside import InsideProcess

pytestmark = pytest.mark.timeout(120)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.mark.parametrize("text", [False, True], ids=["binary", "text"])
async def test_a_command_with_separate_streams_input_and_an_exit_code(text: bool) -> None:
    async with serving(text=text) as inside:
        client = inside.client()
        done = await run(client, "sh", "-c", "cat; echo no >&2; exit 3", input=bytes(range(256)) * 300)
        assert done == (3, bytes(range(256)) * 300, b"no\n")


async def test_arguments_and_variables_arrive_as_they_are() -> None:
    words = ["a\nb", "", " ", "'\"$(x)", "\udcff", "é"]
    environment = {"N": "XX", "S": "s", "M": "m", "UID": "1", "PPID": "2", "SHELLOPTS": "x", "OPTIND": "9"}
    async with serving() as inside:
        client = inside.client()
        _, out, _ = await run(client, "printf", "[%s]", *words, environment=environment)
        assert out == b"".join(b"[" + word.encode("utf-8", "surrogateescape") + b"]" for word in words)
        _, out, _ = await run(client, "env", environment=environment)
        said = dict(line.split("=", 1) for line in out.decode().splitlines())
        assert environment.items() <= said.items()
        assert not [name for name in said if name.startswith("LOWTIDE")]


@pytest.mark.parametrize(
    ("argv", "code"), [(("no-such-command",), 127), (("/etc/passwd",), 126), (("/no/such",), 127)]
)
async def test_what_cannot_be_started_counts_as_a_shell_counts_it(argv: tuple[str, ...], code: int) -> None:
    async with serving() as inside:
        said = await run(inside.client(), *argv)
        assert (said[0], bool(said[2])) == (code, True)


async def test_a_background_job_that_holds_the_streams_does_not_hold_up_the_end() -> None:
    async with serving() as inside:
        client = inside.client()
        code, out, _ = await run(client, "sh", "-c", "sleep 30 & echo $!")
        assert code == 0
        os.kill(int(out), signal.SIGKILL)


async def test_two_hundred_commands_at_once() -> None:
    async with serving() as inside:
        client = inside.client()
        done = await asyncio.gather(*(run(client, "sh", "-c", f"echo {n}; exit {n}") for n in range(200)))
        assert [(code, int(out)) for code, out, _ in done] == [(n, n) for n in range(200)]


async def test_the_end_of_input_waits_where_a_terminal_is_full() -> None:
    async with serving() as inside:
        client, script = inside.client(), "stty -echo; echo ready; sleep 0.5; exec cat >/dev/null"

        async def fill(size: int) -> int:
            process = await client.start(
                ProcessSpec(argv=("sh", "-c", script), tty=TerminalSize(columns=80, rows=24), stdin=True)
            )
            await anext(process.output())
            await process.write_stdin((b"x" * 63 + b"\n") * (size // 64))
            await process.close_stdin()
            return await process.wait()

        # A terminal is full at some multiple of 256 bytes, which depends on how it was filled.
        ended = await asyncio.gather(*(fill(256 * n) for n in range(40, 64)))
        assert set(ended) == {0}


async def test_a_terminal_has_its_size_is_resized_and_hears_ctrl_c() -> None:
    async with serving() as inside:
        script = "trap 'stty size' WINCH; trap 'echo int; exit 7' INT; stty size; while :; do sleep 0.1; done"
        process = await inside.client().start(
            ProcessSpec(argv=("sh", "-c", script), tty=TerminalSize(columns=91, rows=37))
        )
        output, said = process.output(), b""

        async def until(words: bytes) -> None:
            nonlocal said
            while words not in said:
                said += (await anext(output))[1]

        await until(b"37 91")
        await process.resize(TerminalSize(columns=120, rows=50))
        await until(b"50 120")
        await process.write_stdin(b"\x03")
        await until(b"int")
        assert await process.wait() == 7


@needs_root
@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("65534", "65534:"),
        ("nobody", "65534:65534"),
        ("1234:77", "1234:77"),
        ("daemon:mail", "1:8"),
        ("0", "0:0"),
    ],
)
async def test_a_command_as_another_user(user: str, ids: str) -> None:
    async with serving() as inside:
        code, out, _ = await run(inside.client(), "sh", "-c", "echo $(id -u):$(id -g)", user=user)
        assert code == 0
        assert out.decode().startswith(ids)


@pytest.mark.parametrize("user", ["nobody-here", "4294967295", "4294967296", "65534:4294967295"])
async def test_a_user_that_is_not_known_is_said_so(user: str) -> None:
    """A number that is no user's, too: the kernel takes it for "as before", which is root."""
    async with serving() as inside:
        with pytest.raises(ValidationError, match=f"no user {user}"):
            await run(inside.client(), "id", user=user)


async def test_a_signal_reaches_the_group_and_a_stop_is_followed_by_a_continue() -> None:
    async with serving() as inside:
        process = await inside.client().start(ProcessSpec(argv=("sleep", "60")))
        await process.signal(signal.SIGSTOP)
        await process.signal(signal.SIGCONT)
        await process.signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM


_HARD_TO_END = {
    "ignores-term": "trap '' TERM HUP INT; while :; do sleep 0.1; done",
    "other-sessions": "for i in 1 2 3; do setsid sh -c 'setsid sleep 600 & sleep 600' & done; wait",
    "double-forks": "(setsid sh -c 'sleep 600 & exit' &) ; sleep 600",
    "stops-everything": "sleep 600 & kill -STOP $! ; kill -STOP $PPID; kill -STOP $$",
    "kills-its-keeper": "setsid sleep 600 & sleep 0.2; kill -9 $PPID; sleep 600",
    "hops": "f() { sleep 0.01; f & exit; }; f & sleep 600",
}


@pytest.mark.parametrize("how", _HARD_TO_END)
async def test_the_end_of_a_whole_tree_is_confirmed(how: str, tmp_path: Path) -> None:
    mark = f"lowtide-test-{tmp_path.name}-{os.getpid()}"
    async with serving() as inside:
        process = await inside.client().start(
            ProcessSpec(argv=("sh", "-c", _HARD_TO_END[how]), environment={"MARK": mark})
        )
        await asyncio.sleep(0.5)
        await process.terminate(0.2)
        assert _marked(mark) == []
        assert await process.wait() in (137, 143, 129)


async def test_a_command_whose_keeper_was_killed_is_ended_and_says_so(tmp_path: Path) -> None:
    mark = f"lowtide-test-{tmp_path.name}-{os.getpid()}"
    async with serving() as inside:
        client = inside.client()
        other = await client.start(ProcessSpec(argv=("sleep", "60")))
        done = await run(
            client, "sh", "-c", "setsid sleep 600 & kill -9 $PPID; sleep 600", environment={"MARK": mark}
        )
        assert done[0] == 137
        for _ in range(100):
            if not _marked(mark):
                break
            await asyncio.sleep(0.05)
        assert _marked(mark) == []
        await other.signal(signal.SIGINT)
        assert await other.wait() == 130  # nobody else was touched


async def test_a_command_whose_keeper_was_stopped_is_heard_of() -> None:
    async with serving() as inside, asyncio.timeout(10):
        assert (await run(inside.client(), "sh", "-c", "kill -STOP $PPID; exit 3"))[0] == 3


async def test_a_terminal_that_nobody_had_open_is_read_on() -> None:
    async with serving() as inside, asyncio.timeout(10):
        script = "exec </dev/null >/dev/null 2>&1; sleep 0.3; echo who >/dev/tty; read x </dev/tty; exit $x"
        process = await inside.client().start(
            ProcessSpec(argv=("sh", "-c", script), tty=TerminalSize(columns=80, rows=24))
        )
        assert (await anext(process.output()))[1].startswith(b"who")
        await process.write_stdin(b"5\n")
        assert await process.wait() == 5


@pytest.mark.parametrize(("option", "most"), [("-S", 60), ("", 14)], ids=["soft", "hard"])
async def test_few_descriptors_are_no_reason_to_go_silent(option: str, most: int) -> None:
    async with serving() as inside, asyncio.timeout(30):
        inside.argv = ("sh", "-c", f'ulimit {option} -n 124; exec "$@"', "sh", *inside.argv)
        client = inside.client()
        running: list[InsideProcess] = []
        with contextlib.suppress(ResourceExhaustedError):
            while len(running) < 60:
                running.append(await client.start(ProcessSpec(argv=("sleep", "60"))))
        assert len(running) == most
        inside.channels[-1].close()  # there are some left for who comes again
        await asyncio.gather(*(process.terminate(0) for process in running))
        assert (await run(client, "sh", "-c", "ulimit -n"))[1] == b"124\n"


async def test_an_orphan_stays_with_its_command_until_it_ends() -> None:
    async with serving() as inside:
        client = inside.client()
        _, out, _ = await run(client, "sh", "-c", "setsid sleep 6 >/dev/null 2>&1 & echo $!")
        orphan = int(out)
        keeper = int(Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1])
        assert keeper not in (1, client.pid)
        for _ in range(300):
            if not Path(f"/proc/{keeper}").exists():
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the keeper stayed")


async def test_nothing_of_it_can_be_read_by_a_neighbour_of_the_same_user() -> None:
    async with serving() as inside:
        client = inside.client()
        script = "cat /proc/$PPID/environ; ls /proc/$PPID/fd/; cat /proc/$1/environ; ls /proc/$1/fd/"
        user = "65534" if os.geteuid() == 0 else None
        if user is not None:
            inside.argv = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *inside.argv)
        await run(client, "true")
        code, out, said = await run(client, "sh", "-c", script, "sh", str(client.pid))
        assert (code != 0, out) == (True, b"")
        assert said.count(b"denied") == 4


async def test_a_channel_with_a_wrong_key_is_refused() -> None:
    async with serving() as inside:
        await run(inside.client(), "true")
        with pytest.raises(SandboxUnavailableError, match="key"):
            await run(inside.client(key=b"x" * 16), "true")
        assert (await run(inside.clients[0], "echo", "still"))[1] == b"still\n"


_FULL_PIPE = """
import array, fcntl, os, socket, struct, sys, time
link = socket.socket(socket.AF_UNIX)
link.connect("\\0lowtide-" + sys.argv[1])
(theirs, ours), (kept, full) = os.pipe(), os.pipe()
fcntl.fcntl(full, fcntl.F_SETFL, os.O_NONBLOCK)
for size in (4096, 1):
    try:
        while os.write(full, b"x" * size): pass
    except BlockingIOError: pass
link.sendmsg([b"b" + bytes(4)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs, full]))])
if os.getuid():
    time.sleep(0.2)
    fcntl.fcntl(full, fcntl.F_SETFL, 0)
os.write(ours, struct.pack("<LQQ8s16sQBQ", 57, 0, 0, b"LOWTIDE1", b"no" * 8, 1, 0, 0))
print("said", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("user", [None, pytest.param(65534, marks=needs_root)])
async def test_a_neighbour_who_does_not_read_keeps_nobody_waiting(user: int | None) -> None:
    """Its pipe is full when its wrong key is to be refused; another user's is one that waits, whatever was set."""
    async with serving() as inside, asyncio.timeout(20):
        client = inside.client()
        await run(client, "true")
        words = ("/usr/bin/python3", "-c", _FULL_PIPE, inside.name)
        neighbour = await asyncio.create_subprocess_exec(
            *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, user=user
        )
        assert neighbour.stdout is not None
        await neighbour.stdout.readline()  # what it said, or nothing: it was not let in
        await asyncio.sleep(0.2)
        try:
            assert (await run(client, "echo", "still"))[1] == b"still\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                neighbour.kill()
            await neighbour.wait()


async def test_only_a_main_process_keeps_the_leases_clock() -> None:
    async with serving() as inside:
        assert await inside.client().renew(60) == 0


@pytest.mark.parametrize("way", ["gvisor", "aarch64"])
async def test_it_runs_elsewhere_too(way: str, tmp_path: Path) -> None:
    argv = wrapped_by().get(way)
    if argv is None:
        pytest.skip(f"scripts/engines up tools: what runs it on {way} is not installed")
    async with serving(argv=_argv(way, argv)) as inside:
        client = inside.client()
        if way == "gvisor":
            inside.environment = dict(os.environ)
        data = bytes(range(256)) * 2000
        assert await run(client, "sh", "-c", "cat; exit 5", input=data) == (5, data, b"")
        process = await client.start(
            ProcessSpec(argv=("sh", "-c", "trap '' TERM; echo; sleep 60 & sleep 60"))
        )
        assert await anext(process.output()) == (1, b"\n")
        await process.terminate(0.1)
        assert await process.wait() == 137


def _argv(way: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    return (*argv, str(PROGRAM if way == "gvisor" else PROGRAM.with_name("inside.aarch64")))


def _marked(mark: str) -> list[str]:
    """The processes that have it in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found
