"""E2B through its real SDK against the emulator: what the conformance suite does not ask."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.e2b_emulator import needs_emulator, serving

from lowtide import Sandbox
from lowtide.engine import engine
from lowtide.errors import (
    AuthenticationError,
    SandboxGone,
    SandboxNotFoundError,
    SandboxUnavailableError,
    UnsupportedError,
    ValidationError,
)
from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers import registry
from lowtide.providers.base import Labels, ProcessSpec, SandboxSpec, SandboxState
from lowtide.providers.e2b import E2BOptions, E2BProvider

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def emulator() -> Iterator[Any]:
    yield from serving()


@pytest.fixture
def provider(emulator: Any) -> Iterator[E2BProvider]:
    emulator.faults.clear()
    connected = E2BProvider.connect(os.environ)
    yield connected
    engine().run(connected.aclose(), SECONDS)


@pytest.fixture
def make(emulator: Any) -> Iterator[Callable[..., Sandbox]]:
    made: list[Sandbox] = []

    def make(**keywords: Any) -> Sandbox:
        made.append(Sandbox.run(provider="e2b", **keywords))
        return made[-1]

    yield make
    for box in made:
        box.stop(graceful_shutdown_seconds=0.0).result(SECONDS)


def spec(**keywords: Any) -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="ledger", owner="owner")
    return SandboxSpec(labels=labels, lifetime_seconds=300.0, **keywords)


def ends_at(emulator: Any, sandbox_id: str | None) -> float:
    return next(
        float(one["end_at"])
        for one in emulator.state()["sandboxes"]["e2b"]
        if one["sandbox_id"] == sandbox_id
    )


# Connecting


def test_naming_the_provider_imports_no_sdk() -> None:
    program = (
        "import sys; from lowtide.providers.registry import provider_class; provider_class('e2b')\n"
        "from lowtide.providers.e2b import E2BProvider; E2BProvider.connect({'E2B_API_KEY': 'e2b_x'})\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('e2b', 'httpx', 'pyqwest')])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_without_a_key_it_says_what_to_set() -> None:
    with pytest.raises(AuthenticationError, match="E2B_API_KEY"):
        E2BProvider.connect({})


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="regoin") as caught:
        E2BProvider.connect({"E2B_API_KEY": "x"}, {"regoin": "eu"})
    assert caught.value.argument == "regoin"


def test_arguments_win_over_the_environment_and_reach_another_process() -> None:
    environ = {"E2B_API_KEY": "one", "E2B_DOMAIN": "a.example", "SSL_CERT_FILE": "/ca", "UNRELATED": "x"}
    first = E2BProvider.connect(environ, {"api_key": "two", "api_url": "http://127.0.0.1:1", "template": "t"})
    known = first.credentials()
    assert known["E2B_API_KEY"] == "two"
    assert known["SSL_CERT_FILE"] == "/ca"
    assert "UNRELATED" not in known
    again = E2BProvider.connect(known)
    assert again.account == first.account
    assert again.credentials() == known
    assert "two" not in first.account
    assert E2BProvider.connect(environ).account != first.account


def test_debug_mode_of_the_sdk_is_not_taken_over(
    provider: E2BProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_DEBUG", "true")  # with it the SDK pretends to create and to kill
    made = engine().run(provider.create(spec()), SECONDS)
    assert made.sandbox_id != "debug_sandbox_id"
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is True


def test_a_wrong_key_is_an_authentication_error(emulator: Any) -> None:
    wrong = E2BProvider.connect(os.environ, {"api_key": "e2b_" + "0" * 40})
    with pytest.raises(AuthenticationError, match="E2B_API_KEY"):
        engine().run(wrong.get("iabcdefghijklmnop"), SECONDS)
    engine().run(wrong.aclose(), SECONDS)


def test_no_service_is_unavailable_and_may_be_tried_again(emulator: Any) -> None:
    nowhere = E2BProvider.connect(os.environ, {"api_url": "http://127.0.0.1:9"})
    with pytest.raises(SandboxUnavailableError) as caught:
        engine().run(nowhere.get("iabcdefghijklmnop"), SECONDS)
    assert caught.value.retryable
    assert caught.value.__cause__ is not None
    engine().run(nowhere.aclose(), SECONDS)


def test_after_aclose_no_socket_is_left(emulator: Any) -> None:
    """In a process of its own, which has nothing else open."""
    program = """if True:
        import asyncio, json, os
        from lowtide.lifecycle.lease import new_lease_id
        from lowtide.providers.base import Labels, ProcessSpec, SandboxSpec
        from lowtide.providers.e2b import E2BProvider

        def sockets():
            links = []
            for name in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{name}"))
                except OSError:
                    pass
            table = open("/proc/self/net/tcp").read() + open("/proc/self/net/tcp6").read()
            return sum(link.startswith("socket:[") and f" {link[8:-1]} " in table for link in links)

        async def once():
            provider = E2BProvider.connect(os.environ)
            async def life():
                labels = Labels(lease_id=new_lease_id(), ledger_id="l", owner="o")
                info = await provider.create(SandboxSpec(labels=labels, lifetime_seconds=60))
                handle = await provider.start_process(info.sandbox_id, ProcessSpec(argv=("cat",), stdin=True))
                await handle.write_stdin(b"x")
                await handle.close_stdin()
                async for _ in handle.output():
                    pass
                await handle.wait()
                await handle.aclose()
                async def chunks():
                    yield b"x" * 1_000_000
                await provider.write_file(info.sandbox_id, "/tmp/f", chunks())
                async for _ in provider.read_file(info.sandbox_id, "/tmp/f"):
                    pass
                await provider.destroy(info.sandbox_id)
            await asyncio.gather(*(life() for _ in range(8)))
            during = sockets()
            await provider.aclose()
            for _ in range(100):
                if not sockets():
                    break
                await asyncio.sleep(0.05)
            return during, sockets()

        print(json.dumps(asyncio.run(once())))
    """
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    during, after = json.loads(ran.stdout)
    assert during > 0
    assert after == 0


# Lifetimes


def test_looking_and_using_changes_no_lifetime(emulator: Any, make: Callable[..., Sandbox]) -> None:
    made = make()
    before = ends_at(emulator, made.sandbox_id)
    other = E2BProvider.connect(os.environ, {"template": "base"})  # knows nothing of it yet
    info = engine().run(other.get(str(made.sandbox_id)), SECONDS)
    assert info.state is SandboxState.RUNNING
    attached = Sandbox.from_id(str(made.sandbox_id), provider=other).result(SECONDS)
    assert attached.exec(["echo", "there"]).result(SECONDS).stdout == "there\n"
    attached.write_file("/tmp/x", b"x").result(SECONDS)
    attached.url(8000).result(SECONDS)
    assert ends_at(emulator, made.sandbox_id) == before
    engine().run(other.aclose(), SECONDS)


def test_attaching_to_what_does_not_exist_is_an_error_and_creates_nothing(emulator: Any) -> None:
    before = len(emulator.state()["sandboxes"]["e2b"])
    for wrong in ("iabcdefghijklmnop", "../sandboxes", "a/b"):
        with pytest.raises(SandboxNotFoundError):
            Sandbox.from_id(wrong, provider="e2b").result(SECONDS)
    assert len(emulator.state()["sandboxes"]["e2b"]) == before


def test_renewing_moves_the_end(emulator: Any, provider: E2BProvider) -> None:
    made = engine().run(provider.create(spec()), SECONDS)
    until = engine().run(provider.renew(made.sandbox_id, 1800.0), SECONDS)
    assert until is not None
    assert abs(ends_at(emulator, made.sandbox_id) - until.timestamp()) < 30
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is True
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is False
    with pytest.raises(SandboxNotFoundError):
        engine().run(provider.renew(made.sandbox_id, 60.0), SECONDS)


def test_a_paused_one_is_listed_can_be_renewed_and_ends(provider: E2BProvider) -> None:
    asked = spec()
    made = engine().run(provider.create(asked), SECONDS)
    engine().run(provider.pause(made.sandbox_id), SECONDS)
    engine().run(provider.pause(made.sandbox_id), SECONDS)  # already is: no error
    found = engine().run(provider.find(asked), SECONDS)
    assert found is not None
    assert found.state is SandboxState.PAUSED
    assert engine().run(provider.renew(made.sandbox_id, 60.0), SECONDS) is None
    assert engine().run(provider.destroy(made.sandbox_id), SECONDS) is True
    assert engine().run(provider.find(asked), SECONDS) is None


def test_a_command_in_a_paused_one_says_so(make: Callable[..., Sandbox]) -> None:
    box = make()
    box.pause().result(SECONDS)
    with pytest.raises(SandboxUnavailableError, match="paused"):
        box.exec(["true"]).result(SECONDS)
    box.resume().result(SECONDS)
    assert box.exec(["true"]).result(SECONDS).returncode == 0


# What goes into a create


def test_options_reach_the_service(emulator: Any, make: Callable[..., Sandbox]) -> None:
    box = make(
        provider_options={"metadata": {"team": "blue"}, "on_timeout": "pause"},
        tags=["options"],
        environment_variables={"WORD": "x y"},
        working_dir="/tmp/made/here",
    )
    known = next(one for one in emulator.state()["sandboxes"]["e2b"] if one["sandbox_id"] == box.sandbox_id)
    assert known["metadata"]["team"] == "blue"
    assert known["metadata"]["lowtide-lease"] == box.lease_id
    assert known["metadata"]["lowtide-tag-options"] == "1"
    script = 'pwd; printf %s "$WORD"'
    assert box.exec(["sh", "-c", script]).result(SECONDS).stdout == "/tmp/made/here\nx y"
    found = Sandbox.from_id(str(box.sandbox_id), provider="e2b").result(SECONDS)
    assert found.exec(["pwd"]).result(SECONDS).stdout == "/tmp/made/here\n"


def test_commands_run_as_the_templates_user_and_as_another(make: Callable[..., Sandbox]) -> None:
    box = make()
    assert box.exec(["sh", "-c", "id -un; pwd"]).result(SECONDS).stdout == "user\n/home/user\n"
    assert box.exec(["id", "-un"], user="root").result(SECONDS).stdout == "root\n"


@pytest.mark.parametrize(
    "options",
    [E2BOptions(metadata={"lowtide-lease": "x"}), E2BOptions(auto_resume=True)],
    ids=["lowtide's own metadata", "resume without pause"],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    emulator: Any, provider: E2BProvider, options: E2BOptions
) -> None:
    before = len(emulator.calls("create"))
    with pytest.raises(ValidationError):
        engine().run(provider.create(spec(options=options)), SECONDS)
    assert len(emulator.calls("create")) == before


def test_images_and_limits_are_refused_with_an_alternative() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Sandbox(provider="e2b", container_image="python:3.12")
    assert caught.value.feature == "image"
    assert caught.value.alternative


def test_twice_the_same_lease_makes_one(provider: E2BProvider, emulator: Any) -> None:
    asked = spec()
    first = engine().run(provider.create(asked), SECONDS)
    second = engine().run(provider.create(asked), SECONDS)
    assert first.sandbox_id == second.sandbox_id
    engine().run(provider.destroy(first.sandbox_id), SECONDS)


# Commands


def test_bytes_that_are_no_text_pass_unchanged(make: Callable[..., Sandbox]) -> None:
    box = make()
    raw = bytes(range(256)) * 40
    result = box.exec(["cat"], stdin=raw).result(SECONDS)
    assert result.stdout_bytes == raw


def test_input_that_a_command_ends_on_has_arrived(emulator: Any, make: Callable[..., Sandbox]) -> None:
    sandbox_id = str(make().sandbox_id)
    address = urllib.parse.urlsplit(emulator.urls["e2b"])

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """On the way to the emulator: answers to input come later than the end of the command."""
        there, back = await asyncio.open_connection(address.hostname, address.port)
        waits = False

        async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, ours: bool) -> None:
            nonlocal waits
            while data := await source.read(65_536):
                waits = b"/SendInput " in data if ours else waits
                await asyncio.sleep(0.2 if waits and not ours else 0)
                target.write(data)
            target.close()

        await asyncio.gather(pass_on(reader, back, True), pass_on(there, writer, False))

    async def feed() -> int:
        async with await asyncio.start_server(late, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            provider = E2BProvider.connect(os.environ, {"sandbox_url": f"http://127.0.0.1:{port}"})
            command = ProcessSpec(argv=("head", "-c", "1"), stdin=True)
            handle = await provider.start_process(sandbox_id, command)
            # A BrokenPipeError here would say that the last piece of a directory was not taken.
            await handle.write_stdin(b"x")
            code = await handle.wait()
            await handle.aclose()
            await provider.aclose()
            return code

    assert engine().run(feed(), SECONDS) == 0


def test_a_timeout_ends_children_that_left_the_group(make: Callable[..., Sandbox]) -> None:
    box = make()
    script = "setsid sleep 98765 & (setsid sleep 98765 &) ; sleep 98765"
    with pytest.raises(TimeoutError):
        box.exec(["bash", "-c", script], timeout_seconds=3.0).result(SECONDS)
    left = box.exec(["bash", "-c", "pgrep -c -x sleep || true"]).result(SECONDS).stdout.strip()
    assert left == "0"


def test_a_command_with_a_background_job_ends_at_once(make: Callable[..., Sandbox]) -> None:
    box = make()
    began = time.monotonic()
    result = box.exec(["sh", "-c", "sleep 200 & echo done; exit 4"]).result(SECONDS)
    assert (result.stdout, result.returncode) == ("done\n", 4)
    assert time.monotonic() - began < 100


def test_the_end_of_the_sandbox_ends_its_commands(make: Callable[..., Sandbox]) -> None:
    box = make()
    running = box.exec(["sleep", "1000"])
    time.sleep(1)
    Sandbox.delete(str(box.sandbox_id), provider="e2b").result(SECONDS)
    with pytest.raises(SandboxGone):
        running.result(SECONDS)
    with pytest.raises(SandboxGone):
        box.exec(["true"]).result(SECONDS)
    with pytest.raises(SandboxGone):
        box.read_file("/etc/passwd").result(SECONDS)


_LOOK = """
seen=0; read=0
for p in /proc/[0-9]*; do
  [ $p != /proc/$$ ] || continue
  case $(tr '\\0' ' ' <$p/cmdline) in *inside*' serve '*|*.lowtide-*' serve '*) ;; *) continue;; esac
  seen=$((seen+1))
  for f in environ maps mem auxv; do head -c 1 $p/$f >/dev/null 2>&1 && read=$((read+1)); done
  ls $p/fd >/dev/null 2>&1 && read=$((read+1))
done
while ls -A /tmp | grep -q lowtide; do sleep 0.05; done # it goes while the command runs
echo $((seen > 1)) $read
"""


def test_no_command_can_look_into_the_program_or_finds_its_key(make: Callable[..., Sandbox]) -> None:
    """The way in of the one who made it, and the way in of somebody who comes later, to what may be hostile by then."""
    box = make()
    later = E2BProvider.connect(os.environ, {"template": "base"})
    other = Sandbox.from_id(str(box.sandbox_id), provider=later).result(SECONDS)
    for one, provider in ((box, registry.provider("e2b")), (other, later)):
        assert one.exec(["bash", "-c", _LOOK]).result(SECONDS).stdout == "1 0\n"
        assert isinstance(provider, E2BProvider)
        key = provider._servers[str(box.sandbox_id), None].key
        said = one.exec(["bash", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null || true"])
        shown = said.result(SECONDS).stdout_bytes
        assert b"LOWTIDE_FIRST=" not in shown
        assert not any(form in shown for form in (key, key.hex().encode(), base64.b64encode(key)[:20]))
    engine().run(later.aclose(), SECONDS)


def test_a_sandbox_whose_disk_takes_nothing_can_still_be_entered(make: Callable[..., Sandbox]) -> None:
    box = make(provider_options={"user": "root"})
    box.exec(["chmod", "0555", "/tmp"]).result(SECONDS)
    later = E2BProvider.connect(os.environ, {"template": "base"})
    other = Sandbox.from_id(str(box.sandbox_id), provider=later).result(SECONDS)
    assert other.exec(["echo", "in"]).result(SECONDS).stdout == "in\n"
    engine().run(later.aclose(), SECONDS)


def test_a_program_that_is_killed_is_an_error_and_the_next_command_runs(make: Callable[..., Sandbox]) -> None:
    box = make()
    running = box.exec(["sleep", "1000"])
    wait = "until pgrep -x sleep >/dev/null; do sleep 0.05; done; "
    with pytest.raises(SandboxUnavailableError):
        box.exec(["bash", "-c", wait + "pkill -9 -f 'serve [0-9a-f]{16}'; sleep 1000"]).result(SECONDS)
    with pytest.raises(SandboxUnavailableError):
        running.result(SECONDS)
    assert box.exec(["echo", "again"]).result(SECONDS).stdout == "again\n"


# Ports, code


def test_a_port_by_its_own_host_name(emulator: Any) -> None:
    other = E2BProvider.connect(
        {"E2B_API_KEY": os.environ["E2B_API_KEY"], "E2B_API_URL": os.environ["E2B_API_URL"]}
    )
    made = engine().run(other.create(spec()), SECONDS)
    found = engine().run(other.url(made.sandbox_id, 8080), SECONDS)
    assert found.url == f"https://8080-{made.sandbox_id}.e2b.app"
    engine().run(other.destroy(made.sandbox_id), SECONDS)
    engine().run(other.aclose(), SECONDS)


def test_a_port_without_public_traffic_needs_the_token(make: Callable[..., Sandbox]) -> None:
    box = make(provider_options={"network": {"allow_public_traffic": False}})
    box.exec(["python3", "-m", "http.server", "8000"], cwd="/tmp")
    url = box.url(8000).result(SECONDS)
    assert any("traffic" in name.lower() for name in url.headers)
    request = urllib.request.Request(url.url + "/", headers=dict(url.headers))
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert answer.status == 200
                break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_code_keeps_its_state_and_gives_rich_results(make: Callable[..., Sandbox]) -> None:
    box = make(provider_options={"template": "code-interpreter-v1"})
    box.run_code("x = 41").result(SECONDS)
    ran = box.run_code("import sys; print('out'); print('err', file=sys.stderr); x + 1").result(SECONDS)
    assert (ran.stdout, ran.stderr, ran.error) == ("out\n", "err\n", None)
    assert ran.results[0]["text/plain"] == "42"
    failed = box.run_code("1 / 0").result(SECONDS)
    assert failed.error is not None
    assert failed.error["name"] == "ZeroDivisionError"


def test_the_registry_gives_one_instance_for_one_account(emulator: Any) -> None:
    assert registry.provider("e2b") is registry.provider("e2b")
    assert registry.provider("e2b", template="other") is not registry.provider("e2b")
