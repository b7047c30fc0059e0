"""The Runloop emulator as the unmodified SDK sees it, with every answer checked against the SDK's own models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator

sdk = pytest.importorskip("runloop_api_client")
Create = Callable[..., Any]


@pytest.fixture(scope="module")
def runloop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("runloop", plain=True, home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle
        assert handle.state()["sandboxes"]["runloop"] == []


@pytest.fixture
def client(runloop: Handle) -> Iterator[Any]:
    """Strict: an answer that is not what the models say is an error."""
    found = runloop.environment
    with sdk.Runloop(
        bearer_token=found["RUNLOOP_API_KEY"],
        base_url=found["RUNLOOP_BASE_URL"],
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client
    runloop.faults.clear()


@pytest.fixture
def create(client: Any) -> Iterator[Create]:
    made: list[str] = []

    def make(**keywords: Any) -> Any:
        devbox = client.devboxes.create_and_await_running(**keywords)
        made.append(devbox.id)
        return devbox

    yield make
    for devbox_id in made:
        client.devboxes.shutdown(devbox_id, force="true")


@pytest.mark.newcomer
def test_a_devbox_lives_runs_commands_moves_files_and_ends(
    client: Any, create: Create, tmp_path: Path
) -> None:
    devbox = create(name="mine", metadata={"a": "b"}, environment_variables={"COLOUR": "blue"})
    assert (devbox.status, devbox.name, devbox.metadata) == ("running", "mine", {"a": "b"})
    done = client.devboxes.execute_and_await_completion(
        devbox.id, command="echo out; echo err >&2; echo $COLOUR; pwd; exit 3"
    )
    assert (done.exit_status, done.stdout, done.stderr) == (3, "out\nblue\n/home/user\n", "err\n")
    client.devboxes.write_file_contents(devbox.id, file_path="a.txt", contents="text")
    assert client.devboxes.read_file_contents(devbox.id, file_path="~/a.txt") == "text"
    data = bytes(range(256)) * 5000
    (tmp_path / "up").write_bytes(data)
    client.devboxes.upload_file(devbox.id, path="/tmp/deep/b.bin", file=tmp_path / "up")
    assert client.devboxes.download_file(devbox.id, path="/tmp/deep/b.bin").read() == data
    with pytest.raises(sdk.NotFoundError):
        client.devboxes.download_file(devbox.id, path="/no/such/file")
    ended = client.devboxes.shutdown(devbox.id)
    assert (ended.status, ended.shutdown_reason) == ("shutdown", "api_shutdown")
    assert client.devboxes.shutdown(devbox.id).status == "shutdown"
    with pytest.raises(sdk.BadRequestError):
        client.devboxes.execute_async(devbox.id, command="true")
    with pytest.raises(sdk.NotFoundError):
        client.devboxes.shutdown("dbx_none")


def test_a_create_that_was_not_answered_is_made_once(client: Any, runloop: Handle) -> None:
    name = uuid.uuid4().hex
    runloop.faults.add("create-dropped", match={"name": name})
    made = client.with_options(max_retries=2).devboxes.create(name=name)
    assert [one.id for one in client.devboxes.list(limit=5000) if one.name == name] == [made.id]
    client.devboxes.shutdown(made.id)


def test_a_command_id_runs_once(client: Any, create: Create) -> None:
    devbox = create()
    for _ in range(3):
        client.devboxes.execute(devbox.id, command="echo x >> count; cat count", command_id="the-same")
    assert client.devboxes.read_file_contents(devbox.id, file_path="count") == "x\n"


def test_streams_go_on_from_an_offset_and_lose_nothing(client: Any, create: Create) -> None:
    devbox = create()
    started = client.devboxes.execute_async(devbox.id, command="for i in $(seq 3000); do echo é$i; done")
    whole = "".join(f"é{number}\n" for number in range(1, 3001))
    client.devboxes.executions.await_completed(started.execution_id, devbox_id=devbox.id)
    stream = client.devboxes.executions.stream_stdout_updates
    chunks = list(stream(started.execution_id, devbox_id=devbox.id))
    assert "".join(chunk.output for chunk in chunks) == whole
    later = list(stream(started.execution_id, devbox_id=devbox.id, offset=str(chunks[0].offset)))
    assert "".join(chunk.output for chunk in later) == whole[len(chunks[0].output) :]
    shown = client.devboxes.executions.retrieve(started.execution_id, devbox_id=devbox.id)
    assert shown.stdout_truncated
    assert shown.stdout.splitlines()[-1] == "é3000"


def test_stdin_and_kill_reach_a_command(client: Any, create: Create) -> None:
    devbox = create()
    executions = client.devboxes.executions
    cat = client.devboxes.execute_async(devbox.id, command="cat", attach_stdin=True)
    executions.send_std_in(cat.execution_id, devbox_id=devbox.id, text="typed\n")
    executions.send_std_in(cat.execution_id, devbox_id=devbox.id, signal="EOF")
    assert executions.await_completed(cat.execution_id, devbox_id=devbox.id).stdout == "typed\n"
    sleeping = client.devboxes.execute_async(devbox.id, command="sleep 300 & sleep 301")
    killed = executions.kill(sleeping.execution_id, devbox_id=devbox.id)
    assert (killed.status, killed.exit_status) == ("completed", 137)
    left = client.devboxes.execute_and_await_completion(devbox.id, command="pgrep -c sleep || true")
    assert left.stdout == "0\n"


def test_a_wait_that_takes_too_long_answers_408(client: Any, create: Create) -> None:
    devbox = create()
    with pytest.raises(sdk.APIStatusError) as caught:
        client.post(
            f"/v1/devboxes/{devbox.id}/wait_for_status",
            body={"statuses": ["suspended"], "timeout_seconds": 0.1},
            cast_to=object,
        )
    assert caught.value.status_code == 408


def test_keep_alive_and_idle_follow_the_movable_clock(client: Any, runloop: Handle) -> None:
    kept = client.devboxes.create_and_await_running(launch_parameters={"keep_alive_time_seconds": 100})
    idle = {"after_idle": {"idle_time_seconds": 100, "on_idle": "suspend"}}
    other = client.devboxes.create_and_await_running(launch_parameters={"lifecycle": idle})
    runloop.clock.advance(90)
    client.devboxes.keep_alive(kept.id)
    client.devboxes.execute(other.id, command="true", command_id=uuid.uuid4().hex)
    runloop.clock.advance(90)
    assert client.devboxes.retrieve(kept.id).status == "running"
    assert client.devboxes.retrieve(other.id).status == "running"
    runloop.clock.advance(20)
    ended = client.devboxes.retrieve(kept.id)
    assert (ended.status, ended.shutdown_reason) == ("shutdown", "keep_alive_timeout")
    assert client.devboxes.await_suspended(other.id).status == "suspended"
    client.devboxes.shutdown(other.id)


def test_files_survive_a_suspension_and_a_snapshot(client: Any, create: Create) -> None:
    devbox = create()
    client.devboxes.write_file_contents(devbox.id, file_path="kept.txt", contents="still here")
    client.devboxes.suspend(devbox.id)
    client.devboxes.await_suspended(devbox.id)
    client.devboxes.resume(devbox.id)
    client.devboxes.await_running(devbox.id)
    assert client.devboxes.read_file_contents(devbox.id, file_path="kept.txt") == "still here"
    snapshot = client.devboxes.snapshot_disk(devbox.id, name="s", metadata={"k": "v"})
    again = create(snapshot_id=snapshot.id)
    assert client.devboxes.read_file_contents(again.id, file_path="kept.txt") == "still here"
    client.devboxes.disk_snapshots.delete(snapshot.id)
    assert client.devboxes.disk_snapshots.query_status(snapshot.id).status == "deleted"


def test_a_snapshot_of_a_suspended_devbox_and_the_devbox_do_not_end_each_other(
    client: Any, create: Create
) -> None:
    devbox = create()
    client.devboxes.write_file_contents(devbox.id, file_path="kept.txt", contents="still here")
    client.devboxes.suspend(devbox.id)
    client.devboxes.await_suspended(devbox.id)
    first, second = (client.devboxes.snapshot_disk(devbox.id).id for _ in range(2))
    client.devboxes.disk_snapshots.delete(first)
    client.devboxes.resume(devbox.id)
    assert client.devboxes.await_running(devbox.id).status == "running"
    client.devboxes.shutdown(devbox.id)
    again = create(snapshot_id=second)
    assert client.devboxes.read_file_contents(again.id, file_path="kept.txt") == "still here"


def test_a_resume_that_cannot_be_done_says_so(client: Any, create: Create) -> None:
    policy = client.network_policies.create(name="shut", allowed_hostnames=[])
    devbox = create(launch_parameters={"network_policy_id": policy.id})
    client.devboxes.suspend(devbox.id)
    client.devboxes.await_suspended(devbox.id)
    client.network_policies.delete(policy.id)
    with pytest.raises(sdk.BadRequestError, match="network policy"):  # and not without any
        create(launch_parameters={"network_policy_id": policy.id})
    client.devboxes.resume(devbox.id)
    with pytest.raises(sdk.RunloopError, match="failure"):
        client.devboxes.await_running(devbox.id)


def test_a_tunnel_reaches_a_port_and_needs_its_token(client: Any, create: Create, runloop: Handle) -> None:
    devbox = create()
    tunnel = client.devboxes.enable_tunnel(devbox.id, auth_mode="authenticated")
    client.devboxes.execute_async(
        devbox.id, command="mkdir w; cd w; echo served > index.html; python3 -m http.server 8000"
    )
    headers = {"X-Lowtide-Tunnel": f"8000-{tunnel.tunnel_key}"}
    url = f"{runloop.urls['runloop']}/index.html"
    with httpx.Client(trust_env=False, timeout=30) as web:
        assert web.get(url, headers=headers).status_code == 401
        headers["X-Runloop-Tunnel-Authorization"] = f"Bearer {tunnel.auth_token}"
        until = time.monotonic() + 60
        while (answer := web.get(url, headers=headers)).status_code == 502:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert answer.text == "served\n"


def test_a_launch_command_that_fails_fails_the_devbox(client: Any) -> None:
    made = client.devboxes.create(launch_parameters={"launch_commands": ["exit 7"]})
    until = time.monotonic() + 60
    while (seen := client.devboxes.retrieve(made.id)).status not in ("failure", "running"):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (seen.status, seen.failure_reason) == ("failure", "execution_failed")


def test_a_list_pages_through_everything(client: Any, create: Create) -> None:
    made = {create().id for _ in range(3)}
    assert made <= {one.id for one in client.devboxes.list(limit=2)}


async def test_the_async_object_layer_works_too(runloop: Handle) -> None:
    from runloop_api_client.sdk import AsyncRunloopSDK

    found = runloop.environment
    async with AsyncRunloopSDK(
        bearer_token=found["RUNLOOP_API_KEY"], base_url=found["RUNLOOP_BASE_URL"]
    ) as client:
        devbox = await client.devbox.create(name="object")
        lines: list[str] = []
        result = await devbox.cmd.exec("echo one; echo two", stdout=lines.append)
        assert result.exit_code == 0
        assert "".join(lines) == "one\ntwo\n"
        await devbox.shutdown()
