"""Malformed requests at every call of the emulated services: refused as the service refuses, never an internal error.

What one caller sends wrongly must not spoil anything for another: afterwards a neighbour's sandbox is still
listed, found and used, and a quickstart runs.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from lowtide.emulators.handle import Handle
from lowtide.errors import ValidationError
from lowtide.testing import emulator
from tests.emulators.hostile import (
    ENVD,
    HEADERS,
    UPLOAD_PATH,
    UPLOADS,
    Call,
    Sender,
    bodies,
    from_attrs_client,
    from_pydantic_client,
    from_stainless_client,
)

pytest.importorskip("daytona")
pytest.importorskip("e2b")
pytest.importorskip("runloop_api_client")

ALLOWED = {501, 502}  # not emulated; nobody listens on that port of the sandbox


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with emulator(
        "e2b", "daytona", "runloop", plain=True, limit=24, home=tmp_path_factory.mktemp("emulator")
    ) as handle:
        yield handle


def e2b(served: Handle, *, key: bool = True) -> Sender:
    given = served.environment["E2B_API_KEY"].encode() if key else b"e2b_no"
    return Sender(served.urls["e2b"], {b"X-API-KEY": given})


def daytona(served: Handle, part: str = "/api", *, key: bool = True) -> Sender:
    given = served.environment["DAYTONA_API_KEY"].encode() if key else b"dtn_no"
    return Sender(served.urls["daytona"] + part, {b"Authorization": b"Bearer " + given})


def runloop(served: Handle, *, key: bool = True) -> Sender:
    given = served.environment["RUNLOOP_API_KEY"].encode() if key else b"ak_no"
    return Sender(served.urls["runloop"], {b"Authorization": b"Bearer " + given})


@pytest.fixture
def runloop_neighbour(served: Handle) -> Iterator[str]:
    send = runloop(served)
    made = send.json("POST", "/v1/devboxes/create_and_await_running", {"name": "neighbour"})["id"]
    yield made
    assert made in [
        one["id"] for one in send.json("GET", "/v1/devboxes?limit=5000&status=running")["devboxes"]
    ]
    done = send.json("POST", f"/v1/devboxes/{made}/execute", {"command": "echo hello", "command_id": "last"})
    assert done["stdout"] == "hello\n"
    for one in send.json("GET", "/v1/devboxes?limit=5000")["devboxes"]:
        send.json("POST", f"/v1/devboxes/{one['id']}/shutdown?force=true")


@pytest.fixture
def e2b_neighbour(served: Handle) -> Iterator[str]:
    send = e2b(served)
    made = send.json("POST", "/sandboxes", {"templateID": "base", "timeout": 600})["sandboxID"]
    yield made
    # Nothing that was sent has spoiled what others see and do.
    assert made in [one["sandboxID"] for one in send.json("GET", "/v2/sandboxes")]
    send.json("GET", f"/sandboxes/{made}")
    for one in send.json("GET", "/v2/sandboxes"):
        send.json("DELETE", f"/sandboxes/{one['sandboxID']}")
    quick = send.json("POST", "/sandboxes", {"templateID": "base"})["sandboxID"]
    send.json("DELETE", f"/sandboxes/{quick}")
    assert send.json("GET", "/v2/sandboxes") == []


@pytest.fixture
def daytona_neighbour(served: Handle) -> Iterator[str]:
    send = daytona(served)
    made = send.json("POST", "/sandbox", {})["id"]
    yield made
    assert made in [one["id"] for one in send.json("GET", "/sandbox?limit=100")["items"]]
    inside = daytona(served, f"/toolbox/{made}")
    assert inside.json("POST", "/process/execute", {"command": "echo hello"})["result"] == "hello\n"
    for one in send.json("GET", "/sandbox?limit=100")["items"]:
        status, _ = send("DELETE", f"/sandbox/{one['id']}")
        assert status in (200, 404, 409)


def attempts(calls: Iterable[Call], send: Sender, known: dict[str, str]) -> list[str]:
    """Everything wrong about every call; answers the ones that got an internal error."""
    failed = []
    for call in calls:
        path = re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], "none"), call.path)
        tried: list[tuple[str, bytes, dict[bytes, bytes]]] = [
            (path, body, {}) for body in (bodies(call) if call.method != "GET" else ())
        ]
        tried += [
            (f"{path}?{name}={quote(value)}", b"", {})
            for name in call.query
            for value in ("", "x", "-1", "\u0663", "9" * 30, "9" * 5000, "\0", "1e308", "\ud7ff", "NaN")
        ]
        tried += [(f"{path}?{name}=%ED%A0%80%FF", b"", {}) for name in call.query]
        for name in re.findall(r"\{(\w+)\}", call.path):
            for value in ("%00", "%FF", "..%2F..", "\u0663", "9" * 30, "x" * 3000, "%F0%9F%92%A9"):
                wrong = re.sub(
                    r"\{(\w+)\}",
                    lambda found, name=name, value=value: (
                        quote(value, safe="%") if found[1] == name else known.get(found[1], "none")
                    ),
                    call.path,
                )
                tried.append((wrong, b"{}", {}))
        for target, body, headers in tried:
            status, data = send(call.method, target, body, headers)
            if status >= 500 and status not in ALLOWED:
                failed.append(
                    f"{call.method} {target[:120]} {body[:120]!r} {headers}: {status} {data[:200]!r}"
                )
    return failed


def report(failed: list[str]) -> None:
    assert not failed, f"{len(failed)} internal errors:\n" + "\n".join(failed[:60])


def test_hostile_requests_at_every_call_of_e2b_are_refused(served: Handle, e2b_neighbour: str) -> None:
    samples = {"POST /sandboxes": {"templateID": "base"}, "POST /v2/sandboxes": {"templateID": "base"}}
    calls = [
        Call(
            method=call.method,
            path=call.path,
            fields=call.fields,
            query=call.query,
            sample=samples.get(f"{call.method} {call.path}", {}),
        )
        for call in from_attrs_client("e2b.api.client")
    ]
    assert len(calls) > 40
    send = e2b(served)
    victim = send.json("POST", "/sandboxes", {"templateID": "base"})["sandboxID"]
    report(attempts(calls, send, {"sandbox_id": victim}))


def test_hostile_headers_are_refused_before_anything_else(
    served: Handle, e2b_neighbour: str, daytona_neighbour: str
) -> None:
    targets = [
        (e2b(served), "GET", "/v2/sandboxes"),
        (runloop(served), "POST", "/v1/devboxes"),
        (runloop(served, key=False), "POST", "/v1/devboxes"),
        (e2b(served), "POST", "/sandboxes"),
        (e2b(served, key=False), "POST", "/sandboxes"),
        (daytona(served), "GET", "/sandbox"),
        (daytona(served), "POST", "/sandbox"),
        (daytona(served, key=False), "POST", "/sandbox"),
        (daytona(served, f"/toolbox/{daytona_neighbour}"), "POST", "/process/execute"),
        (daytona(served, f"/toolbox/{daytona_neighbour}"), "POST", "/files/upload?path=x"),
        (daytona(served, f"/toolbox/{daytona_neighbour}"), "POST", "/files/bulk-upload"),
    ]
    failed = []
    for send, method, path in targets:
        for headers in HEADERS:
            status, data = send(method, path, b"{no}", headers)
            if status >= 500 or (method == "POST" and status in (200, 201)):
                failed.append(f"{method} {path} {headers}: {status} {data[:200]!r}")
    report(failed)


def test_hostile_requests_at_every_call_of_daytonas_control_plane_are_refused(
    served: Handle, daytona_neighbour: str
) -> None:
    calls = list(from_pydantic_client("daytona_api_client"))
    assert len(calls) > 150
    send = daytona(served)
    victim = send.json("POST", "/sandbox", {})["id"]
    known = {"sandboxId": victim, "sandboxIdOrName": victim, "port": "3000"}
    report(attempts(calls, send, known))


def test_hostile_requests_at_every_call_of_daytonas_toolbox_are_refused(
    served: Handle, daytona_neighbour: str
) -> None:
    samples: dict[str, dict[str, Any]] = {
        "/process/execute": {"command": "true"},
        "/process/code-run": {"code": "1"},
        "/process/session": {"sessionId": "s1"},
        "/process/session/{sessionId}/exec": {"command": "true"},
        "/process/pty": {"id": "p1"},
    }
    calls = [
        Call(
            method=call.method,
            path=call.path,
            fields=call.fields,
            query=call.query,
            sample=samples.get(call.path, {}),
        )
        for call in from_pydantic_client("daytona_toolbox_api_client")
    ]
    assert len(calls) > 90
    control = daytona(served)
    victim = control.json("POST", "/sandbox", {})["id"]
    send = daytona(served, f"/toolbox/{victim}")
    send("POST", "/process/session", b'{"sessionId": "none"}')
    report(attempts(calls, send, {}))


def test_hostile_requests_at_envd_are_refused(served: Handle, e2b_neighbour: str) -> None:
    made = e2b(served).json("POST", "/sandboxes", {"templateID": "base", "secure": False})["sandboxID"]
    send = e2b(served)
    send.headers |= {b"E2b-Sandbox-Id": made.encode()}
    calls = [
        Call(method="POST", path=f"/{service}/{method}", fields=tuple(sample), sample=sample)
        for service, methods in ENVD.items()
        for method, sample in methods.items()
    ]
    calls += [Call(method="POST", path="/files", query=("path", "username", "signature"))]
    calls += [
        Call(method="GET", path="/files", query=("path", "username", "signature", "signature_expiration"))
    ]
    failed = attempts(calls, send, {})
    stream = {b"Content-Type": b"application/connect+json", b"Connect-Timeout-Ms": b"500"}
    for body in (b"", b"\0", b"\0\0\0\0\2{}", b"\0\xff\xff\xff\xff", b"\0\0\0\0\2[]", b"\2\0\0\0\2{}"):
        for path in ("/process.Process/Start", "/process.Process/Connect", "/filesystem.Filesystem/WatchDir"):
            status, data = send("POST", path, body, stream)
            if status >= 500 and status not in ALLOWED:
                failed.append(f"{path} {body!r}: {status} {data[:200]!r}")
    start = {"process": {"cmd": "/bin/true", "args": [], "envs": {}, "cwd": "/"}}
    for name in start["process"]:
        for value in (None, 1, "\0", [1], {"a": 1}, [["x"]], {"\0": "x"}, {"a=b": "x"}):
            text = json.dumps({"process": {**start["process"], name: value}}).encode()
            status, data = send(
                "POST", "/process.Process/Start", b"\0" + len(text).to_bytes(4, "big") + text, stream
            )
            if status >= 500 and status not in ALLOWED:
                failed.append(f"start {name}={value!r}: {status} {data[:200]!r}")
    report(failed)


def test_hostile_requests_at_every_call_of_runloop_are_refused(
    served: Handle, runloop_neighbour: str
) -> None:
    samples: dict[str, dict[str, Any]] = {
        "/v1/devboxes/{id}/execute": {"command": "true", "command_id": "c"},
        "/v1/devboxes/{id}/execute_async": {"command": "true"},
        "/v1/devboxes/{id}/execute_sync": {"command": "true"},
        "/v1/devboxes/{id}/wait_for_status": {"statuses": ["running"], "timeout_seconds": 0},
        "/v1/objects": {"name": "o", "content_type": "text"},
    }
    found = {(call.method, call.path): call for call in from_stainless_client("runloop_api_client")}
    assert len(found) > 60
    unwanted = (
        "create_and_await_running",
        "evictions",
        "axons",
        "/pty",
    )  # the first waits for what never boots
    calls = [
        Call(
            method=call.method,
            path=call.path,
            fields=call.fields,
            query=call.query,
            sample=samples.get(call.path, {}),
        )
        for call in found.values()
        if not any(part in call.path for part in unwanted)
    ]
    send = runloop(served)
    victim = send.json("POST", "/v1/devboxes/create_and_await_running", {"name": "victim"})["id"]
    report(attempts(calls, send, {"id": victim, "devbox_id": victim}))


def test_an_upload_that_is_not_whole_is_refused(
    served: Handle, daytona_neighbour: str, runloop_neighbour: str
) -> None:
    kind = {b"Content-Type": b"multipart/form-data; boundary=b"}
    inside, devbox = daytona(served, f"/toolbox/{daytona_neighbour}"), f"/v1/devboxes/{runloop_neighbour}"
    for body in UPLOADS:
        answers = [
            inside("POST", "/files/upload-v2?path=/tmp/x", body, kind),
            inside("POST", "/files/bulk-upload", body.replace(b'"file"', b'"files[0].file"'), kind),
            runloop(served)("POST", f"{devbox}/upload_file", UPLOAD_PATH + body, kind),
        ]
        assert [status for status, _ in answers] == [400] * 3, (body, answers)


def test_the_admin_endpoint_refuses_what_would_break_every_later_call(served: Handle) -> None:
    parts = urlsplit(served._admin["url"])
    send = Sender(
        f"http://{parts.netloc}{parts.path}",
        {b"Authorization": b"Bearer " + served._admin["token"].encode()},
    )
    for seconds in (b"1e308", b"NaN", b"Infinity", b"-1", b'"x"', b"null", b"true", b"9" * 400, b"[]"):
        status, data = send("POST", "/clock", b'{"advance_seconds": ' + seconds + b"}")
        assert status == 400, (seconds, status, data)
    for fault in (
        b"[]",
        b"1",
        b'{"name": []}',
        b'{"name": "rate-limit", "seconds": NaN}',
        b'{"provider": 1}',
    ):
        status, data = send("POST", "/faults", fault)
        assert status == 400, (fault, status, data)
    assert send("DELETE", "/faults/%D9%A3")[0] in (400, 404)
    assert send("DELETE", "/faults/x")[0] in (400, 404)
    for headers in HEADERS:
        assert send("GET", "/state", b"", headers)[0] in (0, 200, 400, 401, 403, 415)
    assert send.json("GET", "/state")["now"] > 0


def test_nothing_is_done_without_a_token(served: Handle, e2b_neighbour: str, daytona_neighbour: str) -> None:
    before = served.state()["sandboxes"]
    known = {
        "sandbox_id": e2b_neighbour,
        "sandboxId": daytona_neighbour,
        "sandboxIdOrName": daytona_neighbour,
        "sessionId": "s",
    }
    senders = [
        (e2b(served, key=False), from_attrs_client("e2b.api.client")),
        (daytona(served, key=False), from_pydantic_client("daytona_api_client")),
        (runloop(served, key=False), from_stainless_client("runloop_api_client")),
        (
            daytona(served, f"/toolbox/{daytona_neighbour}", key=False),
            from_pydantic_client("daytona_toolbox_api_client"),
        ),
    ]
    let_in = []
    for send, calls in senders:
        for call in calls:
            path = re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], "none"), call.path)
            status, _ = send(call.method, path, b'{"templateID": "base"}')
            if status not in (400, 401, 403, 404, 405) and path not in ("/health", "/config"):
                let_in.append(f"{call.method} {path}: {status}")
    assert not let_in
    after = served.state()["sandboxes"]
    for name in before:
        assert [one["sandbox_id"] for one in before[name]] == [one["sandbox_id"] for one in after[name]]


def test_the_proxy_refuses_hosts_and_ports_that_cannot_be(served: Handle) -> None:
    parts = urlsplit(served._admin["url"])
    for target in (b"x:99999", b"x:0", b"[:443", b"x:\xd9\xa3", b"x", b":443", b"x:-1", b"x:443:443 "):
        with contextlib.closing(socket.create_connection((parts.hostname, parts.port), 10)) as connection:
            connection.sendall(b"CONNECT " + target + b" HTTP/1.1\r\n\r\n")
            connection.settimeout(10)
            answer = connection.recv(100)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 407")), (target, answer)


def test_what_once_spoiled_a_neighbour_is_refused_and_spoils_nothing(
    served: Handle, e2b_neighbour: str, daytona_neighbour: str
) -> None:
    """Each of these once broke a later call of somebody else; the neighbours' fixtures look at them afterwards."""
    send = e2b(served)
    assert send("POST", "/sandboxes", b'{"templateID": "base", "timeout": NaN}')[0] == 400
    assert send("POST", f"/sandboxes/{e2b_neighbour}/snapshots", b'{"name": 5}')[0] == 400
    assert send("POST", f"/sandboxes/{e2b_neighbour}/timeout", b"{}")[0] == 400
    made = send.json("POST", "/sandboxes", {"templateID": "code-interpreter-v1", "secure": False})[
        "sandboxID"
    ]
    to = {b"E2b-Sandbox-Id": made.encode(), b"E2b-Sandbox-Port": b"49999"}
    for code in (b"5", b'["1"]', b"null", b'{"a": 1}'):
        assert send("POST", "/execute", b'{"code": ' + code + b"}", to)[0] in (400, 422)

    control, inside = daytona(served), daytona(served, f"/toolbox/{daytona_neighbour}")
    assert control("POST", "/sandbox", b'{"ttlMinutes": 1000000000000}')[0] == 400
    for minutes in (b"1000000000000", b"1e308", b"NaN"):
        path = f"/sandbox/{daytona_neighbour}/ttl/{minutes.decode()}"
        assert control("POST", path)[0] in (400, 404)
    inside.json("POST", "/process/session", {"sessionId": "s"})
    assert inside("POST", "/process/session/s/exec", b'{"command": "echo \\ud800"}')[0] == 400
    assert inside.json("POST", "/process/session/s/exec", {"command": "echo next"})["stdout"] == "next\n"


def test_no_number_of_moves_brings_the_clock_where_no_date_is(tmp_path: Path) -> None:
    with emulator("daytona", home=tmp_path) as handle:
        send = daytona(handle)
        with pytest.raises(ValidationError, match="5000"):
            for _ in range(120):
                handle.clock.advance(100 * 365 * 86_400)
        made = send.json("POST", "/sandbox", {"ttlMinutes": 60})["id"]
        assert made in [one["id"] for one in send.json("GET", "/sandbox?limit=100")["items"]]
        send.json("DELETE", f"/sandbox/{made}")


@pytest.mark.parametrize("length", [1, 70, 71, 200, 100_000])
def test_a_boundary_of_any_length_is_taken_or_refused(
    served: Handle, length: int, daytona_neighbour: str, e2b_neighbour: str, runloop_neighbour: str
) -> None:
    boundary = b"b" * length
    head = b'Content-Disposition: form-data; name="file"; filename="x"'
    body = b"--%b\r\n%b\r\n\r\nhello\r\n--%b--\r\n" % (boundary, head, boundary)
    kind = {b"Content-Type": b"multipart/form-data; boundary=" + boundary}
    envd = {b"E2b-Sandbox-Id": e2b_neighbour.encode(), b"E2b-Sandbox-Port": b"49983"}
    for send, path, more in (
        (daytona(served, f"/toolbox/{daytona_neighbour}"), "/files/upload?path=/tmp/x", {}),
        (daytona(served, f"/toolbox/{daytona_neighbour}"), "/files/bulk-upload", {}),
        (e2b(served), "/files?path=/tmp/x&username=user", envd),
        (runloop(served), f"/v1/devboxes/{runloop_neighbour}/upload_file", {}),
    ):
        status, said = send("POST", path, body, {**kind, **more})
        assert status < 500, (path, said)
        assert status >= 400 or length <= 70, (path, status)


@pytest.mark.parametrize("length", [100, 246, 247, 20_000])
def test_metadata_with_a_name_of_any_length_is_taken_or_refused(
    served: Handle, length: int, e2b_neighbour: str
) -> None:
    send = e2b(served)
    token = send.json("GET", f"/sandboxes/{e2b_neighbour}").get("envdAccessToken") or ""
    envd = {
        b"E2b-Sandbox-Id": e2b_neighbour.encode(),
        b"E2b-Sandbox-Port": b"49983",
        b"X-Access-Token": token.encode(),
    }
    named = {b"X-Metadata-" + b"n" * length: b"v", b"Content-Type": b"application/octet-stream"}
    status, said = send("POST", "/files?path=/tmp/x&username=user", b"hello", {**envd, **named})
    assert status == (200 if length <= 246 else 400), said
