"""The CoreWeave emulator as the unmodified SDK and its own gRPC stubs see it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator

sdk = pytest.importorskip("cwsandbox")
grpc = pytest.importorskip("grpc")
from cwsandbox._proto import (  # noqa: E402
    sandbox_pb2 as pb,
)
from cwsandbox._proto import (  # noqa: E402
    sandbox_pb2_grpc,
    sandbox_template_pb2,
    sandbox_template_pb2_grpc,
    volume_pb2,
    volume_pb2_grpc,
)

Create = Callable[..., Any]
OVER = (pb.STATE_COMPLETED, pb.STATE_FAILED, pb.STATE_TERMINATED)


@pytest.fixture(scope="module")
def coreweave(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("coreweave", home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle
        assert handle.state()["sandboxes"]["coreweave"] == []


class Service:
    """The raw calls, with the key."""

    def __init__(self, handle: Handle, key: str | None = None) -> None:
        self.handle = handle
        self.channel = grpc.insecure_channel(handle.urls["coreweave"].removeprefix("http://"))
        self.metadata = (("authorization", f"Bearer {key or handle.environment['CWSANDBOX_API_KEY']}"),)
        self.stub = sandbox_pb2_grpc.SandboxServiceStub(self.channel)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.stub, name)
        return lambda request: method(request, metadata=self.metadata, timeout=30)

    def state(self, sandbox_id: str) -> Any:
        return self.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id)).status

    def until(self, sandbox_id: str, *states: int) -> Any:
        until = time.monotonic() + 60
        while (status := self.state(sandbox_id)).state not in states:
            assert time.monotonic() < until, status
            time.sleep(0.02)
        return status

    def exec(self, sandbox_id: str, *words: str) -> tuple[int, bytes]:
        answer = self.Exec(pb.ExecRequest(sandbox_id=sandbox_id, command=words))
        return answer.exit_code, answer.stdout


@pytest.fixture
def service(coreweave: Handle) -> Iterator[Service]:
    found = Service(coreweave)
    yield found
    coreweave.faults.clear()
    found.PurgeSandboxes(pb.PurgeSandboxesRequest(purge_all=True))
    until = time.monotonic() + 60
    while coreweave.state()["sandboxes"]["coreweave"] and time.monotonic() < until:
        time.sleep(0.02)
    found.channel.close()


def wanted(*words: str, **fields: Any) -> Any:
    container = pb.Container(name="main", image="python:3.11", command=words[0], args=words[1:])
    return pb.SandboxSpec(containers=[container], **fields)


SLEEP = ("sleep", "infinity")


def asked(*words: str, request_id: str = "", **fields: Any) -> Any:
    return pb.CreateSandboxRequest(
        sandbox=pb.Sandbox(spec=wanted(*(words or SLEEP), **fields)), request_id=request_id
    )


def refused(code: str) -> Any:
    return pytest.raises(grpc.RpcError, check=lambda error: error.code().name == code)


@pytest.mark.newcomer
def test_a_sandbox_lives_runs_commands_moves_files_and_ends(coreweave: Handle, service: Service) -> None:
    auth = sdk.AuthHeaders(
        headers={"authorization": f"Bearer {coreweave.environment['CWSANDBOX_API_KEY']}"}, strategy="api_key"
    )
    sandbox = sdk.Sandbox(
        base_url=coreweave.urls["coreweave"],
        auth=auth,
        environment_variables={"COLOUR": "blue"},
        tags=["mine"],
        working_dir="/srv",
    )
    with sandbox:
        done = sandbox.exec(["sh", "-c", "echo out; echo err >&2; echo $COLOUR; pwd; exit 3"]).result()
        assert (done.returncode, done.stdout, done.stderr) == (3, "out\nblue\n/srv\n", "err\n")
        data = bytes(range(256)) * 5000
        sandbox.write_file("/tmp/deep/b.bin", data).result()
        assert sandbox.read_file("/tmp/deep/b.bin").result() == data
        with pytest.raises(sdk.SandboxFileError) as caught:
            sandbox.read_file("/no/such/file").result()
        assert caught.value.reason == "CWSANDBOX_FILE_NOT_FOUND"
        reader = sandbox.exec(["cat"], stdin=True)
        reader.stdin.write(b"hello").result()
        reader.stdin.close().result()
        assert reader.result().stdout == "hello"
        assert [one["tags"] for one in coreweave.state()["sandboxes"]["coreweave"]] == [["mine"]]
    assert sandbox.status == "terminated"
    assert coreweave.state()["sandboxes"]["coreweave"] == []


def test_the_same_request_is_made_once_and_another_with_its_id_is_refused(service: Service) -> None:
    key = uuid.uuid4().hex
    first = service.CreateSandbox(asked(request_id=key, tags=["a"]))
    assert service.CreateSandbox(asked(request_id=key, tags=["a"])).sandbox_id == first.sandbox_id
    with refused("ALREADY_EXISTS"):
        service.CreateSandbox(asked(request_id=key, tags=["b"]))
    service.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=first.sandbox_id))
    service.until(first.sandbox_id, pb.STATE_TERMINATED)
    again = service.CreateSandbox(asked(request_id=key, tags=["a"]))
    assert (again.sandbox_id, again.status.state) == (first.sandbox_id, pb.STATE_TERMINATED)


def test_the_lifetime_runs_out_on_the_emulators_clock(coreweave: Handle, service: Service) -> None:
    short = service.CreateSandbox(asked(max_lifetime_seconds=100)).sandbox_id
    usual = service.CreateSandbox(asked())
    assert usual.status.effective_max_lifetime_seconds == 600
    for one in (short, usual.sandbox_id):
        service.until(one, pb.STATE_RUNNING)
    coreweave.clock.advance(101)
    assert service.state(short).state == pb.STATE_TERMINATED
    assert service.state(short).state_reason == "max lifetime exceeded"
    coreweave.clock.advance(500)
    assert service.state(usual.sandbox_id).state == pb.STATE_TERMINATED


@pytest.mark.parametrize(
    ("words", "state", "code"),
    [(("true",), pb.STATE_COMPLETED, 0), (("sh", "-c", "exit 5"), pb.STATE_FAILED, 5)],
)
def test_a_sandbox_ends_with_its_main_process(
    service: Service, words: tuple[str, ...], state: int, code: int
) -> None:
    made = service.CreateSandbox(asked(*words)).sandbox_id
    status = service.until(made, *OVER)
    assert (status.state, status.exit_code) == (state, code)
    with refused("FAILED_PRECONDITION"):
        service.exec(made, "true")


def test_lists_filter_by_every_tag_hide_what_is_over_and_come_in_pages(service: Service) -> None:
    made = [service.CreateSandbox(asked(tags=["all", f"n{n}"])).sandbox_id for n in range(5)]
    service.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=made[0]))
    service.until(made[0], pb.STATE_TERMINATED)

    def listed(**fields: Any) -> list[str]:
        found, token = [], ""
        while True:
            answer = service.ListSandboxes(pb.ListSandboxesRequest(page_size=2, page_token=token, **fields))
            found += [one.sandbox_id for one in answer.sandboxes]
            token = answer.next_page_token
            if not token:
                return found

    assert listed(tags=["all"]) == made[:0:-1]
    assert listed(tags=["all"], sort_direction=pb.SORT_DIRECTION_ASCENDING) == made[1:]
    assert listed(tags=["all"], show_terminated=True) == made[::-1]
    assert listed(tags=["all"], state=pb.STATE_TERMINATED) == made[:1]
    assert listed(tags=["all", "n3"]) == [made[3]]
    assert listed(tags=["all", "none"]) == []
    with refused("INVALID_ARGUMENT"):
        service.ListSandboxes(pb.ListSandboxesRequest(page_token="other"))


def test_delete_gives_the_main_process_its_grace(service: Service) -> None:
    script = 'trap "exit 7" TERM; echo ready; while :; do sleep 0.05; done'
    made = service.CreateSandbox(asked("sh", "-c", script)).sandbox_id
    service.until(made, pb.STATE_RUNNING)
    logs = service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made, follow=True))
    assert next(logs).data == b"ready\n"
    logs.cancel()
    service.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=made, grace_period_seconds=20))
    status = service.until(made, *OVER)
    assert (status.state, status.exit_code) == (pb.STATE_TERMINATED, 7)
    assert not service.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id="none", allow_missing=True)).HasField(
        "sandbox"
    )
    with refused("NOT_FOUND"):
        service.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id="none"))


def test_purge_ends_what_has_the_tags_and_needs_one_selector(service: Service) -> None:
    ours = [service.CreateSandbox(asked(tags=["purge-me"])).sandbox_id for _ in range(2)]
    other = service.CreateSandbox(asked(tags=["other"])).sandbox_id
    for one in (pb.PurgeSandboxesRequest(), pb.PurgeSandboxesRequest(tags=["a"], purge_all=True)):
        with refused("INVALID_ARGUMENT"):
            service.PurgeSandboxes(one)
    dry = service.PurgeSandboxes(pb.PurgeSandboxesRequest(tags=["purge-me"], dry_run=True))
    assert dry.purge_count == 2
    assert service.PurgeSandboxes(pb.PurgeSandboxesRequest(tags=["purge-me"])).purge_count == 2
    for one in ours:
        service.until(one, pb.STATE_TERMINATED)
    assert service.until(other, pb.STATE_RUNNING)


def test_logs_go_on_where_a_session_stopped_and_end_with_lines(service: Service) -> None:
    made = service.CreateSandbox(
        asked("sh", "-c", "printf 'one\\ntwo\\nthree\\n'; exec sleep 600")
    ).sandbox_id
    service.until(made, pb.STATE_RUNNING)
    until = time.monotonic() + 30
    while not (entries := list(service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made)))):
        assert time.monotonic() < until
    assert b"".join(one.data for one in entries) == b"one\ntwo\nthree\n"
    tail = list(service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made, tail_lines=2)))
    assert b"".join(one.data for one in tail) == b"two\nthree\n"
    session = entries[-1].log_session_id
    rest = list(
        service.StreamLogs(
            pb.StreamLogsRequest(sandbox_id=made, resume_log_session_id=session, resume_log_offset=5)
        )
    )
    assert b"".join(one.data for one in rest) == b"wo\nthree\n"
    assert rest[-1].next_log_offset == 14
    far = pb.StreamLogsRequest(sandbox_id=made, resume_log_session_id=session, resume_log_offset=500)
    assert next(service.StreamLogs(far)).error.code == "INVALID_RESUME_OFFSET"
    stamped = list(service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made, timestamps=True, tail_lines=1)))
    assert stamped[0].data.endswith(b"Z three\n")


def test_a_line_of_a_log_ends_at_its_newline_alone(service: Service) -> None:
    made = service.CreateSandbox(
        asked("sh", "-c", "printf 'one\n10%%\r20%%\r30%%\n'; exec sleep 600")
    ).sandbox_id
    service.until(made, pb.STATE_RUNNING)
    until = time.monotonic() + 30
    while not list(service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made))):
        assert time.monotonic() < until
    tail = service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made, tail_lines=1))
    assert b"".join(one.data for one in tail) == b"10%\r20%\r30%\n"
    stamped = service.StreamLogs(pb.StreamLogsRequest(sandbox_id=made, timestamps=True))
    assert b"".join(one.data for one in stamped).count(b"Z ") == 2


def test_templates_are_overlaid_by_what_is_given(coreweave: Handle, service: Service) -> None:
    templates = sandbox_template_pb2_grpc.SandboxTemplateServiceStub(service.channel)
    template = sandbox_template_pb2.SandboxTemplate(
        display_name="t",
        spec=pb.PartialSandboxSpec(
            containers=[
                pb.PartialContainer(
                    name="main",
                    image="one",
                    command="sleep",
                    args=["infinity"],
                    environment_variables={"A": "1"},
                )
            ],
            tags=["from-template"],
            max_lifetime_seconds=50,
        ),
    )
    made = templates.CreateSandboxTemplate(
        sandbox_template_pb2.CreateSandboxTemplateRequest(sandbox_template=template),
        metadata=service.metadata,
    )
    overrides = pb.PartialSandboxSpec(containers=[pb.PartialContainer(image="two")], max_lifetime_seconds=70)
    box = service.CreateSandboxFromTemplate(
        pb.CreateSandboxFromTemplateRequest(template_id=made.sandbox_template_id, overrides=overrides)
    )
    container = box.spec.containers[0]
    assert (container.image, container.command, dict(container.environment_variables)) == (
        "two",
        "sleep",
        {"A": "1"},
    )
    assert (list(box.spec.tags), box.spec.max_lifetime_seconds) == (["from-template"], 70)
    assert (box.source_template_id, box.source_template_revision) == (made.sandbox_template_id, 1)


def test_a_compose_file_with_one_service_runs_and_more_is_refused_by_name(service: Service) -> None:
    one = b"services:\n  web:\n    image: python\n    command: sleep infinity\n    environment: [A=1]\n"
    box = service.CreateSandboxFromFile(
        pb.CreateSandboxFromFileRequest(type=pb.SANDBOX_FILE_TYPE_COMPOSE, contents=one)
    )
    service.until(box.sandbox_id, pb.STATE_RUNNING)
    assert service.exec(box.sandbox_id, "printenv", "A") == (0, b"1\n")
    two = one + b"  db:\n    image: redis\n"
    built = b"services:\n  web:\n    build: .\n"
    for contents in (two, built):
        with refused("UNIMPLEMENTED"):
            service.CreateSandboxFromFile(
                pb.CreateSandboxFromFileRequest(type=pb.SANDBOX_FILE_TYPE_COMPOSE, contents=contents)
            )


def test_scratch_volumes_are_snapshotted_and_restored(service: Service) -> None:
    def boxed(snapshot: str = "") -> str:
        spec = wanted(*SLEEP)
        spec.volumes.add(name="data").scratch.restore_from_snapshot_id = snapshot
        spec.containers[0].volume_mounts.add(volume="data", mount_path="/data")
        made = service.CreateSandbox(pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec)))
        service.until(made.sandbox_id, pb.STATE_RUNNING)
        return str(made.sandbox_id)

    source = boxed()
    assert service.exec(source, "sh", "-c", "echo kept > /data/file")[0] == 0
    taken = service.DeleteSandbox(
        pb.DeleteSandboxRequest(sandbox_id=source, snapshot_volumes=["data"])
    ).file_system_snapshot_ids[0]
    service.until(source, *OVER)
    found = service.GetFileSystemSnapshot(pb.GetFileSystemSnapshotRequest(file_system_snapshot_id=taken))
    assert (found.state, found.trigger) == (pb.SNAPSHOT_STATE_READY, pb.SNAPSHOT_TRIGGER_ON_DELETE)
    assert service.exec(boxed(taken), "cat", "/data/file") == (0, b"kept\n")
    service.DeleteFileSystemSnapshot(pb.DeleteFileSystemSnapshotRequest(file_system_snapshot_id=taken))
    with refused("NOT_FOUND"):
        service.GetFileSystemSnapshot(pb.GetFileSystemSnapshotRequest(file_system_snapshot_id=taken))


def test_registered_volumes_are_kept_and_in_use_while_attached(service: Service) -> None:
    stub = volume_pb2_grpc.VolumeServiceStub(service.channel)
    volume = volume_pb2.Volume(
        spec=volume_pb2.VolumeSpec(pvc=volume_pb2.PvcVolumeSource(runner_id="r", claim_name="c"))
    )
    made = stub.CreateVolume(volume_pb2.CreateVolumeRequest(volume=volume), metadata=service.metadata)
    spec = wanted(*SLEEP)
    spec.volumes.add(name="data", volume_id=made.volume_id)
    spec.containers[0].volume_mounts.add(volume="data", mount_path="/data")
    service.CreateSandbox(pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec)))
    gone = volume_pb2.DeleteVolumeRequest(volume_id=made.volume_id)
    with refused("FAILED_PRECONDITION"):
        stub.DeleteVolume(gone, metadata=service.metadata)


def test_a_share_token_is_told_once_and_needed(coreweave: Handle, service: Service) -> None:
    spec = wanted("python", "-m", "http.server", "8000")
    endpoint = pb.EndpointSpec(kind=pb.ENDPOINT_KIND_HTTPS, auth=pb.ENDPOINT_AUTH_SHARE_TOKEN)
    spec.services.add(port=8000, name="http", visibility=pb.VISIBILITY_PUBLIC, endpoint=endpoint)
    made = service.CreateSandbox(pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec)))
    token = made.endpoint_share_token
    url = service.until(made.sandbox_id, pb.STATE_RUNNING).services[0].url
    assert token
    assert not service.GetSandbox(pb.GetSandboxRequest(sandbox_id=made.sandbox_id)).endpoint_share_token

    def status(address: str) -> int:
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert status(url) == 401
    until = time.monotonic() + 30
    while status(f"{url}?share_token={token}") != 200:
        assert time.monotonic() < until


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_a_create_whose_answer_is_lost_is_found_by_replaying_it(
    coreweave: Handle, service: Service, fault: str
) -> None:
    coreweave.faults.add(fault, match={"lost": "1"})
    request = asked(request_id=uuid.uuid4().hex, tags=["lost"])
    with refused("UNAVAILABLE"):
        service.CreateSandbox(request)
    (only,) = coreweave.state()["sandboxes"]["coreweave"]
    assert service.CreateSandbox(request).sandbox_id == only["sandbox_id"]


def test_faults_do_what_they_say(coreweave: Handle, service: Service) -> None:
    made = service.CreateSandbox(asked(tags=["faulty"])).sandbox_id
    service.until(made, pb.STATE_RUNNING)
    end = pb.DeleteSandboxRequest(sandbox_id=made)
    coreweave.faults.add("kill-fails")
    with refused("INTERNAL"):
        service.DeleteSandbox(end)
    coreweave.faults.add("kill-ignored")
    service.DeleteSandbox(end)
    assert service.state(made).state == pb.STATE_RUNNING
    coreweave.faults.add("rate-limit", seconds=3)
    with refused("RESOURCE_EXHAUSTED"):
        service.state(made)
    coreweave.faults.add("unavailable")
    with refused("UNAVAILABLE"):
        service.state(made)
    coreweave.faults.add("stale-token")
    with refused("UNAUTHENTICATED"):
        service.state(made)
    coreweave.faults.add("create-error-state")
    broken = service.CreateSandbox(asked()).sandbox_id
    assert service.until(broken, *OVER).state == pb.STATE_FAILED
    coreweave.faults.add("list-lags", seconds=60)
    assert not service.ListSandboxes(pb.ListSandboxesRequest(tags=["faulty"])).sandboxes
    coreweave.faults.add("gone-mid-command", seconds=0.1)
    call = service.stub.StreamExec(
        iter([pb.ExecStreamRequest(init=pb.ExecStreamInit(sandbox_id=made, command=["sleep", "60"]))]),
        metadata=service.metadata,
    )
    with refused("FAILED_PRECONDITION"):
        list(call)
    assert service.until(made, *OVER).state == pb.STATE_FAILED


def test_multi_container_and_passthrough_are_refused_by_name(service: Service) -> None:
    several = wanted(*SLEEP)
    several.containers.add(name="helper", image="redis")
    with refused("UNIMPLEMENTED"):
        service.CreateSandbox(pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=several)))
    passed = wanted(*SLEEP)
    passed.services.add(port=1, endpoint=pb.EndpointSpec(kind=pb.ENDPOINT_KIND_TLS_PASSTHROUGH))
    with refused("FAILED_PRECONDITION"):
        service.CreateSandbox(pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=passed)))
    with refused("UNIMPLEMENTED"):
        service.ConnectSandbox(pb.ConnectSandboxRequest(sandbox_id="x"))
