"""Kubeconfigs as people have them, odd and broken ones too: who is asked, as whom, over which way. Real TLS, real plug-ins."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")
pytest.importorskip("yaml")

from aiohttp import web  # noqa: E402

from lowtide.errors import AuthenticationError, LowtideError, SandboxUnavailableError  # noqa: E402
from lowtide.providers.kubernetes import KubernetesProvider  # noqa: E402
from lowtide.providers.kubernetes import access as access_module  # noqa: E402
from lowtide.providers.kubernetes.access import Access  # noqa: E402
from lowtide.providers.kubernetes.client import Api  # noqa: E402

NAME = "cluster.test"


class Server:
    """Answers everything with who asked, and 401 to the tokens in `stale`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stale: set[str] = set()
        self.asked = 0
        self.url = ""
        self.pem = directory / "pair.crt"
        self.key = directory / "pair.key"

    async def start(self) -> web.AppRunner:
        argv = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=somebody",
        ]
        argv += ["-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(self.key), "-out", str(self.pem)]
        subprocess.run(argv, check=True, capture_output=True)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.pem))
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_cert_chain(str(self.pem), str(self.key))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        said = request.headers.get("Authorization", "")
        if said.removeprefix("Bearer ") in self.stale:
            return web.json_response({"message": "stale", "reason": "Unauthorized"}, status=401)
        assert request.transport is not None
        return web.json_response(
            {
                "authorization": said,
                "certificate": bool(request.transport.get_extra_info("peercert")),
                "path": request.path,
                "as": [
                    request.headers.get("Impersonate-User"),
                    request.headers.getall("Impersonate-Group", []),
                ],
            }
        )

    def config(self, user: dict[str, Any], **cluster: Any) -> Path:
        whole = {"server": self.url, "tls-server-name": NAME, "certificate-authority": "pair.crt", **cluster}
        return kubeconfig(self.directory, {k: v for k, v in whole.items() if v is not None}, user)

    async def ask(self, user: dict[str, Any], **cluster: Any) -> dict[str, Any]:
        api = Api(Access.resolve({"KUBECONFIG": str(self.config(user, **cluster))}, {}))
        try:
            return await api.request("GET", "/who")
        finally:
            await api.aclose()


def kubeconfig(directory: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    path = directory / "kubeconfig"
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    server = Server(tmp_path)
    runner = await server.start()
    yield server
    await runner.cleanup()


def plugin(directory: Path, script: str, **more: Any) -> dict[str, Any]:
    path = directory / "plugin"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", **more}}


async def test_a_token_a_name_and_whom_to_act_for(server: Server) -> None:
    said = await server.ask(
        {"token": "abc", "as": "other", "as-groups": ["a", "b"]}, server=f"{server.url}/k8s/c-1/"
    )
    assert said["authorization"] == "Bearer abc"
    assert said["path"] == "/k8s/c-1/who"
    assert said["as"] == ["other", ["a", "b"]]
    basic = await server.ask({"username": "u", "password": "p:q"})
    assert basic["authorization"] == "Basic " + base64.b64encode(b"u:p:q").decode()
    assert (await server.ask({}))["authorization"] == ""


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_certificate_leaves_no_file_behind(server: Server, inline: bool) -> None:
    if inline:
        data = [base64.b64encode(path.read_bytes()).decode() for path in (server.pem, server.key)]
        user = {"client-certificate-data": data[0], "client-key-data": data[1]}
    else:
        user = {"client-certificate": "pair.crt", "client-key": str(server.key)}
    before = {path.name for path in server.directory.iterdir()} | {"kubeconfig"}
    assert (await server.ask(user))["certificate"] is True
    assert {path.name for path in server.directory.iterdir()} == before


async def test_the_servers_name_and_authority_are_checked_unless_told_not_to(server: Server) -> None:
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await server.ask({}, **{"tls-server-name": "elsewhere.test"})
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await server.ask({}, **{"certificate-authority": None})
    skip: dict[str, Any] = {"insecure-skip-tls-verify": True, "tls-server-name": None}
    assert await server.ask({}, **skip, **{"certificate-authority": None})
    with pytest.raises(AuthenticationError, match="take one out"):
        await server.ask({}, **skip)


async def test_a_token_file_is_read_again_when_the_server_refuses(server: Server) -> None:
    token = server.directory / "token"
    token.write_text("first\n")
    api = Api(
        Access.resolve({"KUBECONFIG": str(server.config({"tokenFile": "token", "token": "never"}))}, {})
    )
    assert (await api.request("GET", "/"))["authorization"] == "Bearer first"
    token.write_text("second\n")
    assert (await api.request("GET", "/"))["authorization"] == "Bearer first"
    server.stale.add("first")
    assert (await api.request("GET", "/"))["authorization"] == "Bearer second"
    server.stale.add("second")
    before = server.asked
    with pytest.raises(Exception, match="stale"):
        await api.request("POST", "/", body={})
    assert server.asked == before + 1  # the same token again is not worth a second request
    await api.aclose()


async def test_a_plugin_is_asked_once_until_it_expires_or_is_refused(server: Server) -> None:
    script = """
echo x >>count
printf '%s' "$KUBERNETES_EXEC_INFO" >info
printf '{"status": {"token": "%s-%s-%s", "expirationTimestamp": "2999-01-01T00:00:00Z"}}' "$1" "$WORD" "$(wc -l <count | tr -d ' ')"
"""
    user = plugin(
        server.directory,
        f"cd {server.directory}\n{script}",
        args=["one"],
        env=[{"name": "WORD", "value": "two"}],
        provideClusterInfo=True,
    )
    api = Api(Access.resolve({"KUBECONFIG": str(server.config(user))}, {}))
    answers = await asyncio.gather(*(api.request("GET", "/") for _ in range(5)))
    assert {answer["authorization"] for answer in answers} == {"Bearer one-two-1"}
    server.stale.add("one-two-1")
    assert (await api.request("GET", "/"))["authorization"] == "Bearer one-two-2"
    info = json.loads((server.directory / "info").read_text())
    assert info["spec"]["interactive"] is False
    assert info["spec"]["cluster"]["server"] == server.url
    assert base64.b64decode(info["spec"]["cluster"]["certificate-authority-data"]) == server.pem.read_bytes()
    await api.aclose()


async def test_a_plugin_may_give_a_certificate(server: Server) -> None:
    answer = json.dumps(
        {"status": {"clientCertificateData": server.pem.read_text(), "clientKeyData": server.key.read_text()}}
    )
    (server.directory / "answer").write_text(answer)
    said = await server.ask(plugin(server.directory, f"cat {server.directory}/answer"))
    assert said["certificate"] is True


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo log in again >&2; echo SECRET; exit 3", "log in again"),
        ("echo not-json-SECRET", "neither a token nor a certificate"),
        ("echo '{\"status\": {}}'", "neither a token nor a certificate"),
        ('printf \'{"status": {"token": "SECRET\\\\nX-Evil: 1"}}\'', "cannot be sent"),
    ],
)
async def test_a_plugin_that_fails_is_an_authentication_error_without_its_output(
    tmp_path: Path, script: str, words: str
) -> None:
    path = kubeconfig(tmp_path, {"server": "http://127.0.0.1:1"}, plugin(tmp_path, script))
    provider = KubernetesProvider.connect({"KUBECONFIG": str(path), "PATH": "/usr/bin:/bin"})
    with pytest.raises(AuthenticationError, match=words) as caught:
        await provider.get("lowtide-x")
    assert "SECRET" not in str(caught.value)
    await provider.aclose()


USERS: list[tuple[dict[str, Any], str]] = [
    ({"exec": {"command": "no-such-plugin", "installHint": "brew install it"}}, "brew install it"),
    ({"exec": {"command": "x", "interactiveMode": "Always"}}, "terminal"),
    ({"exec": {}}, "no command"),
    ({"exec": {"command": "true", "env": ["x"]}}, "not what Kubernetes describes"),
    ({"exec": {"command": "true", "args": 3}}, "not what Kubernetes describes"),
    ({"auth-provider": {"name": "gcp"}}, "exec plug-in"),
    ({"token": "abc\ndef"}, "cannot be sent"),
    ({"client-certificate-data": "%%%"}, "not base64"),
    ({"client-certificate-data": "eA==", "client-key-data": "eA=="}, "PEM"),
    ({"client-certificate": "missing.crt"}, "cannot be read"),
    ({"tokenFile": "missing"}, "cannot be read"),
    ({"as": "x", "as-user-extra": {"a": ["b"]}}, "as-user-extra"),
]


@pytest.mark.parametrize(("user", "words"), USERS)
async def test_a_user_that_cannot_log_in_is_told_why(
    tmp_path: Path, user: dict[str, Any], words: str
) -> None:
    path = kubeconfig(tmp_path, {"server": "https://127.0.0.1:1"}, user)
    provider = KubernetesProvider.connect({"KUBECONFIG": str(path)})
    with pytest.raises(AuthenticationError, match=words) as caught:
        await provider.get("lowtide-x")
    assert "abc" not in str(caught.value)
    await provider.aclose()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- list",
        "just words",
        "clusters: {c: d}",
        "clusters: [c]\ncontexts: 3",
        "clusters: [{name: c, cluster: [1]}]",
        "contexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x",
        "contexts: [{name: x}]\ncurrent-context: x",
        "clusters: [{name: c, cluster: {}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x",
        "clusters: [{name: c, cluster: {server: 'unix:///x'}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x",
        "clusters: [{name: c, cluster: {server: 'https://h'}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x",
        "clusters: [{name: c, cluster: {server: 'https://[h'}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x",
        "clusters: [{name: c, cluster: {server: 'https://u:SECRET@h'}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x",
        "clusters: [{name: c, cluster: {server: 'https://h:99999'}}]\ncontexts: [{name: x, context: {cluster: c}}]\ncurrent-context: x",
        "a: &a [*a]\nb: [",
        "token: SECRET: SECRET",
        "!!python/object/apply:os.system ['echo SECRET']",
        "[" * 5000,
        "\x00\x01",
    ],
)
def test_what_is_no_kubeconfig_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(LowtideError) as caught:
        KubernetesProvider.connect({"KUBECONFIG": str(path)})
    assert isinstance(caught.value, AuthenticationError)
    assert "SECRET" not in str(caught.value)


def test_several_files_are_merged_and_the_first_word_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "first", tmp_path / "b" / "second"
    for path in (first, second):
        path.parent.mkdir()
    first.write_text(
        "clusters: [{name: c, cluster: {server: https://first}}]\ncontexts: [{name: x, context: {cluster: c, user: u, namespace: n}}]"
    )
    second.write_text(
        "clusters: [{name: c, cluster: {server: https://second}}]\nusers: [{name: u, user: {client-key: k.pem}}]\ncurrent-context: x"
    )
    found = Access.resolve({"KUBECONFIG": f"{first}:{tmp_path}/missing:{second}"}, {})
    assert (found.server, found.namespace, found.context) == ("https://first", "n", "x")
    assert access_module.beside(found.user, "k.pem") == str(second.parent / "k.pem")
    assert "client-key" not in repr(found)


def test_inside_a_pod_the_service_account_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("token", "namespace", "ca.crt"):
        (tmp_path / name).write_text(f"its-{name}\n")
    monkeypatch.setattr(access_module, "SERVICE_ACCOUNT", str(tmp_path))
    environ = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = Access.resolve(environ, {})
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "its-namespace")
    assert Access.resolve(found.credentials(), {}).account == found.account


@pytest.mark.parametrize(
    ("server", "cluster", "environ", "expected"),
    [
        ("https://h.test", {}, {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://h.test", {"proxy-url": "http://q:1"}, {"HTTPS_PROXY": "http://p:1"}, "http://q:1"),
        ("https://a.h.test", {}, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "x, .h.test"}, None),
        ("https://xh.test", {}, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "h.test"}, "http://p:1"),
        ("https://10.1.2.3", {}, {"https_proxy": "http://p:1", "no_proxy": "10.0.0.0/8"}, None),
        ("https://127.0.0.1", {}, {"HTTPS_PROXY": "http://p:1"}, None),
        ("http://h.test", {}, {"HTTPS_PROXY": "http://p:1"}, None),
        ("https://h.test", {}, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, None),
    ],
)
def test_the_way_is_the_one_kubectl_takes(
    tmp_path: Path, server: str, cluster: dict[str, str], environ: dict[str, str], expected: str | None
) -> None:
    path = kubeconfig(tmp_path, {"server": server, **cluster}, {})
    assert Access.resolve({"KUBECONFIG": str(path), **environ}, {}).proxy() == expected


@pytest.mark.parametrize(
    ("status", "page"),
    [(404, "<h1>not found</h1>"), (404, '{"message": "Not Found"}'), (200, "<h1>log in</h1>"), (200, "{}")],
)
async def test_who_answers_in_the_servers_place_proves_no_end(tmp_path: Path, status: int, page: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=page, status=status, content_type="text/html")

    async with answering(tmp_path, answer) as provider:
        for asking in (provider.get("abc"), provider.destroy("abc"), provider.renew("abc", 60.0)):
            with pytest.raises(SandboxUnavailableError):
                await asking


@pytest.mark.parametrize(
    ("beside", "page", "gone"),
    [("secrets", "<h1>not found</h1>", False), ("networkpolicies", "404 page not found\n", True)],
    ids=["a proxy's page", "a server without the API"],
)
async def test_what_stands_beside_a_pod_is_gone_by_the_servers_own_word_too(
    tmp_path: Path, beside: str, page: str, gone: bool
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if f"/{beside}/" in request.path:
            return web.Response(text=page, status=404)
        return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)

    async with answering(tmp_path, answer) as provider:
        if gone:
            assert await provider.destroy("abc") is False
        else:
            with pytest.raises(SandboxUnavailableError):
                await provider.destroy("abc")


@asynccontextmanager
async def answering(
    tmp_path: Path, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[KubernetesProvider]:
    """A provider whose API server is that handler."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    provider = KubernetesProvider.connect({"KUBECONFIG": str(kubeconfig(tmp_path, cluster, {}))})
    try:
        yield provider
    finally:
        await provider.aclose()
        await runner.cleanup()
