"""What is CoreWeave's own: its SDK's view of our sandboxes, options, keys, services, the clock inside."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.coreweave_emulator import needs_emulator, serving

from lowtide import Sandbox, Session
from lowtide.engine import engine
from lowtide.errors import (
    AuthenticationError,
    SandboxGone,
    SandboxNotFoundError,
    UnsupportedError,
    ValidationError,
)
from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers.base import Labels, ProcessSpec, SandboxSpec, SandboxState
from lowtide.providers.coreweave import CoreWeaveOptions, CoreWeaveProvider
from lowtide.providers.coreweave.access import Access

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def emulator() -> Iterator[Any]:
    yield from serving()


@pytest.fixture
def provider(emulator: Any) -> Iterator[CoreWeaveProvider]:
    connected = CoreWeaveProvider.connect(os.environ)
    yield connected
    engine().run(connected.aclose(), SECONDS)


def spec(**more: Any) -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="0123456789abcdef", owner="owner")
    return SandboxSpec(labels=labels, **{"lifetime_seconds": 300.0, **more})


def seen(sandbox_id: str | None) -> Any:
    """As the service describes it."""
    import grpc
    from cwsandbox._proto import sandbox_pb2 as pb
    from cwsandbox._proto import sandbox_pb2_grpc

    target = os.environ["CWSANDBOX_BASE_URL"].removeprefix("http://")
    with grpc.insecure_channel(target) as channel:
        return sandbox_pb2_grpc.SandboxServiceStub(channel).GetSandbox(
            pb.GetSandboxRequest(sandbox_id=sandbox_id),
            metadata=(("authorization", f"Bearer {os.environ['CWSANDBOX_API_KEY']}"),),
            timeout=30,
        )


def test_its_own_sdk_sees_it_by_its_tags(emulator: Any) -> None:
    import cwsandbox

    with Sandbox.run(provider="coreweave", tags=["my-project"], max_lifetime_seconds=900) as box:
        (found,) = cwsandbox.Sandbox.list(tags=["my-project"]).result(SECONDS)
        assert found.sandbox_id == box.sandbox_id
        assert f"lowtide-lease.{box.lease_id}" in found.tags
        assert seen(box.sandbox_id).spec.max_lifetime_seconds == 900
        (ours,) = Sandbox.list(tags=["my-project"], provider="coreweave").result(SECONDS)
        assert ours.tags == ("my-project",)


def test_the_fixed_end_is_always_there(emulator: Any) -> None:
    with Sandbox.run(provider="coreweave") as box:
        assert seen(box.sandbox_id).spec.max_lifetime_seconds == 86_400


def test_the_sdk_installs_no_signal_handlers(emulator: Any) -> None:
    with Sandbox.run(provider="coreweave"):
        for number in (signal.SIGINT, signal.SIGTERM):
            assert "cwsandbox" not in getattr(signal.getsignal(number), "__module__", "")


def test_options_reach_the_service(emulator: Any) -> None:
    options = CoreWeaveOptions(
        resources={"requests": {"cpu": "250m"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        services=[{"port": 8080, "name": "web", "visibility": "public"}],
        volumes=[{"name": "scratch", "mount_path": "/scratch", "size": "1Gi"}],
        placement_mode="serverless",
        runtime_class="gvisor",
        annotations={"team": "evals"},
        mounted_files=[{"mount_path": "/etc/our.conf", "file_content": b"mounted"}],
    )
    with Sandbox.run(provider="coreweave", provider_options=options) as box:
        told = seen(box.sandbox_id).spec
        main = told.containers[0]
        assert (main.resource_requirements.requests.cpu, main.resource_requirements.limits.memory) == (
            "250m",
            "512Mi",
        )
        assert (told.services[0].port, told.volumes[0].name, told.runtime_class) == (
            8080,
            "scratch",
            "gvisor",
        )
        assert dict(told.annotations) == {"team": "evals"}
        assert box.read_file("/etc/our.conf").result(SECONDS) == b"mounted"


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"provider_options": {"services": [{"port": "many"}]}}, ValidationError),
        ({"provider_options": {"placement_mode": "moon"}}, ValidationError),
        ({"provider_options": {"runtime_class": "gvisor"}, "isolation": "gvisor"}, ValidationError),
        ({"snapshot": "fss-1"}, ValidationError),
        ({"tags": ["lowtide-lease.x"]}, ValidationError),
        ({"network": ["example.org:8080"]}, UnsupportedError),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    emulator: Any, keywords: dict[str, Any], error: type[Exception]
) -> None:
    before = len(emulator.calls("create-sandbox"))
    with pytest.raises(error) as caught:
        Sandbox.run(provider="coreweave", **keywords)
    assert caught.value.provider == "coreweave"  # type: ignore[attr-defined]
    assert len(emulator.calls("create-sandbox")) == before


def test_its_options_are_refused_elsewhere_by_name() -> None:
    with pytest.raises(ValidationError, match="'local'"):
        Sandbox(provider="local", provider_options=CoreWeaveOptions(runtime_class="gvisor"))


def test_without_a_key_it_says_what_to_set() -> None:
    with pytest.raises(AuthenticationError, match="CWSANDBOX_API_KEY"):
        CoreWeaveProvider.connect({})
    with pytest.raises(ValidationError, match="CWSANDBOX_BASE_URL"):
        CoreWeaveProvider.connect({"CWSANDBOX_API_KEY": "k", "CWSANDBOX_BASE_URL": "https://host/path"})


def test_a_wrong_key_is_told_and_not_shown(emulator: Any) -> None:
    wrong = CoreWeaveProvider.connect({**os.environ, "CWSANDBOX_API_KEY": "cw_wrong"})
    with pytest.raises(AuthenticationError) as caught:
        engine().run(wrong.get("some-sandbox"), SECONDS)
    assert "cw_wrong" not in str(caught.value) + repr(caught.value) + repr(vars(wrong))
    engine().run(wrong.aclose(), SECONDS)


def test_what_another_client_made_is_not_touched(emulator: Any) -> None:
    import cwsandbox

    theirs = cwsandbox.Sandbox.run(tags=["theirs"])
    try:
        assert Sandbox.list(tags=["theirs"], provider="coreweave").result(SECONDS) == []
        with pytest.raises(SandboxNotFoundError):
            Sandbox.delete(str(theirs.sandbox_id), provider="coreweave").result(SECONDS)
        assert theirs.exec(["echo", "alive"]).result(SECONDS).stdout == "alive\n"
    finally:
        theirs.stop().result(SECONDS)


def test_the_key_of_the_program_inside_is_nowhere_to_be_read(emulator: Any) -> None:
    with Sandbox.run(provider="coreweave") as box:
        key = seen(box.sandbox_id).spec.containers[0].environment_variables["LOWTIDE_KEY"]
        script = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
        text = box.exec(["sh", "-c", script]).result(SECONDS).stdout
        assert len(key) == 32
        assert key not in text


def test_another_key_of_the_account_gets_in(
    emulator: Any, provider: CoreWeaveProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service knows the key of the program inside from the create call."""
    with Sandbox.run(provider="coreweave") as box:
        box.wait(SECONDS)
        monkeypatch.setattr(Access, "inside_key", lambda *_: bytes(16))  # as another key would make it

        async def use() -> int:
            process = await provider.start_process(str(box.sandbox_id), ProcessSpec(argv=("true",)))
            return await process.wait()

        assert engine().run(use(), SECONDS) == 0


def test_the_clock_inside_ends_what_nobody_renews(emulator: Any, provider: CoreWeaveProvider) -> None:
    async def life() -> None:
        first, second = spec(lifetime_seconds=2.0), spec(lifetime_seconds=2.0)
        left, renewed = await provider.create(first), await provider.create(second)
        await provider.wait_ready(renewed.sandbox_id)
        await provider.renew(renewed.sandbox_id, 300.0)
        deadline = time.monotonic() + 60
        while not (seen := await provider.get(left.sandbox_id)).state.terminal:
            assert time.monotonic() < deadline
        assert (seen.state, seen.reason) == (SandboxState.FAILED, "expired")
        assert (await provider.get(renewed.sandbox_id)).state is SandboxState.RUNNING
        with pytest.raises(SandboxGone):
            await provider.start_process(left.sandbox_id, ProcessSpec(argv=("true",)))
        assert await provider.destroy(renewed.sandbox_id)
        assert not await provider.destroy(left.sandbox_id)

    engine().run(life(), SECONDS)


def test_a_renewal_never_goes_past_the_fixed_end(emulator: Any, provider: CoreWeaveProvider) -> None:
    async def life() -> float:
        made = await provider.create(spec(lifetime_seconds=5.0, fixed_lifetime_seconds=60.0))
        await provider.wait_ready(made.sandbox_id)
        until = await provider.renew(made.sandbox_id, 3600.0)
        await provider.destroy(made.sandbox_id)
        assert until is not None
        return until.timestamp() - time.time()

    assert engine().run(life(), SECONDS) <= 60.0


def test_a_lifetime_beyond_the_longest_is_refused_and_not_cut(
    emulator: Any, provider: CoreWeaveProvider
) -> None:
    longest = 30 * 86_400
    with pytest.raises(ValidationError, match="30 days"):
        Sandbox.run(provider="coreweave", max_lifetime_seconds=longest + 1)
    assert emulator.state()["sandboxes"]["coreweave"] == []
    with Sandbox.run(provider="coreweave", max_lifetime_seconds=longest) as box:
        assert box.exec(["true"]).result(SECONDS).returncode == 0


def test_a_service_has_its_own_address(emulator: Any) -> None:
    service = {
        "port": 8000,
        "visibility": "public",
        "endpoint": {"kind": "https", "auth": "share_token"},
    }
    with Sandbox.run(provider="coreweave", provider_options={"services": [service]}) as box:
        server = box.exec(["python3", "-m", "http.server", "8000"])
        url = box.url(8000).result(SECONDS)
        assert "X-Sandbox-Share-Token" in url.headers
        request = urllib.request.Request(url.url, headers=dict(url.headers))
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    assert answer.status == 200
                break
            except OSError:
                assert time.monotonic() < deadline
        server.cancel()


def test_a_snapshot_without_a_volume_says_what_to_do(emulator: Any) -> None:
    box = Sandbox.run(provider="coreweave")
    with box, pytest.raises(UnsupportedError, match="scratch volume"):
        box.snapshot().result(SECONDS)


def test_many_sandboxes_at_once_need_more_than_one_connection(
    emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.providers.hosted.grpc_calls._STREAMS", 2)
    with Session({"provider": "coreweave"}) as session:
        boxes = [session.sandbox() for _ in range(5)]
        running = [box.exec(["sh", "-c", "echo in; sleep 0.2"]) for box in boxes]
        assert [one.result(SECONDS).stdout for one in running] == ["in\n"] * 5


def test_the_log_of_one_that_has_ended_is_gone_with_it(emulator: Any) -> None:
    with Sandbox.run("sh", "-c", "echo said", provider="coreweave") as box:
        box.wait_until_complete().result(60)
        with pytest.raises(SandboxGone):
            "".join(box.stream_logs())
