"""Malformed gRPC requests at every method of the emulated CoreWeave service: refused with its status, never INTERNAL.

What one caller sends wrongly must not spoil anything for another: afterwards a neighbour's sandbox is still
listed, found and used.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator
from tests.emulators.hostile_messages import BYTES, kind_of, wrongly

pytest.importorskip("cwsandbox")
grpc = pytest.importorskip("grpc")
from cwsandbox._proto import sandbox_pb2 as pb  # noqa: E402
from google.protobuf.message import Message  # noqa: E402

MODULES = ("sandbox", "discovery", "sandbox_template", "settings", "volume")
FINE = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "UNIMPLEMENTED",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("coreweave", limit=12, home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle


class Sender:
    """Raw messages to any method."""

    def __init__(self, handle: Handle) -> None:
        self.channel = grpc.insecure_channel(handle.urls["coreweave"].removeprefix("http://"))
        self.key = handle.environment["CWSANDBOX_API_KEY"]

    def __call__(self, method: Any, data: bytes, metadata: Any = None, timeout: float = 20) -> str:
        """The name of the status it was answered with."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        sent = (("authorization", f"Bearer {self.key}"),) if metadata is None else metadata
        streams = _streams(method)
        try:
            if streams[0]:
                list(self.channel.stream_stream(path)(iter([data, data]), metadata=sent, timeout=timeout))
            elif streams[1]:
                list(self.channel.unary_stream(path)(data, metadata=sent, timeout=timeout))
            else:
                self.channel.unary_unary(path)(data, metadata=sent, timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def call(self, name: str, request: Message) -> bytes:
        path = f"/coreweave.sandbox.v1.SandboxService/{name}"
        sent = (("authorization", f"Bearer {self.key}"),)
        answer: bytes = self.channel.unary_unary(path)(request.SerializeToString(), metadata=sent, timeout=30)
        return answer


def _streams(method: Any) -> tuple[bool, bool]:
    return {"StreamExec": (True, True), "StreamLogs": (False, True)}.get(method.name, (False, False))


def methods() -> list[Any]:
    found = []
    for name in MODULES:
        module = importlib.import_module(f"cwsandbox._proto.{name}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            found += list(service.methods)
    return found


@pytest.fixture
def send(served: Handle) -> Iterator[Sender]:
    sender = Sender(served)
    spec = pb.SandboxSpec(
        containers=[pb.Container(image="x", command="sleep", args=["infinity"])], tags=["neighbour"]
    )
    made = pb.Sandbox.FromString(
        sender.call("CreateSandbox", pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec)))
    ).sandbox_id
    state = None
    while state != pb.STATE_RUNNING:
        state = pb.Sandbox.FromString(
            sender.call("GetSandbox", pb.GetSandboxRequest(sandbox_id=made))
        ).status.state
    sender.neighbour = made  # type: ignore[attr-defined]
    yield sender
    # Nothing that was sent has spoiled what others see and do.
    listed = pb.ListSandboxesResponse.FromString(
        sender.call("ListSandboxes", pb.ListSandboxesRequest(tags=["neighbour"]))
    )
    assert [one.sandbox_id for one in listed.sandboxes] == [made]
    done = pb.ExecResponse.FromString(
        sender.call("Exec", pb.ExecRequest(sandbox_id=made, command=["echo", "hello"]))
    )
    assert done.stdout == b"hello\n"
    sender.call("PurgeSandboxes", pb.PurgeSandboxesRequest(purge_all=True))
    sender.channel.close()


def samples(method: Any, neighbour: str) -> Message:
    """A request that would do, so that a single wrong field is the only one."""
    request = kind_of(method.input_type)()
    spec = pb.SandboxSpec(containers=[pb.Container(image="x", command="true")], max_lifetime_seconds=5)
    if method.name == "CreateSandbox":
        request.sandbox.spec.CopyFrom(spec)  # type: ignore[attr-defined]
    elif method.name == "CreateSandboxFromFile":
        request.type = pb.SANDBOX_FILE_TYPE_COMPOSE  # type: ignore[attr-defined]
        request.contents = b"services: {a: {image: x, command: 'true'}}"  # type: ignore[attr-defined]
    elif method.name == "StreamExec":
        request.init.sandbox_id = neighbour  # type: ignore[attr-defined]
        request.init.command.append("true")  # type: ignore[attr-defined]
    elif method.name in ("Exec", "ReadFile", "WriteFile", "StreamLogs", "GetSandbox"):
        request.sandbox_id = neighbour  # type: ignore[attr-defined]
        if method.name == "Exec":
            request.command.append("true")  # type: ignore[attr-defined]
    return request


@pytest.mark.timeout(280)
def test_hostile_requests_at_every_method_are_refused(served: Handle, send: Any) -> None:
    found = methods()
    assert len(found) > 40
    failed, tried, seen = [], 0, set()
    for method in found:
        sample = samples(method, send.neighbour)
        messages = [one.SerializeToString() for one in wrongly(method.input_type, sample)]
        for data in (*messages, *BYTES):
            if method.name == "PurgeSandboxes" and data not in BYTES:
                continue  # it would end the neighbour, rightly
            status = send(method, data)
            tried += 1
            seen.add(status)
            if status != "OK" and status not in FINE:
                failed.append(f"{method.name} {data[:80]!r}: {status}")
    assert not failed, f"{len(failed)} of {tried}:\n" + "\n".join(failed[:40])
    assert {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"} <= seen


def test_every_method_needs_the_key(served: Handle, send: Any) -> None:
    for metadata in ((), (("authorization", "Bearer no"),), (("authorization-bin", b"\xff"),)):
        answers = {method.name: send(method, b"", metadata) for method in methods()}
        assert set(answers.values()) == {"UNAUTHENTICATED"}, answers


def test_what_does_not_parse_is_an_invalid_argument(served: Handle, send: Any) -> None:
    create = next(method for method in methods() if method.name == "CreateSandbox")
    for data in (b"\xff", b"\x0a\x05ab", b"\x12\x02\xff\xfe"):
        assert send(create, data) == "INVALID_ARGUMENT"


def test_a_create_goes_on_when_its_caller_has_left(served: Handle, send: Any) -> None:
    served.faults.add("create-slow", seconds=0.6)
    spec = pb.SandboxSpec(containers=[pb.Container(image="x", command="true")], tags=["left"])
    asked = pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec)).SerializeToString()
    create = next(method for method in methods() if method.name == "CreateSandbox")
    assert send(create, asked, timeout=0.2) == "DEADLINE_EXCEEDED"
    deadline, listed = time.monotonic() + 20, pb.ListSandboxesResponse()
    while not listed.sandboxes:
        assert time.monotonic() < deadline, "nothing came of it"
        asked_for = pb.ListSandboxesRequest(tags=["left"], show_terminated=True)
        listed = pb.ListSandboxesResponse.FromString(send.call("ListSandboxes", asked_for))


def test_a_method_that_is_not_there_is_unimplemented(served: Handle, send: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send.channel.unary_unary("/coreweave.sandbox.v1.SandboxService/NoSuch")(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_no_http2_end_the_connection_and_nothing_else(served: Handle, send: Any) -> None:
    host, _, port = served.urls["coreweave"].removeprefix("http://").rpartition(":")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 10_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
    ):
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(data)
            sock.settimeout(20)
            while sock.recv(65_536):
                pass


ALIASES = "x: &x [a, a]\n" + "".join(
    f"x{n}: &x{n} [*x{n - 1 or ''}, *x{n - 1 or ''}]\n" for n in range(1, 20)
)
TEXTS = "x: &x " + "a" * 100_000 + "\nservices: {a: {image: x, command: [" + "*x ," * 20_000 + "*x ]}}"


@pytest.mark.parametrize(
    "contents",
    [
        'services: {a: {image: "x\\ud800"}}',
        'services: {"a\\ud800": {image: x}}',
        'services: {a: {image: x, command: ["\\ud800"]}}',
        'services: {a: {image: x, entrypoint: "\\0"}}',
        'services: {a: {image: x, environment: {A: "\\ud800"}}}',
        "services: {a: {image: x, environment: {A: 0x" + "f" * 10_000 + "}}}",
        "services: {a: {image: [x]}}",
        ALIASES + "services: {a: {image: x, environment: {A: *x19 }}}",
        TEXTS,
    ],
    ids=["image", "name", "command", "null", "variable", "number", "list", "aliases", "texts"],
)
def test_a_hostile_compose_file_is_an_invalid_argument(served: Handle, send: Any, contents: str) -> None:
    create = next(method for method in methods() if method.name == "CreateSandboxFromFile")
    request = pb.CreateSandboxFromFileRequest(type=pb.SANDBOX_FILE_TYPE_COMPOSE, contents=contents.encode())
    assert send(create, request.SerializeToString()) == "INVALID_ARGUMENT"


def test_rules_that_mean_nothing_are_an_invalid_argument(served: Handle, send: Any) -> None:
    create = next(method for method in methods() if method.name == "CreateSandbox")
    for rule in (
        pb.EgressRule(),
        pb.EgressRule(cidr=pb.CidrBlock(cidr="999.1.1.1/99")),
        pb.EgressRule(https_hostname="a b"),
        pb.EgressRule(any=True, ports=[pb.PortRange(port=70_000)]),
    ):
        spec = pb.SandboxSpec(containers=[pb.Container(image="x")])
        spec.network.egress.append(rule)
        request = pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec))
        assert send(create, request.SerializeToString()) == "INVALID_ARGUMENT", rule


def made(send: Any, tag: str) -> str:
    """With a scratch volume."""
    spec = pb.SandboxSpec(containers=[pb.Container(image="x")], tags=[tag])
    spec.volumes.add(name="v").scratch.SetInParent()
    request = pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=spec))
    return str(pb.Sandbox.FromString(send.call("CreateSandbox", request)).sandbox_id)


def until(send: Any, sandbox_id: str, *states: int) -> set[int]:
    """All that it was until it was one of these."""
    seen: set[int] = set()
    while not seen & set(states):
        found = send.call("GetSandbox", pb.GetSandboxRequest(sandbox_id=sandbox_id))
        seen.add(pb.Sandbox.FromString(found).status.state)
    return seen


def delete(send: Any, sandbox_id: str, *volumes: str) -> list[str]:
    request = pb.DeleteSandboxRequest(sandbox_id=sandbox_id, snapshot_volumes=volumes)
    answer = pb.DeleteSandboxResponse.FromString(send.call("DeleteSandbox", request))
    return list(answer.file_system_snapshot_ids)


@pytest.mark.timeout(60)
def test_no_snapshot_holds_up_the_end(served: Handle, send: Any) -> None:
    """Neither one that was refused, nor one that is deleted before it is taken, or meanwhile."""
    one, two, three = (made(send, "ends") for _ in range(3))
    (snapshot,) = delete(send, two, "v")  # it still boots
    send.call(
        "DeleteFileSystemSnapshot", pb.DeleteFileSystemSnapshotRequest(file_system_snapshot_id=snapshot)
    )
    with pytest.raises(grpc.RpcError):
        delete(send, one, "v", "no such")
    delete(send, one)
    until(send, three, pb.STATE_RUNNING)
    fill = ["sh", "-c", "head -c 50000000 /dev/zero > /.cwsandbox/volumes/v/x"]
    fill[2] = "mkdir -p /.cwsandbox/volumes/v; " + fill[2]
    send.call("Exec", pb.ExecRequest(sandbox_id=three, command=fill))
    (snapshot,) = delete(send, three, "v")
    send.call(
        "DeleteFileSystemSnapshot", pb.DeleteFileSystemSnapshotRequest(file_system_snapshot_id=snapshot)
    )
    until(send, one, pb.STATE_TERMINATED)
    assert pb.STATE_RUNNING not in until(send, two, pb.STATE_TERMINATED)  # never back from terminating
    until(send, three, pb.STATE_TERMINATED)


def test_a_page_goes_on_where_the_one_before_it_ended(served: Handle, send: Any) -> None:
    """Also when what that one showed is gone by now: so whoever ends all of a page still sees the next one."""
    boxes = [made(send, "pages") for _ in range(3)]
    seen, token = [], ""
    for _ in boxes:
        request = pb.ListSandboxesRequest(tags=["pages"], page_size=1, page_token=token)
        answer = pb.ListSandboxesResponse.FromString(send.call("ListSandboxes", request))
        (found,), token = answer.sandboxes, answer.next_page_token
        seen.append(found.sandbox_id)
        delete(send, found.sandbox_id)
        until(send, found.sandbox_id, pb.STATE_TERMINATED)
    assert seen == boxes[::-1]
    assert token == ""
