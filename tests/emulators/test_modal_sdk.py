"""The Modal emulator as the unmodified SDK and its own gRPC stubs see it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator

modal = pytest.importorskip("modal")
grpc = pytest.importorskip("grpc")
from modal_proto import api_pb2 as pb  # noqa: E402

Create = Callable[..., Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("modal", home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle
        left = handle.state()["sandboxes"]["modal"]
        assert not left, f"tests left sandboxes behind: {left}"


@pytest.fixture(scope="module")
def client(service: Handle) -> Iterator[Any]:
    found = service.environment
    key = (found["MODAL_TOKEN_ID"], found["MODAL_TOKEN_SECRET"])
    with modal.Client(found["MODAL_SERVER_URL"], pb.CLIENT_TYPE_CLIENT, key) as opened:
        yield opened


@pytest.fixture(scope="module")
def app(client: Any) -> Any:
    return modal.App.lookup("tests", create_if_missing=True, client=client)


@pytest.fixture(params=["second form", "first form"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MODAL_SANDBOX_V2", "1" if request.param == "second form" else "0")
    return str(request.param)


@pytest.fixture
def create(service: Handle, client: Any, app: Any) -> Iterator[Create]:
    made: list[Any] = []

    def make(*words: str, **options: Any) -> Any:
        made.append(modal.Sandbox.create(*words, app=app, client=client, **options))
        return made[-1]

    yield make
    service.faults.clear()
    for sandbox in made:
        with contextlib.suppress(modal.exception.SandboxTimeoutError):  # it had ended by itself
            sandbox.terminate(wait=True)


def run(sandbox: Any, *words: str, **options: Any) -> tuple[int, str, str]:
    process = sandbox.exec(*words, **options)
    return process.wait(), process.stdout.read(), process.stderr.read()


@pytest.mark.newcomer
def test_a_sandbox_lives_runs_commands_moves_files_and_ends(
    service: Handle, create: Create, tmp_path: Path, form: str
) -> None:
    sandbox = create(tags={"mine": "yes"}, env={"COLOUR": "blue"}, workdir="/srv")
    assert (len(sandbox.object_id) == 25) is (form == "first form")
    script = "echo out; echo err >&2; echo $COLOUR $MORE; pwd; exit 3"
    done = run(sandbox, "sh", "-c", script, secrets=[modal.Secret.from_dict({"MORE": "red"})])
    assert done == (3, "out\nblue red\n/srv\n", "err\n")
    data = bytes(range(256)) * 5000
    files = sandbox.filesystem
    files.write_bytes(data, "/tmp/deep/b.bin")
    assert files.read_bytes("/tmp/deep/b.bin") == data
    files.copy_to_local("/tmp/deep/b.bin", tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == data
    reader = sandbox.exec("cat", text=False)
    reader.stdin.write(b"hel")
    reader.stdin.drain()
    reader.stdin.write(b"lo")
    reader.stdin.write_eof()
    reader.stdin.drain()
    assert (reader.stdout.read(), reader.wait()) == (b"hello", 0)
    assert [one["tags"] for one in service.state()["sandboxes"]["modal"]] == [{"mine": "yes"}]
    assert sandbox.poll() is None
    assert sandbox.terminate(wait=True) == 137
    assert service.state()["sandboxes"]["modal"] == []
    with pytest.raises(modal.exception.NotFoundError):
        sandbox.exec("true")


def test_output_streams_as_it_comes_and_terminals_are_terminals(create: Create) -> None:
    sandbox = create()
    process = sandbox.exec("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done", bufsize=1)
    assert list(process.stdout) == ["1\n", "2\n", "3\n"]
    code, printed, _ = run(sandbox, "sh", "-c", "test -t 0 && stty size; kill -9 $$", pty=True)
    assert (code, printed.split()) == (137, ["24", "80"])
    big = run(sandbox, "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x")
    assert (big[0], len(big[1])) == (0, 3_000_000)
    assert run(sandbox, "no-such-program")[0] == 127


def test_a_commands_time_is_up(service: Handle, create: Create) -> None:
    sandbox = create()
    process = sandbox.exec("sleep", "600", timeout=1)
    assert process.wait() == -1
    until = time.monotonic() + 60
    while run(sandbox, "pgrep", "-f", "sleep 600")[0] == 0:
        assert time.monotonic() < until


def test_files_say_what_is_wrong_with_them(create: Create) -> None:
    files, errors = create().filesystem, modal.exception
    files.make_directory("/tmp/a/b")
    files.write_text("x", "/tmp/a/file")
    assert [(one.name, one.type.value, one.size) for one in files.list_files("/tmp/a")][1] == (
        "file",
        "file",
        1,
    )
    assert files.stat("/tmp/a/b").permissions.startswith("rwx")
    cases = [
        (errors.SandboxFilesystemNotFoundError, lambda: files.read_text("/tmp/none")),
        (errors.SandboxFilesystemIsADirectoryError, lambda: files.read_text("/tmp/a")),
        (errors.SandboxFilesystemIsADirectoryError, lambda: files.write_text("x", "/tmp/a")),
        (errors.SandboxFilesystemNotADirectoryError, lambda: files.write_text("x", "/tmp/a/file/c")),
        (errors.SandboxFilesystemNotADirectoryError, lambda: files.list_files("/tmp/a/file")),
        (errors.SandboxFilesystemDirectoryNotEmptyError, lambda: files.remove("/tmp/a")),
        (errors.SandboxFilesystemPathAlreadyExistsError, lambda: files.make_directory("/tmp/a/file")),
        (errors.SandboxFilesystemNotFoundError, lambda: files.stat("/tmp/none")),
    ]
    for kind, broken in cases:
        with pytest.raises(kind):
            broken()
    files.remove("/tmp/a", recursive=True)
    with pytest.raises(errors.SandboxFilesystemNotFoundError):
        files.list_files("/tmp/a")


def test_a_watch_tells_what_happens_below(create: Create) -> None:
    sandbox = create()
    sandbox.filesystem.make_directory("/tmp/w")
    writer = sandbox.exec("sh", "-c", "while :; do echo x > /tmp/w/f; rm /tmp/w/f; sleep 0.05; done")
    kinds = [modal.types.FileWatchEventType.Create]
    for event in sandbox.filesystem.watch("/tmp/w", filter=kinds, timeout=60):
        assert (event.type, event.paths) == (kinds[0], ["/tmp/w/f"])
        break
    assert writer.poll() is None


def test_names_are_taken_until_the_end_and_lists_match_every_tag(
    create: Create, client: Any, app: Any
) -> None:
    name = f"n-{uuid.uuid4().hex}"
    first = create(name=name, tags={"group": name, "n": "1"})
    with pytest.raises(modal.exception.AlreadyExistsError):
        create(name=name)
    second = create(tags={"group": name, "n": "2"})

    def listed(**tags: str) -> set[str]:
        found = modal.Sandbox.list(app_id=app.app_id, tags={"group": name, **tags}, client=client)
        return {one.object_id for one in found}

    assert modal.Sandbox.from_name("tests", name, client=client).object_id == first.object_id
    assert listed() == {first.object_id, second.object_id}
    assert listed(n="2") == {second.object_id}
    second.set_tags({"group": name, "n": "3"})
    assert (listed(n="2"), second.get_tags()) == (set(), {"group": name, "n": "3"})
    first.terminate(wait=True)
    assert listed() == {second.object_id}
    with pytest.raises(modal.exception.NotFoundError):
        modal.Sandbox.from_name("tests", name, client=client)
    create(name=name)


def test_found_by_id_it_is_the_same_sandbox(create: Create, client: Any) -> None:
    made = create("sh", "-c", "read line; echo got $line; exit 4")
    found = modal.Sandbox.from_id(made.object_id, client=client)
    found.stdin.write("this\n")
    found.stdin.drain()
    assert (found.wait(), found.returncode) == (None, 4)
    assert made.stdout.read() == "got this\n"
    with pytest.raises(modal.exception.NotFoundError):
        modal.Sandbox.from_id("sb-" + "x" * 26, client=client)


def test_lifetime_and_idle_time_run_out_on_the_emulators_clock(service: Handle, create: Create) -> None:
    short, idle, busy = create(timeout=100), create(timeout=900, idle_timeout=50), create(idle_timeout=50)
    process = busy.exec("cat")
    for one in (short, idle):
        assert run(one, "true")[0] == 0
    service.clock.advance(60)
    assert (short.poll(), idle.poll(), busy.poll()) == (None, 124, None)
    service.clock.advance(60)
    with pytest.raises(modal.exception.SandboxTimeoutError):
        short.wait()
    assert short.returncode == 124
    process.stdin.write_eof()
    process.stdin.drain()
    process.wait()
    service.clock.advance(51)
    assert busy.poll() == 124


def test_snapshots_are_images_and_images_are_recipes(create: Create, client: Any, app: Any) -> None:
    source = create()
    source.filesystem.write_text("kept", "/root/file")
    taken = source.snapshot_filesystem()
    assert run(create(image=taken), "cat", "/root/file") == (0, "kept", "")
    image = (
        modal.Image.from_registry("python:3.11").env({"SHADE": "dark"}).run_commands("echo $SHADE > /made")
    )
    assert run(create(image=image), "sh", "-c", "cat /made; echo $SHADE") == (0, "dark\ndark\n", "")
    with pytest.raises(modal.exception.Error, match="exit code 3"):
        create(image=modal.Image.debian_slim().run_commands("exit 3"))


def test_tunnels_lead_to_declared_ports(service: Handle, create: Create) -> None:
    sandbox = create(
        "python", "-m", "http.server", "8000", encrypted_ports=[8000], unencrypted_ports=[8001],
        readiness_probe=modal.Probe.with_tcp(8000),
    )  # fmt: skip
    sandbox.wait_until_ready(timeout=60)
    tunnels = sandbox.tunnels()
    trust = ssl.create_default_context(cafile=service.environment["SSL_CERT_FILE"])
    with urllib.request.urlopen(tunnels[8000].url, context=trust, timeout=30) as answer:
        assert answer.status == 200
    sandbox.exec("python", "-m", "http.server", "8001")
    plain, until = "http://{}:{}".format(*tunnels[8001].tcp_socket), time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(plain, timeout=30) as answer:
            assert answer.status == 200
            break
        assert time.monotonic() < until
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(tunnels[8000].url, timeout=30)  # nobody trusts it who was not told to


def test_readiness_is_refused_without_a_probe_and_times_out_with_one(create: Create) -> None:
    with pytest.raises(modal.exception.ConflictError):
        create().wait_until_ready(timeout=5)
    never = create(readiness_probe=modal.Probe.with_exec("false"))
    with pytest.raises(modal.exception.TimeoutError):
        never.wait_until_ready(timeout=1)


def test_named_secrets_are_kept_and_must_exist(create: Create, client: Any) -> None:
    with pytest.raises(modal.exception.NotFoundError):
        create(secrets=[modal.Secret.from_name("none")])
    modal.Secret.objects.create("held", {"WORD": "hidden"}, client=client)
    assert run(create(secrets=[modal.Secret.from_name("held")]), "printenv", "WORD")[1] == "hidden\n"


def test_inside_asyncio_it_works_as_well(service: Handle, client: Any, app: Any) -> None:
    async def main() -> tuple[Any, ...]:
        sandbox = await modal.Sandbox.create.aio(app=app, client=client)
        process = await sandbox.exec.aio("echo", "hello")
        found = [line async for line in process.stdout]
        return found, await process.wait.aio(), await sandbox.terminate.aio(wait=True)

    assert asyncio.run(main()) == (["hello\n"], 0, 137)


# ---------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_a_create_whose_answer_is_lost_is_made_once(
    service: Handle, create: Create, client: Any, fault: str
) -> None:
    """The SDK sends it again with the same key."""
    name = f"lost-{uuid.uuid4().hex}"
    armed = service.faults.add(fault, match={"name": name})
    made = create(name=name)
    assert service.faults.hits(armed) == 1
    assert [one["sandbox_id"] for one in service.state()["sandboxes"]["modal"]] == [made.object_id]


def test_faults_do_what_they_say(service: Handle, create: Create, client: Any, app: Any) -> None:
    made = create(tags={"faulty": "1"})
    run(made, "true")
    service.faults.add("kill-fails")
    with pytest.raises(modal.exception.ConflictError):
        made.terminate()
    service.faults.add("kill-ignored")
    made.terminate()
    assert made.poll() is None
    service.faults.add("stale-token", match={"operation": "sandbox-wait"})
    with pytest.raises(modal.exception.AuthError):
        made.poll()
    limited = service.faults.add("rate-limit", seconds=0.2, match={"operation": "sandbox-wait"})
    assert (made.poll(), service.faults.hits(limited)) == (None, 1)  # it waits as long as it is told
    service.faults.add("create-fails")
    with pytest.raises(modal.exception.ConflictError):
        create()
    service.faults.add("create-error-state")
    broken = create()
    broken.wait()
    assert broken.returncode == 1
    service.faults.add("list-lags", seconds=60)
    assert not list(modal.Sandbox.list(app_id=app.app_id, tags={"faulty": "1"}, client=client))
    service.faults.add("exec-dropped", seconds=0.1)
    assert run(made, "sh", "-c", "echo 1; sleep 0.5; echo 2") == (0, "1\n2\n", "")
    service.faults.add("gone-mid-command", seconds=0.2)
    with pytest.raises(modal.exception.NotFoundError):
        run(made, "sleep", "60")


def test_what_is_not_there_is_refused_by_name(create: Create, client: Any) -> None:
    with pytest.raises(modal.exception.Error, match="not implemented"):
        create(gpu="A10G")
    with pytest.raises(modal.exception.Error, match="not implemented"):
        create(volumes={"/v": modal.Volume.from_name("v", create_if_missing=True)})
