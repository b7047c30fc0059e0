"""Random requests at every emulator, after the models of its own SDK: no internal error, nothing without a token, no neighbour spoiled.

`LOWTIDE_FUZZ_EXAMPLES` runs it for longer, `LOWTIDE_FUZZ_SEED` with another seed; a failure prints the seed it ran with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lowtide.emulators.handle import Handle
from lowtide.testing import emulator
from tests.emulators.hostile import (
    ENVD,
    Call,
    Sender,
    from_attrs_client,
    from_pydantic_client,
    from_stainless_client,
)

for _package in ("daytona", "e2b", "runloop_api_client", "modal_proto", "cwsandbox"):
    pytest.importorskip(_package)

from tests.emulators import fuzz  # noqa: E402
from tests.emulators import test_coreweave_hostile as coreweave  # noqa: E402
from tests.emulators import test_modal_hostile as modal  # noqa: E402

SEED = int(os.environ.get("LOWTIDE_FUZZ_SEED", "19"))
EXAMPLES = int(os.environ.get("LOWTIDE_FUZZ_EXAMPLES", "600"))
QUICKSTART = """
import sys
from lowtide import Sandbox
with Sandbox.run(provider=sys.argv[1]) as sandbox:
    sandbox.write_file("/tmp/a", b"content").result()
    print(sandbox.exec(["sh", "-c", "cat /tmp/a; echo hello"]).result().stdout)
"""

Send = Callable[[bool], str | None]
"""Sends one request, with the token or without; what was wrong with the answer, None for nothing."""


class Service(Protocol):
    def __init__(self, handle: Handle) -> None: ...

    def make(self) -> str:
        """A sandbox for requests to be about."""
        ...

    def end(self, sandbox_id: str) -> None: ...

    def requests(self) -> st.SearchStrategy[Send]: ...


class Http:
    """What the emulators over HTTP have in common."""

    name: str
    calls: list[Call]
    samples: ClassVar[Mapping[str, dict[str, Any]]] = MappingProxyType({})
    waits: tuple[str, ...] = ()
    """Calls that rightly answer late."""
    ids: tuple[str, ...] = ()
    may_fail: tuple[str, ...] = ()
    """Calls for which the service itself answers 500 where the kernel says no."""
    open_to_all: tuple[str, ...] = ("/health", "/config")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.known: dict[str, str] = {}
        self.fine, self.refused = self.sender(True), self.sender(False)

    def sender(self, key: bool) -> Sender:
        raise NotImplementedError

    def headers(self, call: Call, key: bool) -> dict[bytes, bytes]:
        return {}

    def learn(self, sandbox_id: str) -> str:
        self.known.update(dict.fromkeys(self.ids, sandbox_id))
        return sandbox_id

    def requests(self) -> st.SearchStrategy[Send]:
        calls = [call for call in self.calls if not any(part in call.path for part in self.waits)]
        return fuzz.requests(calls, (*self.ids, *self.known), self.samples).map(self._sending)

    def _sending(self, asked: tuple[Call, str, bytes, dict[bytes, bytes]]) -> Send:
        call, drawn, body, headers = asked

        def send(key: bool) -> str | None:
            path = drawn
            for name, value in sorted(self.known.items(), reverse=True):
                path = path.replace(fuzz.KNOWN + name, value)
            try:
                status, data = (self.fine if key else self.refused)(
                    call.method, path, body, {**self.headers(call, key), **headers}
                )
            except AssertionError as error:  # no answer
                return f"{error}: {body[:300]!r} {headers}"
            wrong = status >= 500 and status not in (501, 502) and call.path not in self.may_fail
            if not key and call.path not in self.open_to_all:
                wrong = status not in (0, 400, 401, 403, 404, 405, 413, 415, 502)
            if wrong:
                return f"{call.method} {path[:200]} {body[:300]!r} {headers}: {status} {data[:200]!r}"
            return None

        return send


class E2b(Http):
    name = "e2b"
    may_fail = ("/filesystem.Filesystem/Move",)
    ids = ("sandbox_id",)
    samples: ClassVar[Mapping[str, dict[str, Any]]] = {
        "/sandboxes": {"templateID": "base"},
        "/v2/sandboxes": {"templateID": "base"},
    }

    def __init__(self, handle: Handle) -> None:
        envd = [
            Call(method="POST", path=f"/{service}/{method}", model=sample)
            for service, methods in ENVD.items()
            for method, sample in methods.items()
        ]
        asked = ("path", "username", "signature", "signature_expiration")
        envd += [Call(method=method, path="/files", query=asked) for method in ("GET", "POST")]
        self.calls = [*from_attrs_client("e2b.api.client"), *envd, *envd]
        self.inside = {call.path for call in envd}
        self.token = ""
        super().__init__(handle)

    def sender(self, key: bool) -> Sender:
        given = self.handle.environment["E2B_API_KEY"].encode() if key else b"e2b_no"
        return Sender(self.handle.urls["e2b"], {b"X-API-KEY": given})

    def make(self) -> str:
        made = self.fine.json("POST", "/sandboxes", {"templateID": "base", "secure": True})
        self.token = made["envdAccessToken"]
        return self.learn(made["sandboxID"])

    def headers(self, call: Call, key: bool) -> dict[bytes, bytes]:
        if call.path not in self.inside:
            return {}
        to = {b"E2b-Sandbox-Id": self.known["sandbox_id"].encode()}
        return to | {b"X-Access-Token": self.token.encode()} if key else to

    def end(self, sandbox_id: str) -> None:
        self.fine("DELETE", f"/sandboxes/{sandbox_id}")


class Daytona(Http):
    name = "daytona"
    ids = ("sandboxId", "sandboxIdOrName")
    waits = ("/lsp", "/connect")
    samples: ClassVar[Mapping[str, dict[str, Any]]] = {
        "/toolbox/{sandboxId}/process/execute": {"command": "true"},
        "/toolbox/{sandboxId}/process/code-run": {"code": "1"},
        "/toolbox/{sandboxId}/process/session": {"sessionId": "s1"},
        "/toolbox/{sandboxId}/process/session/{sessionId}/exec": {"command": "true"},
        "/toolbox/{sandboxId}/process/pty": {"id": "p1"},
    }

    def __init__(self, handle: Handle) -> None:
        control = list(from_pydantic_client("daytona_api_client"))
        toolbox = [
            Call(
                method=call.method,
                path="/toolbox/{sandboxId}" + call.path,
                fields=call.fields,
                query=call.query,
                model=call.model,
            )
            for call in from_pydantic_client("daytona_toolbox_api_client")
        ]
        api = [
            Call(
                method=call.method,
                path="/api" + call.path,
                fields=call.fields,
                query=call.query,
                model=call.model,
            )
            for call in control
        ]
        self.calls = [*api, *toolbox]
        super().__init__(handle)
        self.known |= {"sessionId": "s1"}
        self.open_to_all = ("/api/health", "/api/config")

    def sender(self, key: bool) -> Sender:
        given = self.handle.environment["DAYTONA_API_KEY"].encode() if key else b"dtn_no"
        return Sender(self.handle.urls["daytona"], {b"Authorization": b"Bearer " + given})

    def make(self) -> str:
        return self.learn(self.fine.json("POST", "/api/sandbox", {})["id"])

    def end(self, sandbox_id: str) -> None:
        self.fine("DELETE", f"/api/sandbox/{sandbox_id}?force=true")


class Runloop(Http):
    name = "runloop"
    ids = ("id", "devbox_id")
    waits = ("await", "wait_for", "evictions", "axons", "/pty", "stream")
    samples: ClassVar[Mapping[str, dict[str, Any]]] = {
        "/v1/devboxes/{id}/execute": {"command": "true", "command_id": "c"},
        "/v1/devboxes/{id}/execute_async": {"command": "true"},
        "/v1/devboxes/{id}/execute_sync": {"command": "true"},
        "/v1/objects": {"name": "o", "content_type": "text"},
        "/v1/blueprints": {"name": "b"},
    }

    def __init__(self, handle: Handle) -> None:
        found = {(call.method, call.path): call for call in from_stainless_client("runloop_api_client")}
        self.calls = list(found.values())
        super().__init__(handle)

    def sender(self, key: bool) -> Sender:
        given = self.handle.environment["RUNLOOP_API_KEY"].encode() if key else b"ak_no"
        return Sender(self.handle.urls["runloop"], {b"Authorization": b"Bearer " + given})

    def make(self) -> str:
        return self.learn(
            self.fine.json("POST", "/v1/devboxes/create_and_await_running", {"name": "v"})["id"]
        )

    def end(self, sandbox_id: str) -> None:
        self.fine("POST", f"/v1/devboxes/{sandbox_id}/shutdown?force=true")


class Grpc:
    """What the emulators over gRPC have in common."""

    methods: list[Any]
    fine: frozenset[str]
    send: Any
    waits: tuple[str, ...] = ()
    ends_all: tuple[str, ...] = ()
    known: dict[str, str]

    def sample(self, method: Any) -> Any:
        raise NotImplementedError

    def requests(self) -> st.SearchStrategy[Send]:
        @st.composite
        def one(draw: Any) -> Send:
            method = draw(st.sampled_from([one for one in self.methods if one.name not in self.ends_all]))
            edits = draw(fuzz.messages(method.input_type, self.sample(method), tuple(self.known)))

            def send(key: bool) -> str | None:
                data = edits.data(self.known)
                late = method.name.startswith(self.waits)
                status = self.send(method, data, *([] if key else [()]), timeout=0.3 if late else 20)
                if not key:
                    expected = {"UNAUTHENTICATED", "INVALID_ARGUMENT", "UNIMPLEMENTED"}
                    wrong = status not in expected and method.name != "TaskExecStdinWriteStream"
                else:
                    wrong = status != "OK" and status not in self.fine
                    wrong = wrong and not (late and status in ("DEADLINE_EXCEEDED", "CANCELLED"))
                return f"{method.name} {data[:300]!r}: {status}" if wrong else None

            return send

        return one()


class Modal(Grpc):
    name = "modal"
    waits = ("SandboxWait", "SandboxGetLogs", "SandboxStdioRead", "SandboxGetTaskId", "TaskExecStdioRead")
    waits += ("TaskExecWait", "TaskExecStdin", "SandboxList", "SandboxGetTunnels", "ImageJoin", "AppGetLogs")
    waits += (
        "TaskMount",
        "SandboxWaitUntilReady",
        "SandboxRestore",
        "TaskExecPoll",
        "TaskContainer",
        "TaskSnapshot",
    )
    ends_all = ("AppStop",)

    def __init__(self, handle: Handle) -> None:
        self.send: Any = modal.Sender(handle)
        self.fine = frozenset(modal.FINE)
        self.methods = modal.methods(there=True)
        self.known = {"app_id": self.send.app_id, "image_id": self.send.image_id, "exec_id": "one"}
        self._learn(self.send.box)

    def _learn(self, box: Any) -> str:
        self.send.box = box
        metadata = [pair for pair in self.send.metadata if pair[0] != "authorization"]
        self.send.metadata = (*metadata, ("authorization", f"Bearer {box.command_router_access.jwt}"))
        self.known |= {"sandbox_id": box.sandbox_id, "task_id": box.task_id}
        return str(box.sandbox_id)

    def sample(self, method: Any) -> Any:
        return modal.sample(method, self.send)

    def make(self) -> str:
        recipe = modal.pb.Image(dockerfile_commands=["FROM python:3.11"])  # it may have been deleted, rightly
        wanted = modal.pb.ImageGetOrCreateRequest(app_id=self.send.app_id, image=recipe)
        self.send.image_id = self.known["image_id"] = self.send.ask("ImageGetOrCreate", wanted).image_id
        return self._learn(self.send.ask("SandboxCreateV2", self.send.wanted("sleep", "infinity")))

    def end(self, sandbox_id: str) -> None:
        self.send.ask("SandboxTerminateV2", modal.pb.SandboxTerminateRequest(sandbox_id=sandbox_id))


class Coreweave(Grpc):
    name = "coreweave"
    waits = ("StreamLogs", "StreamExec", "DeleteSandbox", "StopSandbox", "Exec")
    ends_all = ("PurgeSandboxes",)

    def __init__(self, handle: Handle) -> None:
        self.send = coreweave.Sender(handle)
        self.fine = frozenset(coreweave.FINE)
        self.methods = coreweave.methods()
        self.known = {"sandbox_id": ""}

    def sample(self, method: Any) -> Any:
        return coreweave.samples(method, fuzz.KNOWN + "sandbox_id")

    def make(self) -> str:
        pb = coreweave.pb
        containers = [pb.Container(image="x", command="sleep", args=["infinity"])]
        wanted = pb.CreateSandboxRequest(sandbox=pb.Sandbox(spec=pb.SandboxSpec(containers=containers)))
        made = str(pb.Sandbox.FromString(self.send.call("CreateSandbox", wanted)).sandbox_id)
        self.known["sandbox_id"] = made
        return made

    def end(self, sandbox_id: str) -> None:
        self.send.call("DeleteSandbox", coreweave.pb.DeleteSandboxRequest(sandbox_id=sandbox_id))


def alive(handle: Handle, name: str) -> list[str]:
    return [one["sandbox_id"] for one in handle.state()["sandboxes"][name]]


def end_all_but(handle: Handle, service: Any, neighbour: str) -> None:
    until = time.monotonic() + 60
    while others := [one for one in alive(handle, service.name) if one != neighbour]:
        assert time.monotonic() < until, others
        for one in others:
            service.end(one)


@pytest.mark.timeout(0 if "LOWTIDE_FUZZ_EXAMPLES" in os.environ else 280)
@pytest.mark.parametrize("kind", [E2b, Daytona, Runloop, Modal, Coreweave])
def test_random_requests_break_nothing(kind: Any, tmp_path: Path) -> None:
    with emulator(kind.name, plain=True, limit=16, home=tmp_path) as handle:
        service = kind(handle)
        neighbour = service.make()
        service.make()  # what random requests are about
        failed: list[str] = []
        tried = 0

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate],  # what fails depends on what came before: there is nothing to shrink
            suppress_health_check=list(HealthCheck),
        )
        @given(service.requests(), st.integers(0, 9))
        def run(send: Send, token: int) -> None:
            nonlocal tried
            tried += 1
            if tried % 25 == 0:
                end_all_but(handle, service, neighbour)
                service.make()
            before = alive(handle, kind.name) if token == 5 else []
            problem = send(token != 5)
            if problem is not None:
                failed.append(("without the token: " if token == 5 else "") + problem)
            if token == 5:
                after = alive(handle, kind.name)
                assert set(after) <= set(before), "made something without the token"

        run()
        where = f"{len(failed)} of {tried} with LOWTIDE_FUZZ_SEED={SEED}:\n"
        assert not failed, where + "\n".join(failed[:60])
        assert neighbour in alive(handle, kind.name)
        end_all_but(handle, service, neighbour)
        command = [sys.executable, "-c", QUICKSTART, kind.name]
        environment = {**os.environ, **handle.environment, "LOWTIDE_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.stdout == "contenthello\n\n", done.stderr
