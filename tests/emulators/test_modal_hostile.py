"""Malformed gRPC requests at every method of the emulated Modal service: refused with its status, never INTERNAL.

What one caller sends wrongly must not spoil anything for another: afterwards a neighbour's sandbox is still
listed, found and used.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator
from tests.emulators.hostile_messages import BYTES, kind_of, wrongly

pytest.importorskip("modal_proto")
grpc = pytest.importorskip("grpc")
from google.protobuf.message import Message  # noqa: E402
from modal_proto import api_pb2 as pb  # noqa: E402
from modal_proto import task_command_router_pb2 as tpb  # noqa: E402

from lowtide.emulators.modal.calls import CONTROL, ROUTER  # noqa: E402
from lowtide.emulators.modal.control import Control  # noqa: E402
from lowtide.emulators.modal.router import Router  # noqa: E402

FINE = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "UNIMPLEMENTED",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator("modal", limit=12, home=tmp_path_factory.mktemp("emulator")) as handle:
        yield handle


class Sender:
    """Raw messages to any method, and a neighbour whose sandbox must not notice."""

    def __init__(self, handle: Handle) -> None:
        found = handle.environment
        self.target = handle.urls["modal"].removeprefix("http://")
        self.channel = grpc.insecure_channel(self.target)
        self.metadata = (
            ("x-modal-client-type", "1"),
            ("x-modal-token-id", found["MODAL_TOKEN_ID"]),
            ("x-modal-token-secret", found["MODAL_TOKEN_SECRET"]),
        )
        self.app_id = self.ask(
            "AppGetOrCreate", pb.AppGetOrCreateRequest(app_name="a", object_creation_type=1)
        ).app_id
        recipe = pb.Image(dockerfile_commands=["FROM python:3.11"])
        self.image_id = self.ask(
            "ImageGetOrCreate", pb.ImageGetOrCreateRequest(app_id=self.app_id, image=recipe)
        ).image_id
        self.box = self.ask("SandboxCreateV2", self.wanted("sleep", "infinity"))
        self.metadata += (("authorization", f"Bearer {self.box.command_router_access.jwt}"),)

    def wanted(self, *words: str) -> Any:
        definition = pb.Sandbox(entrypoint_args=words, image_id=self.image_id, timeout_secs=600)
        return pb.SandboxCreateV2Request(app_id=self.app_id, definition=definition)

    def __call__(self, method: Any, data: bytes, metadata: Any = None, timeout: float = 20) -> str:
        """The name of the status it was answered with."""
        path = f"/{method.containing_service.full_name}/{method.name}"
        sent = self.metadata if metadata is None else metadata
        given = iter([data, data]) if method.client_streaming else data
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        try:
            answer = getattr(self.channel, kind)(path)(given, metadata=sent, timeout=timeout)
            if method.server_streaming:
                list(answer)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def ask(self, name: str, request: Message) -> Any:
        service = CONTROL if name in CONTROL.methods_by_name else ROUTER
        method = service.methods_by_name[name]
        path = f"/{service.full_name}/{name}"
        answer = self.channel.unary_unary(path)(
            request.SerializeToString(), metadata=self.metadata, timeout=30
        )
        return kind_of(method.output_type).FromString(answer)


@pytest.fixture
def send(served: Handle) -> Iterator[Sender]:
    sender = Sender(served)
    yield sender
    # Nothing that was sent has spoiled what others see and do.
    listed = sender.ask("SandboxListV2", pb.SandboxListRequest(app_id=sender.app_id))
    assert sender.box.sandbox_id in [one.id for one in listed.sandboxes]
    start = tpb.TaskExecStartRequest(
        task_id=sender.box.task_id, exec_id="last", command_args=["sh", "-c", "exit 7"]
    )
    sender.ask("TaskExecStart", start)
    wait = tpb.TaskExecWaitRequest(task_id=sender.box.task_id, exec_id="last")
    assert sender.ask("TaskExecWait", wait).code == 7
    for one in listed.sandboxes:
        sender.ask("SandboxTerminateV2", pb.SandboxTerminateRequest(sandbox_id=one.id))
    sender.channel.close()


def methods(*, there: bool) -> list[Any]:
    every = [(one, Control) for one in CONTROL.methods] + [(one, Router) for one in ROUTER.methods]
    return [method for method, handlers in every if hasattr(handlers, method.name) is there]


def sample(method: Any, send: Sender) -> Message:
    """A request that would do, so that a single wrong field is the only one."""
    request: Any = kind_of(method.input_type)()
    if method.name in ("SandboxCreate", "SandboxCreateV2"):
        request.app_id = send.app_id
        request.definition.CopyFrom(send.wanted("true").definition)
    elif method.name == "ImageGetOrCreate":
        request.app_id = send.app_id
    elif method.name == "TaskExecStart":
        request.task_id, request.exec_id = send.box.task_id, "one"
        request.command_args.append("true")
    elif method.name in ("TaskExecPoll", "TaskExecStdinWrite", "TaskSnapshotFilesystem"):
        request.task_id = send.box.task_id
    elif method.name in ("SandboxTagsSet", "SandboxTagsSetV2", "SandboxGetTaskIdV2"):
        request.sandbox_id = send.box.sandbox_id
    return request  # type: ignore[no-any-return]


@pytest.mark.timeout(280)
def test_hostile_requests_at_every_method_are_refused(served: Handle, send: Sender) -> None:
    failed, tried, seen = [], 0, set()
    for method in methods(there=True):
        if method.name == "AppStop":
            continue
        messages = [one.SerializeToString() for one in wrongly(method.input_type, sample(method, send), 2)]
        for data in (*messages, *BYTES):
            status = send(method, data)
            tried += 1
            seen.add(status)
            if status != "OK" and status not in FINE:
                failed.append(f"{method.name} {data[:80]!r}: {status}")
    assert not failed, f"{len(failed)} of {tried}:\n" + "\n".join(failed[:40])
    assert {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"} <= seen


def test_every_method_needs_the_key_and_what_is_not_there_says_so(served: Handle, send: Sender) -> None:
    everything = [*methods(there=True), *methods(there=False)]
    assert len(everything) > 200
    for metadata in (
        (),
        (("x-modal-token-id", "ak-x"), ("x-modal-token-secret", "as-x"), ("authorization", "Bearer x.y.z")),
    ):
        answers = {method.name: send(method, b"", metadata) for method in methods(there=True)}
        refused = {name for name, status in answers.items() if status == "UNAUTHENTICATED"}
        assert {name for name in answers if name not in refused} <= {"TaskExecStdinWriteStream"}, answers
    assert {send(method, b"") for method in methods(there=False)} == {"UNIMPLEMENTED"}


def test_what_does_not_parse_is_an_invalid_argument(served: Handle, send: Sender) -> None:
    for data in (b"\xff", b"\x0a\x05ab", b"\x12\x02\xff\xfe"):
        assert send(CONTROL.methods_by_name["SandboxCreateV2"], data) == "INVALID_ARGUMENT"


def test_huge_messages_and_foreign_hosts_are_refused(served: Handle, send: Sender) -> None:
    create = CONTROL.methods_by_name["SandboxCreateV2"]
    for length, status in ((200 << 20, "RESOURCE_EXHAUSTED"), (5, "INVALID_ARGUMENT")):
        assert _raw(send, create.name, b"\0" + length.to_bytes(4, "big") + b"\xff" * 5) == status
    assert _raw(send, create.name, b"\1\0\0\0\0") == "UNIMPLEMENTED"
    foreign = grpc.insecure_channel(send.target, options=(("grpc.default_authority", "evil.example"),))
    with foreign, pytest.raises(grpc.RpcError) as caught:
        foreign.unary_unary(f"/{CONTROL.full_name}/ClientHello")(b"", metadata=send.metadata, timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def _raw(send: Sender, name: str, data: bytes) -> str:
    """Bytes in a stream of their own, as no client library would frame them."""
    h2 = pytest.importorskip("h2.connection")
    events = pytest.importorskip("h2.events")
    host, _, port = send.target.rpartition(":")
    connection = h2.H2Connection()
    connection.initiate_connection()
    head = [(":method", "POST"), (":scheme", "http"), (":authority", send.target), ("te", "trailers")]
    head += [(":path", f"/{CONTROL.full_name}/{name}"), ("content-type", "application/grpc"), *send.metadata]
    head.sort(key=lambda pair: not pair[0].startswith(":"))
    connection.send_headers(1, head)
    connection.send_data(1, data, end_stream=True)
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(connection.data_to_send())
        while received := sock.recv(65_536):
            for event in connection.receive_data(received):
                for key, value in getattr(event, "headers", None) or ():
                    if key in (b"grpc-status", "grpc-status"):
                        number = int(value)
                        return next(c.name for c in grpc.StatusCode if c.value[0] == number)
                assert not isinstance(event, events.ConnectionTerminated)
            sock.sendall(connection.data_to_send())
    return "CLOSED"


def test_what_would_only_fail_later_is_refused_when_it_is_asked_for(served: Handle, send: Sender) -> None:
    """Each was answered as if the sandbox had ended, or never."""
    start = ROUTER.methods_by_name["TaskExecStart"]

    def command(**more: Any) -> bytes:
        given = {"task_id": send.box.task_id, "exec_id": "odd", "command_args": ["true"], **more}
        return bytes(tpb.TaskExecStartRequest(**given).SerializeToString())

    assert send(start, command(command_args=["", "x"])) == "INVALID_ARGUMENT"
    assert send(start, command(env={"A=B": "c"})) == "INVALID_ARGUMENT"
    create = CONTROL.methods_by_name["SandboxCreateV2"]
    assert send(create, send.wanted("").SerializeToString()) == "INVALID_ARGUMENT"
    odd = send.wanted("true")
    odd.ephemeral_secrets.contents["A=B"] = "c"
    assert send(create, odd.SerializeToString()) == "INVALID_ARGUMENT"
    wait = CONTROL.methods_by_name["SandboxWaitV2"]
    for never in ("nan", "inf"):
        asked = pb.SandboxWaitRequest(sandbox_id=send.box.sandbox_id, timeout=float(never))
        assert send(wait, asked.SerializeToString(), timeout=5) == "INVALID_ARGUMENT"


def test_headers_and_bodies_of_any_bytes_are_answered(served: Handle, send: Sender) -> None:
    key = [(name.encode(), value.encode()) for name, value in send.metadata]
    whole = bytes(5)
    for headers, body, status in (
        ([(b"x-modal-token-id", b"\xff\xfe"), (b"x-a", b"\xff")], whole, b"16"),
        (key, whole, b"0"),
        ([*key, (b"x-bin", b"\xff\xfe")], whole, b"3"),
        (key, b"\0\0", b"3"),
        (key, b"\0\0\0\0\5ab", b"3"),
        (key, b"\0\0\0\0\5", b"3"),
        *(([*key, (b"grpc-timeout", time)], whole, b"4") for time in (b"0n", b"0S", b"00H")),
        *(
            ([*key, (b"grpc-timeout", time)], whole, b"3")
            for time in (b"", b"S", b"-1S", b"1.5S", b"1x", b"\xff")
        ),
        *(
            ([*key, (b"grpc-timeout", time)], whole, b"0")
            for time in (b"1n", b"1u", b"99999999H", b"9" * 999 + b"S")
        ),
    ):
        assert raw_status(send, headers, body) == status, (headers[-1], body)


def raw_status(send: Sender, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """What a call that no client would send is answered with."""
    h2 = pytest.importorskip("h2.connection")
    config = pytest.importorskip("h2.config").H2Configuration(
        header_encoding=None, validate_outbound_headers=False
    )
    host, _, port = send.target.partition(":")
    connection = h2.H2Connection(config)
    connection.initiate_connection()
    head = {":method": "POST", ":scheme": "http", ":authority": send.target, "te": "trailers"}
    head |= {":path": f"/{CONTROL.full_name}/ClientHello", "content-type": "application/grpc"}
    connection.send_headers(1, [(k.encode(), v.encode()) for k, v in sorted(head.items())] + headers)
    connection.send_data(1, body, end_stream=True)
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(connection.data_to_send())
        found: dict[bytes, bytes] = {}
        while b"grpc-status" not in found:
            data = raw.recv(65536)
            assert data, "the connection was ended without an answer"
            for event in connection.receive_data(data):
                found.update(getattr(event, "headers", ()))
    return found[b"grpc-status"]


def test_bytes_that_are_no_http2_end_the_connection_and_nothing_else(served: Handle, send: Sender) -> None:
    host, _, port = send.target.rpartition(":")
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 10_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\1\4\0\0\0\0\0\xff",  # settings of one byte
    ):
        with socket.create_connection((host, int(port)), timeout=20) as sock:
            sock.sendall(data)
            sock.settimeout(20)
            try:
                while sock.recv(65_536):
                    pass
            except ConnectionResetError:
                pass
