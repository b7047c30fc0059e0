"""Where the engine listens, and which engine that is."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lowtide.errors import UnsupportedError, ValidationError
from lowtide.providers.docker.errors import SERVICE, mapped

KEEP = (
    "DOCKER_HOST",
    "DOCKER_TLS",
    "DOCKER_TLS_VERIFY",
    "DOCKER_CERT_PATH",
    "DOCKER_CONFIG",
    "LOWTIDE_DOCKER_IMAGE",
)
"""The variables with which another process reaches the same engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A Docker API address: a Unix socket or host and port."""

    url: str
    socket_path: str | None = None
    host: str | None = None
    port: int | None = None
    cert_path: str | None = None
    """Where ca.pem, cert.pem and key.pem are, when TLS is on."""
    verified: bool = True
    """Whether the engine has to prove who it is."""

    def environ(self) -> dict[str, str]:
        """The variables that name it, whatever it was found by."""
        named = {"DOCKER_HOST": self.url}
        if self.cert_path is not None:
            named["DOCKER_CERT_PATH"] = self.cert_path
            named["DOCKER_TLS_VERIFY" if self.verified else "DOCKER_TLS"] = "1"
        return named

    @property
    def local(self) -> bool:
        """On this machine, so that what it publishes on its loopback can be reached from here."""
        return self.socket_path is not None

    def ssl_context(self) -> ssl.SSLContext | None:
        if self.cert_path is None:
            return None
        ca, cert, key = (Path(self.cert_path) / f"{name}.pem" for name in ("ca", "cert", "key"))
        try:
            context = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
            if not self.verified:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if cert.exists() or key.exists():
                context.load_cert_chain(str(cert), str(key))
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            words = (
                f"the certificates in {self.cert_path} cannot be used ({error}): ca.pem, cert.pem and key.pem are "
                "what DOCKER_CERT_PATH or the docker context holds"
            )
            raise SERVICE.error(ValidationError, words, argument="DOCKER_CERT_PATH") from error
        return context


def resolve(environ: Mapping[str, str]) -> Endpoint:
    """DOCKER_HOST, else the current docker context, else the usual sockets of Docker and Podman."""
    if environ.get("DOCKER_HOST"):
        # As the docker command has it: any value means yes, also 0.
        verified = bool(environ.get("DOCKER_TLS_VERIFY"))
        certs = environ.get("DOCKER_CERT_PATH") or str(Path.home() / ".docker")
        tls = verified or bool(environ.get("DOCKER_TLS")) or environ["DOCKER_HOST"].startswith("https:")
        return _endpoint(
            environ["DOCKER_HOST"], certs if tls else None, verified or not environ.get("DOCKER_TLS")
        )
    context = _from_context(environ)
    if context is not None:
        return context
    runtime = environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    usual = (
        "/var/run/docker.sock",
        f"{runtime}/docker.sock",
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    )
    return _endpoint("unix://" + next((path for path in usual if Path(path).is_socket()), usual[0]), None)


def _endpoint(url: str, certs: str | None, verified: bool = True) -> Endpoint:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _not_an_address(url) from error
    if parts.scheme == "unix":
        return Endpoint(url=url, socket_path=parts.path or parts.netloc)
    if parts.scheme in ("tcp", "http", "https") and parts.hostname:
        port = port or (2376 if certs else 2375)
        return Endpoint(url=url, host=parts.hostname, port=port, cert_path=certs, verified=verified)
    if parts.scheme == "ssh":
        raise SERVICE.error(
            UnsupportedError,
            f"the docker provider does not speak ssh ({url})",
            argument="DOCKER_HOST",
            feature="ssh",
            alternative="forward the socket (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST) and set DOCKER_HOST=unix:///tmp/docker.sock",
        )
    raise _not_an_address(url)


def _not_an_address(url: str) -> ValidationError:
    words = f"DOCKER_HOST is unix://PATH or tcp://HOST:PORT, not {url!r}"
    return SERVICE.error(ValidationError, words, argument="DOCKER_HOST")


def _from_context(environ: Mapping[str, str]) -> Endpoint | None:
    """The engine of the docker command's context, with its certificates. One that is not there is an error."""
    directory = Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    name = environ.get("DOCKER_CONTEXT")
    if not name:
        try:
            name = json.loads((directory / "config.json").read_text()).get("currentContext")
        except (OSError, ValueError, AttributeError):
            return None  # no configuration, or one that is not the docker command's
    if not name or name == "default":
        return None
    place = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = json.loads((directory / "contexts" / "meta" / place / "meta.json").read_text())
        engine = meta["Endpoints"]["docker"]
        host, verified = str(engine["Host"]), not engine.get("SkipTLSVerify")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"there is no docker context {name!r} in {directory}: `docker context ls` shows them, DOCKER_HOST goes before"
        raise SERVICE.error(ValidationError, words, argument="DOCKER_CONTEXT") from error
    certs = directory / "contexts" / "tls" / place / "docker"
    return _endpoint(host, str(certs) if certs.is_dir() or host.startswith("https:") else None, verified)


def fingerprint(endpoint: Endpoint) -> str:
    """Endpoint and engine id, so that another engine behind the same socket is another account."""
    place = f"{_machine()}|{endpoint.url}" if endpoint.local else endpoint.url
    return hashlib.sha256(f"{place}|{_engine_id(endpoint)}".encode()).hexdigest()[:16]


def _machine() -> str:
    """The same socket path on two machines is two engines."""
    try:
        return Path("/etc/machine-id").read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _engine_id(endpoint: Endpoint) -> str:
    """Blocking and without the SDK: the lease wants it before anything is sent."""
    connection: http.client.HTTPConnection
    if endpoint.socket_path is not None:
        connection = _UnixConnection(endpoint.socket_path)
    elif (context := endpoint.ssl_context()) is not None:
        connection = http.client.HTTPSConnection(
            str(endpoint.host), endpoint.port, timeout=10, context=context
        )
    else:
        connection = http.client.HTTPConnection(str(endpoint.host), endpoint.port, timeout=10)
    with mapped():
        try:
            connection.request("GET", "/info")
            answer = connection.getresponse()
            if answer.headers.get("Libpod-Api-Version"):
                return "podman"  # Podman makes up a new id for each answer
            return str(json.loads(answer.read()).get("ID", ""))
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            kind = PermissionError if isinstance(error, PermissionError) else OSError
            raise kind(f"{endpoint.url}: {error}") from error
        finally:
            connection.close()
