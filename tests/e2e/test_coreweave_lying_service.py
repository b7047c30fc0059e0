"""CoreWeave's answers are not believed blindly: a service that lies, hangs or talks nonsense costs an error, no sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.coreweave_emulator import needs_emulator

from lowtide.errors import (
    LowtideError,
    RequestTimeoutError,
    SandboxError,
    SandboxNotFoundError,
    SandboxUnavailableError,
    ValidationError,
)
from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.coreweave import CoreWeaveOptions, CoreWeaveProvider, lookup, snapshots

pytestmark = [*needs_emulator, pytest.mark.timeout(60)]


class Service:
    """Keeps sandboxes in a table. `lies[METHOD]` gets the request and the honest answer, and answers in its place."""

    def __init__(self) -> None:
        from cwsandbox._proto import sandbox_pb2, sandbox_pb2_grpc

        self.pb, self._grpc = sandbox_pb2, sandbox_pb2_grpc
        self.lies: dict[str, Callable[[Any, Any], Any]] = {}
        self.table: dict[str, Any] = {}
        self.snapshots: dict[str, str] = {}
        self._requests: dict[str, str] = {}

    def running(self) -> list[str]:
        return [key for key, box in self.table.items() if box.status.state == self.pb.STATE_RUNNING]

    def CreateSandbox(self, request: Any) -> Any:
        known = self._requests.get(request.request_id)
        if known is None:
            box = self.pb.Sandbox(sandbox_id=f"box-{len(self.table)}", spec=request.sandbox.spec)
            box.status.state = self.pb.STATE_RUNNING
            known = self._requests[request.request_id] = box.sandbox_id
            self.table[known] = box
        answer = self.pb.Sandbox()
        answer.CopyFrom(self.table[known])
        answer.endpoint_share_token = "token" if request.sandbox.spec.services else ""
        return answer

    def GetSandbox(self, request: Any) -> Any:
        answer = self.pb.Sandbox()
        answer.CopyFrom(self.table[request.sandbox_id])
        return answer

    def ListSandboxes(self, request: Any) -> Any:
        found = [box for box in self.table.values() if set(request.tags) <= set(box.spec.tags)]
        return self.pb.ListSandboxesResponse(sandboxes=found)

    def DeleteSandbox(self, request: Any) -> Any:
        self.table[request.sandbox_id].status.state = self.pb.STATE_TERMINATED
        return self.pb.DeleteSandboxResponse(sandbox=self.table[request.sandbox_id])

    def CreateFileSystemSnapshot(self, request: Any) -> Any:
        key = request.request_id or f"no key {len(self.snapshots)}"
        made = self.snapshots.setdefault(key, f"snapshot-{len(self.snapshots)}")
        return self.pb.FileSystemSnapshot(file_system_snapshot_id=made, state=self.pb.SNAPSHOT_STATE_CREATING)

    def GetFileSystemSnapshot(self, request: Any) -> Any:
        return self.pb.FileSystemSnapshot(
            file_system_snapshot_id=request.file_system_snapshot_id, state=self.pb.SNAPSHOT_STATE_READY
        )

    def StreamLogs(self, request: Any) -> Any:
        return self.pb.LogEntry(data=b"all")

    @asynccontextmanager
    async def provider(self) -> AsyncIterator[CoreWeaveProvider]:
        import grpc

        outer = self

        class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                name = details.method.rpartition("/")[2]
                parse = getattr(outer.pb, f"{name}Request").FromString

                async def answer(data: bytes, context: Any) -> bytes:
                    request = parse(data)
                    honest = getattr(outer, name)(request)
                    told = outer.lies[name](request, honest) if name in outer.lies else honest
                    if asyncio.iscoroutine(told):
                        told = await told
                    if isinstance(told, grpc.StatusCode):
                        await context.abort(told, "so it says")
                    return told if isinstance(told, bytes) else bytes(told.SerializeToString())

                async def stream(data: bytes, context: Any) -> AsyncIterator[bytes]:
                    yield await answer(data, context)

                if name == "StreamLogs":
                    return grpc.unary_stream_rpc_method_handler(stream)
                return grpc.unary_unary_rpc_method_handler(answer)

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        connected = CoreWeaveProvider.connect({}, {"api_key": "key", "base_url": f"http://127.0.0.1:{port}"})
        try:
            yield connected
        finally:
            await connected.aclose()
            await server.stop(0)


def spec(**more: Any) -> SandboxSpec:
    labels = Labels(lease_id=new_lease_id(), ledger_id="0123456789abcdef", owner="owner")
    return SandboxSpec(labels=labels, lifetime_seconds=300.0, **more)


@pytest.mark.parametrize("lie", ["another's", "nobody's", "nonsense", "taken before"])
async def test_what_a_create_answers_with_is_ended_only_when_it_is_the_leases_own(lie: str) -> None:
    import grpc

    service = Service()
    async with service.provider() as provider:
        another = await provider.create(spec())
        service.lies["CreateSandbox"] = lambda request, honest: {
            "another's": service.table[another.sandbox_id],
            "nobody's": service.pb.Sandbox(),
            "nonsense": b"\xff\xff",
            "taken before": grpc.StatusCode.ALREADY_EXISTS,
        }[lie]
        made = await provider.create(spec())
        assert made.sandbox_id != another.sandbox_id
        assert await provider.destroy(made.sandbox_id)
        assert service.running() == [another.sandbox_id]


async def test_a_request_that_was_taken_before_leaves_open_what_it_made() -> None:
    import grpc

    service = Service()
    service.lies["CreateSandbox"] = lambda request, honest: grpc.StatusCode.ALREADY_EXISTS
    service.lies["ListSandboxes"] = lambda request, honest: service.pb.ListSandboxesResponse()
    async with service.provider() as provider:
        with pytest.raises(
            SandboxUnavailableError
        ):  # any other error would settle the lease, with one behind it
            await provider.create(spec())


async def test_a_replay_that_answers_with_anothers_sandbox_proves_nothing() -> None:
    service = Service()
    async with service.provider() as provider:
        another = await provider.create(spec())
        service.lies["CreateSandbox"] = lambda request, honest: service.table[another.sandbox_id]
        assert await provider.replay(spec()) is None


@pytest.mark.parametrize("lie", ["another's", "nobody's"])
async def test_an_answer_about_another_sandbox_does_not_prove_that_this_one_is_gone(lie: str) -> None:
    service = Service()
    over = service.pb.Sandbox(sandbox_id="another" if lie == "another's" else "")
    over.status.state = service.pb.STATE_TERMINATED

    def ignored(request: Any, honest: Any) -> Any:
        service.table[request.sandbox_id].status.state = service.pb.STATE_RUNNING
        del service.lies["DeleteSandbox"]
        return service.pb.DeleteSandboxResponse(sandbox=over)

    async with service.provider() as provider:
        made = await provider.create(spec())
        service.lies["GetSandbox"] = lambda request, honest: over
        with pytest.raises(SandboxUnavailableError):
            await provider.get(made.sandbox_id)
        del service.lies["GetSandbox"]
        service.lies["DeleteSandbox"] = ignored
        assert await provider.destroy(made.sandbox_id)
        assert service.running() == []


async def test_the_share_token_is_had_after_a_lost_answer() -> None:
    import grpc

    service, asked = Service(), []

    def lost(request: Any, honest: Any) -> Any:
        asked.append(request)
        return grpc.StatusCode.UNAVAILABLE if len(asked) == 1 else honest

    service.lies["CreateSandbox"] = lost
    options = CoreWeaveOptions(services=[{"port": 80, "visibility": "public"}])
    async with service.provider() as provider:
        made = await provider.create(spec(options=options))
        service.table[made.sandbox_id].status.services.add(port=80, url="http://there")
        assert (await provider.url(made.sandbox_id, 80)).headers == {"X-Sandbox-Share-Token": "token"}
    assert len(service.table) == 1


async def test_a_list_without_an_end_is_an_error() -> None:
    service, pages = Service(), []

    def endless(request: Any, honest: Any) -> Any:
        pages.append(request)
        return service.pb.ListSandboxesResponse(next_page_token=f"page-{len(pages) % 2}")

    service.lies["ListSandboxes"] = endless
    async with service.provider() as provider:
        with pytest.raises(SandboxUnavailableError, match="no end"):
            [one async for one in provider.list({})]


async def test_a_time_that_is_none_is_left_out() -> None:
    service = Service()

    def late(request: Any, honest: Any) -> Any:
        honest.status.create_time.seconds = 2**62
        return honest

    service.lies["CreateSandbox"] = late
    async with service.provider() as provider:
        assert (await provider.create(spec())).created_at is None


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("PAUSED", SandboxUnavailableError),
        ("TERMINATING", SandboxUnavailableError),
        ("TERMINATED", SandboxNotFoundError),
    ],
)
async def test_only_what_is_over_is_not_there_to_be_renewed(state: str, error: type[LowtideError]) -> None:
    """Whoever renews it settles its lease when it is not there."""
    service = Service()
    async with service.provider() as provider:
        made = await provider.create(spec())
        service.table[made.sandbox_id].status.state = service.pb.State.Value(f"STATE_{state}")
        with pytest.raises(error):
            await provider.renew(made.sandbox_id, 300.0)


async def test_a_log_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "SECONDS", 0.3)
    service = Service()
    service.lies["StreamLogs"] = lambda request, honest: asyncio.sleep(30, honest)
    async with service.provider() as provider:
        made = await provider.create(spec())
        with pytest.raises(RequestTimeoutError):
            [one async for one in provider.logs(made.sandbox_id, follow=False, tail_lines=None)]


async def test_a_log_that_cannot_be_read_is_not_its_end() -> None:
    service = Service()
    service.lies["StreamLogs"] = lambda request, honest: b"\xff\xff"
    async with service.provider() as provider:
        made = await provider.create(spec())
        with pytest.raises(SandboxUnavailableError, match="cannot be read"):
            [one async for one in provider.logs(made.sandbox_id, follow=True, tail_lines=None)]


async def test_a_snapshot_whose_answer_is_lost_is_taken_once() -> None:
    import grpc

    answers = iter([grpc.StatusCode.UNAVAILABLE])
    service = Service()
    service.lies["CreateFileSystemSnapshot"] = lambda request, honest: next(answers, honest)
    async with service.provider() as provider:
        made = await provider.create(spec())
        assert await provider.snapshot(made.sandbox_id, "name") == "snapshot-0"
    assert list(service.snapshots.values()) == ["snapshot-0"]


async def test_a_snapshot_that_is_never_ready_is_an_error_with_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "_READY_SECONDS", 0.1)
    service = Service()
    creating = service.pb.FileSystemSnapshot(state=service.pb.SNAPSHOT_STATE_CREATING)
    service.lies["GetFileSystemSnapshot"] = lambda request, honest: creating
    async with service.provider() as provider:
        made = await provider.create(spec())
        with pytest.raises(RequestTimeoutError, match="snapshot-0"):
            await provider.snapshot(made.sandbox_id, "name")


async def test_a_snapshot_that_failed_says_why() -> None:
    service = Service()
    failed = service.pb.FileSystemSnapshot(state=service.pb.SNAPSHOT_STATE_FAILED, state_reason="no bucket")
    service.lies["GetFileSystemSnapshot"] = lambda request, honest: failed
    async with service.provider() as provider:
        made = await provider.create(spec())
        with pytest.raises(SandboxError, match="no bucket"):
            await provider.snapshot(made.sandbox_id, "name")


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://a#b"],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValidationError, match="CWSANDBOX_BASE_URL"):
        CoreWeaveProvider.connect({}, {"api_key": "key", "base_url": address})


@pytest.mark.parametrize(
    "given",
    [{"image_pull_credentials": "text"}, {"secrets": "text"}, {"mounted_files": [{"file_content": b""}]}],
)
async def test_options_of_a_wrong_shape_are_refused_before_anything_is_sent(given: dict[str, Any]) -> None:
    service = Service()
    async with service.provider() as provider:
        with pytest.raises(ValidationError) as caught:
            await provider.create(spec(options=CoreWeaveOptions(**given)))
        assert caught.value.nothing_sent
    assert not service.table
