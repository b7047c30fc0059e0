"""The Daytona emulator's answers against the published OpenAPI documents, and the clients made from them.

The clients come with the SDK. The documents are not part of this repository: LOWTIDE_DAYTONA_OPENAPI names
a folder with ``api.json`` and ``toolbox.json`` from the public repository daytona/clients, openapi-specs.
They say a little more: a client takes a null for everything that may be missing.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.emulators.handle import Handle
from tests.emulators.openapi import Document, from_client

httpx = pytest.importorskip("httpx")
pytest.importorskip("daytona")
FOLDER = os.environ.get("LOWTIDE_DAYTONA_OPENAPI")


@pytest.fixture(scope="module", params=["clients", "documents"])
def documents(request: pytest.FixtureRequest) -> tuple[Document, Document]:
    if request.param == "clients":
        return from_client("daytona_api_client"), from_client("daytona_toolbox_api_client")
    if not FOLDER:
        pytest.skip("LOWTIDE_DAYTONA_OPENAPI names no folder with api.json and toolbox.json")
    api, toolbox = (json.loads((Path(FOLDER) / name).read_text()) for name in ("api.json", "toolbox.json"))
    return Document(api), Document(toolbox)


class Caller:
    """Plain HTTP, every answer checked."""

    def __init__(self, web: Any, api: Document, toolbox: Document, urls: tuple[str, str]) -> None:
        self.web, self.documents = web, {urls[0]: api, urls[1]: toolbox}

    def __call__(self, method: str, base: str, path: str, *, below: str = "", **kwargs: Any) -> Any:
        answer = self.web.request(method, base + below + path, **kwargs)
        kind = answer.headers.get("Content-Type", "")
        self.documents[base].check(method, path.partition("?")[0], answer.status_code, kind, answer.content)
        return answer.json() if "json" in kind and answer.content else answer.content


@pytest.fixture
def api(daytona: Handle) -> str:
    return daytona.environment["DAYTONA_API_URL"]


@pytest.fixture
def toolbox(daytona: Handle) -> str:
    return daytona.urls["daytona"] + "/toolbox"


@pytest.fixture
def call(daytona: Handle, documents: tuple[Document, Document], api: str, toolbox: str) -> Iterator[Caller]:
    key = daytona.environment["DAYTONA_API_KEY"]
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {key}"}, timeout=60) as web:
        yield Caller(web, *documents, (api, toolbox))


@pytest.fixture
def box(call: Caller, api: str) -> Iterator[Any]:
    name = f"c-{uuid.uuid4().hex}"
    try:
        yield call("POST", api, "/sandbox", json={"name": name, "labels": {"contract": "1"}})
    finally:
        delete(call.web, api, name)


def delete(web: Any, api: str, name: str) -> None:
    until = time.monotonic() + 30
    while web.delete(f"{api}/sandbox/{name}").status_code != 404 and time.monotonic() < until:
        time.sleep(0.05)


def settled(call: Caller, api: str, box: Any) -> str:
    until = time.monotonic() + 60
    while True:
        state = str(call("GET", api, f"/sandbox/{box['id']}")["state"])
        if not state.endswith("ing") and state != "pending_build":
            return state
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_control_plane_answers_as_documented(call: Caller, api: str, box: Any) -> None:
    one = f"/sandbox/{box['id']}"
    call("GET", api, "/sandbox?limit=1")
    if call.documents[api].knows("GET", "/sandbox/paginated"):  # of older ones
        call("GET", api, "/sandbox/paginated?limit=1")
    call("GET", api, f"/sandbox/{box['name']}")
    call("PUT", api, f"{one}/labels", json={"labels": {"a": "b"}})
    for path in ("autostop/30", "autoarchive/60", "autodelete/90", "autodelete/-1", "ttl/600", "public/true"):
        call("POST", api, f"{one}/{path}")
    call("POST", api, f"{one}/network-settings", json={"networkBlockAll": True})
    call("POST", api, f"{one}/last-activity")
    call("GET", api, f"{one}/ports/3000/preview-url")
    signed = call("GET", api, f"{one}/ports/3000/signed-preview-url?expiresInSeconds=60")
    call("POST", api, f"{one}/ports/3000/signed-preview-url/{signed['token']}/expire")
    call("GET", api, f"{one}/signing-key")
    call("POST", api, f"{one}/signing-key/rotate")
    call("GET", api, f"{one}/toolbox-proxy-url")
    call("GET", api, f"{one}/build-logs-url")
    call("GET", api, f"{one}/build-logs")
    access = call("POST", api, f"{one}/ssh-access?expiresInMinutes=5")
    call("GET", api, f"/sandbox/ssh-access/validate?token={access['token']}")
    call("DELETE", api, f"{one}/ssh-access")
    call("POST", api, f"{one}/resize", json={"cpu": 2, "memory": 2})
    settled(call, api, box)
    for verb, state in (("stop", "stopped"), ("start", "started"), ("pause", "paused"), ("start", "started")):
        call("POST", api, f"{one}/{verb}")
        assert settled(call, api, box) == state
    fork = call("POST", api, f"{one}/fork", json={})
    call("GET", api, f"{one}/forks")
    call("GET", api, f"/sandbox/{fork['id']}/parent")
    call("DELETE", api, f"/sandbox/{fork['id']}")


def test_snapshots_volumes_and_the_account_answer_as_documented(call: Caller, api: str, box: Any) -> None:
    name = f"n{uuid.uuid4().hex}"
    call("GET", api, "/snapshots?page=1&limit=2")
    made = call("POST", api, "/snapshots", json={"name": name, "imageName": "debian:12"})
    call("GET", api, f"/snapshots/{made['id']}")
    call("POST", api, f"/snapshots/{made['id']}/deactivate")
    call("POST", api, f"/snapshots/{made['id']}/activate")
    call("GET", api, f"/snapshots/{made['id']}/build-logs-url")
    call("DELETE", api, f"/snapshots/{made['id']}")
    built = {"name": name, "buildInfo": {"dockerfileContent": "FROM debian:12\n"}}
    built = call("POST", api, "/snapshots", json=built)
    call("DELETE", api, f"/snapshots/{built['id']}")
    call("POST", api, f"/sandbox/{box['id']}/snapshot", json={"name": name})
    settled(call, api, box)
    kept = call("GET", api, f"/snapshots/{name}")
    call("DELETE", api, f"/snapshots/{kept['id']}")
    volume = call("POST", api, "/volumes", json={"name": name})
    call("GET", api, "/volumes")
    call("GET", api, f"/volumes/{volume['id']}")
    call("GET", api, f"/volumes/by-name/{name}")
    call("DELETE", api, f"/volumes/{volume['id']}")
    secret = call("POST", api, "/secret", json={"name": name, "value": "v"})
    call("GET", api, "/secret")
    call("GET", api, "/secret/paginated")
    call("PATCH", api, f"/secret/{secret['id']}", json={"description": "d"})
    call("DELETE", api, f"/secret/{secret['id']}")
    pool = call("POST", api, "/warm-pools", json={"snapshot": "daytona-small", "pool": 1})
    call("GET", api, "/warm-pools")
    call("PATCH", api, f"/warm-pools/{pool['id']}", json={"pool": 2})
    call("DELETE", api, f"/warm-pools/{pool['id']}")
    call("GET", api, "/config")
    call("GET", api, "/regions")
    call("GET", api, "/health")


def test_the_toolbox_answers_as_documented(call: Caller, toolbox: str, box: Any) -> None:
    def ask(method: str, path: str, **kwargs: Any) -> Any:
        return call(method, toolbox, path, below=f"/{box['id']}", **kwargs)

    for path in ("/version", "/work-dir", "/user-home-dir", "/port", "/port/3000/in-use", "/system/metrics"):
        ask("GET", path)
    ask("POST", "/env", json={"set": {"A": "b"}})
    ask("POST", "/process/execute", json={"command": "echo hi"})
    ask("POST", "/process/code-run", json={"code": "print(1)", "language": "python"})
    ask("POST", "/process/session", json={"sessionId": "s"})
    done = ask("POST", "/process/session/s/exec", json={"command": "echo out; echo err >&2"})
    later = ask("POST", "/process/session/s/exec", json={"command": "read x", "runAsync": True})
    ask("GET", "/process/session")
    ask("GET", "/process/session/s")
    ask("GET", f"/process/session/s/command/{done['cmdId']}")
    ask("GET", f"/process/session/s/command/{done['cmdId']}/logs")
    ask("POST", f"/process/session/s/command/{later['cmdId']}/input", json={"data": "x\n"})
    ask("DELETE", "/process/session/s")
    ask("GET", "/process/session/entrypoint")
    ask("GET", "/process/session/entrypoint/logs")
    ask("POST", "/process/pty", json={"id": "p", "cols": 80, "rows": 24})
    ask("GET", "/process/pty")
    ask("GET", "/process/pty/p")
    ask("POST", "/process/pty/p/resize", json={"cols": 100, "rows": 30})
    ask("DELETE", "/process/pty/p")
    context = ask("POST", "/process/interpreter/context", json={})
    ask("GET", "/process/interpreter/context")
    ask("DELETE", f"/process/interpreter/context/{context['id']}")


def test_files_and_git_answer_as_documented(call: Caller, toolbox: str, box: Any) -> None:
    def ask(method: str, path: str, **kwargs: Any) -> Any:
        return call(method, toolbox, path, below=f"/{box['id']}", **kwargs)

    ask("POST", "/files/folder?path=d&mode=755")
    ask("POST", "/files/upload-v2?path=d/f.txt", files={"file": b"text to find"})
    parts = [("files[0].path", (None, "d/g.txt")), ("files[0].file", ("d/g.txt", b"more"))]
    ask("POST", "/files/bulk-upload", files=parts)
    ask("POST", "/files/bulk-download", json={"paths": ["d/f.txt"]})
    ask("GET", "/files/download?path=d/f.txt")
    ask("GET", "/files?path=.&depth=2")
    ask("GET", "/files/info?path=d/f.txt")
    ask("GET", "/files/find?path=d&pattern=find")
    ask("GET", "/files/search?path=d&pattern=*.txt")
    ask("POST", "/files/replace", json={"files": ["d/f.txt"], "pattern": "text", "newValue": "word"})
    ask("POST", "/files/permissions?path=d/f.txt&mode=600")
    ask("POST", "/files/move?source=d/f.txt&destination=d/h.txt")
    ask("DELETE", "/files?path=d&recursive=true")
    ask("POST", "/git/init", json={"path": "r", "initial_branch": "main"})
    ask("POST", "/git/config/user", json={"name": "A", "email": "a@b.c", "path": "r", "scope": "local"})
    ask("POST", "/git/config", json={"key": "core.editor", "value": "ed", "path": "r", "scope": "local"})
    ask("GET", "/git/config?key=core.editor&path=r&scope=local")
    ask("POST", "/files/upload-v2?path=r/f.txt", files={"file": b"1"})
    ask("GET", "/git/status?path=r")
    ask("POST", "/git/add", json={"path": "r", "files": ["f.txt"]})
    commit = {"path": "r", "message": "m", "author": "A", "email": "a@b.c"}
    ask("POST", "/git/commit", json=commit)
    ask("GET", "/git/history?path=r")
    ask("POST", "/git/branches", json={"path": "r", "name": "b"})
    ask("GET", "/git/branches?path=r")
    ask("POST", "/git/checkout", json={"path": "r", "branch": "main"})
    ask("DELETE", "/git/branches", json={"path": "r", "name": "b"})
    ask("POST", "/git/remotes", json={"path": "r", "name": "origin", "url": "/nowhere"})
    ask("GET", "/git/remotes?path=r")
    ask("POST", "/git/reset", json={"path": "r"})
    ask("POST", "/git/restore", json={"path": "r", "files": ["f.txt"]})
    ask("POST", "/git/clone", json={"url": "/home/daytona/r", "path": "c"})
    ask("POST", "/git/pull", json={"path": "c"})
    ask("POST", "/git/credentials", json={"username": "u", "password": "p"})


def test_the_check_finds_what_is_missing(documents: tuple[Document, Document]) -> None:
    with pytest.raises(AssertionError, match="nextCursor is missing"):
        documents[0].check("GET", "/sandbox", 200, "application/json", b'{"items": []}')
    with pytest.raises(AssertionError, match=r"exitCode is (a str, not a integer|none of what it may be)"):
        wrong = b'{"exitCode": "0", "result": ""}'
        documents[1].check("POST", "/process/execute", 200, "application/json", wrong)


def test_errors_have_the_documented_shape(call: Caller, api: str, toolbox: str, box: Any) -> None:
    missing = call.web.get(f"{api}/sandbox/none")
    assert missing.status_code == 404
    assert {"path", "timestamp", "statusCode", "error", "message"} <= set(missing.json())
    answer = call.web.get(f"{toolbox}/{box['id']}/files/info?path=none")
    assert answer.status_code == 404
    assert not call.documents[toolbox].problems({"$ref": "#/definitions/ErrorResponse"}, answer.json())
    assert answer.json()["code"] == "FILE_NOT_FOUND"


def test_what_it_does_not_do_is_listed_by_name(daytona: Handle, api: str, toolbox: str) -> None:
    section = (Path(__file__).parents[2] / "docs" / "emulators.md").read_text().partition("\n## Daytona\n")[2]
    key, missing, asked = daytona.environment["DAYTONA_API_KEY"], set(), 0
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {key}"}, timeout=60) as web:
        box = web.post(f"{api}/sandbox", json={}).json()["id"]
        try:
            bases = {"daytona_api_client": api, "daytona_toolbox_api_client": f"{toolbox}/{box}"}
            for client, base in bases.items():
                for method, path in from_client(client).calls():
                    path = re.sub(r"\{[^}]+\}", "none", path)
                    answer = web.request(method, base + path, content=b"no JSON")  # so that nothing is made
                    asked += 1
                    if answer.status_code in (405, 501) or "Cannot " in answer.text:
                        missing.add(path)
        finally:
            delete(web, api, box)
    names = {re.sub(r"^(/sandbox)?/(none/)?", "", path) for path in missing}
    assert asked > 250
    assert "object-storage/push-access" not in names
    assert any(name.startswith("computeruse") for name in names)
    unlisted = {
        name for name in names if not any(f"`{part}`" in section for part in (name, name.split("/")[0]))
    }
    assert not unlisted
