"""Which engine the docker provider speaks to: as the docker command has it, with errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import SandboxUnavailableError, ValidationError
from lowtide.providers.docker import DockerProvider
from lowtide.providers.docker.access import resolve
from lowtide.providers.docker.client import EngineClient


def _context(directory: Path, name: str, host: str, **engine: object) -> Path:
    place = hashlib.sha256(name.encode()).hexdigest()
    meta = directory / "contexts" / "meta" / place
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(
        json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host, **engine}}})
    )
    certs = directory / "contexts" / "tls" / place / "docker"
    certs.mkdir(parents=True)
    return certs


def _certificates(directory: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    shutil.copy(directory / "cert.pem", directory / "ca.pem")


@contextmanager
def _answering(answer: bytes, certs: Path | None = None) -> Iterator[int]:
    """A server that answers everything with that; with certificates it wants the client's too."""
    listener = socket.create_server(("127.0.0.1", 0))
    context = None
    if certs is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certs / "ca.pem"))
        context.load_cert_chain(certs / "cert.pem", certs / "key.pem")
        context.verify_mode = ssl.CERT_REQUIRED

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                wrapped = context.wrap_socket(connection, server_side=True) if context else connection
                wrapped.recv(65536)
                wrapped.sendall(answer)
                wrapped.close()
            except OSError:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


_INFO = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"ID": "ours"}'.replace(b"13", b"14")


def test_a_socket_may_be_in_any_directory() -> None:
    where = "/home/jörg/docker.sock"
    for environ, options in (({"DOCKER_HOST": f"unix://{where}"}, None), ({}, {"host": f"unix://{where}"})):
        assert DockerProvider.connect(environ, options).endpoint.socket_path == where


def test_a_contexts_certificates_are_used(tmp_path: Path) -> None:
    certs = _context(tmp_path, "far", "tcp://127.0.0.1:1")
    _certificates(certs)
    with _answering(_INFO, certs) as port:
        meta = next((tmp_path / "contexts" / "meta").iterdir()) / "meta.json"
        meta.write_text(meta.read_text().replace("127.0.0.1:1", f"127.0.0.1:{port}"))
        provider = DockerProvider.connect({"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "far"})
        assert len(provider.account) == 16
        again = DockerProvider.connect(provider.credentials())  # as the guardian would
        assert again.account == provider.account
        assert again.endpoint.cert_path == str(certs)


def test_a_context_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="no docker context 'typo'"):
        resolve({"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "typo"})
    (tmp_path / "config.json").write_text('{"currentContext": "gone"}')
    with pytest.raises(ValidationError, match="no docker context 'gone'"):
        resolve({"DOCKER_CONFIG": str(tmp_path)})
    assert resolve({"DOCKER_CONFIG": str(tmp_path), "DOCKER_HOST": "unix:///x"}).socket_path == "/x"


def test_any_value_of_tls_verify_means_yes_as_for_the_docker_command() -> None:
    for value, certs in (("", None), ("0", "/c"), ("1", "/c")):
        environ = {"DOCKER_HOST": "tcp://h:1", "DOCKER_CERT_PATH": "/c", "DOCKER_TLS_VERIFY": value}
        assert resolve(environ).cert_path == certs
    unverified = resolve({"DOCKER_HOST": "tcp://h:1", "DOCKER_CERT_PATH": "/c", "DOCKER_TLS": "1"})
    assert (unverified.cert_path, unverified.verified) == ("/c", False)


@pytest.mark.parametrize("url", ["tcp://h:notaport", "tcp://h:99999", "tcp://", "ftp://h", "tcp://[::1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValidationError, match="DOCKER_HOST"):
        resolve({"DOCKER_HOST": url})


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / f"{name}.pem").write_text("not a certificate")
    environ = {
        "DOCKER_HOST": "tcp://127.0.0.1:1",
        "DOCKER_TLS_VERIFY": "1",
        "DOCKER_CERT_PATH": str(tmp_path),
    }
    with pytest.raises(ValidationError, match="certificates"):
        _ = DockerProvider.connect(environ).account


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", b"\0" * 100]
)
async def test_what_answers_is_no_engine(answer: bytes) -> None:
    pytest.importorskip("aiodocker")
    from lowtide.providers.docker.errors import mapped

    with _answering(answer) as port:
        provider = DockerProvider.connect({"DOCKER_HOST": f"tcp://127.0.0.1:{port}"})
        with pytest.raises(SandboxUnavailableError):
            _ = provider.account
        with pytest.raises(SandboxUnavailableError):
            await provider.client()
        client = EngineClient(provider.endpoint)
        if b"200 OK" not in answer:
            with pytest.raises(SandboxUnavailableError), mapped("x"):
                await client.attach("x")
        await client.aclose()
        await provider.aclose()


@pytest.mark.parametrize(("oldest", "asked"), [("1.24", "v1.41"), ("1.44", "v1.44"), (None, "v1.41")])
async def test_an_engine_is_spoken_to_in_a_version_that_it_takes(oldest: str | None, asked: str) -> None:
    """Docker 29 refuses all before 1.44, also to say which version it is."""
    pytest.importorskip("aiodocker")
    web = pytest.importorskip("aiohttp.web")
    heard: list[str] = []

    async def answer(request: Any) -> Any:
        heard.append(request.path)
        if request.path == "/version":
            return web.json_response({"ApiVersion": "1.52", "MinAPIVersion": oldest, "Arch": "amd64"})
        if not request.path.startswith(f"/{asked}/"):
            return web.json_response({"message": "client version 1.41 is too old"}, status=400)
        labels = {"lowtide-lease": "01abc", "lowtide-ledger": "l", "lowtide-owner": "o"}
        sandbox = {"Id": "a" * 64, "Name": "/01abc", "Config": {"Labels": labels}}
        return web.json_response([] if request.path.endswith("containers/json") else sandbox, status=200)

    async with _engine(answer) as provider:
        assert [found async for found in provider.list({})] == []
        await provider.inspect("01abc")
        assert heard == ["/version", f"/{asked}/containers/json", f"/{asked}/containers/01abc/json"]


@pytest.mark.parametrize(
    "page",
    [
        ("text/html", "<h1>404 Not Found</h1> /v1.41/containers/01abc"),
        ("text/plain", "404 page not found"),
        ("application/json", '{"message": "page not found"}'),
        ("application/json", "[]"),
    ],
)
async def test_a_404_of_a_proxy_is_no_proof_of_an_end(page: tuple[str, str]) -> None:
    pytest.importorskip("aiodocker")
    web = pytest.importorskip("aiohttp.web")
    said = page

    async def answer(request: Any) -> Any:
        if request.path == "/version":
            return web.json_response({"ApiVersion": "1.52", "MinAPIVersion": "1.24", "Arch": "amd64"})
        return web.Response(status=404, content_type=said[0], text=said[1])

    async with _engine(answer) as provider:
        with pytest.raises(SandboxUnavailableError):
            await provider.get("01abc")
        with pytest.raises(SandboxUnavailableError):
            await provider.destroy("01abc")
        provider._ours["01abc"] = None  # type: ignore[assignment]  # then it is not looked at first
        with pytest.raises(SandboxUnavailableError):
            await provider.destroy("01abc")
        for own in (
            "No such container: 01abc",
            'no container with name or ID "01abc" found: no such container',
        ):
            said = ("application/json", json.dumps({"message": own}))
            assert await provider.destroy("01abc") is False


@asynccontextmanager
async def _engine(answer: Any) -> AsyncIterator[DockerProvider]:
    """A provider whose engine is that handler."""
    web = pytest.importorskip("aiohttp.web")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider = DockerProvider.connect({"DOCKER_HOST": f"tcp://127.0.0.1:{runner.addresses[0][1]}"})
    try:
        yield provider
    finally:
        await provider.aclose()
        await runner.cleanup()
