"""The emulators' own certificate authority: made new at every start, its key is in memory alone."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import ssl
from pathlib import Path

import trustme

_LIFE = datetime.timedelta(days=30)


class Authority:
    """Signs what the CONNECT proxy shows. Trusted by nobody but who is told to (``SSL_CERT_FILE``)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA(path_length=0, organization_name="lowtide emulators, this machine only")
        self._contexts: dict[tuple[str, ...], ssl.SSLContext] = {}
        self.certificate_file = directory / "ca.pem"
        self.bundle_file = directory / "ca-bundle.pem"
        pem = self._authority.cert_pem.bytes()
        self.certificate_file.write_bytes(pem)
        self.bundle_file.write_bytes(pem + _system_roots())
        self.alone = directory / "authority"
        """A directory with nothing but its certificate, for clients that read all there is in one."""
        self.alone.mkdir(mode=0o700)
        (self.alone / "lowtide.pem").write_bytes(pem)

    def context(self, domain: str, protocols: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
        """A server context for `domain` and everything one label below it, or for an address."""
        key = (domain, *protocols)
        if key not in self._contexts:
            self._contexts[key] = self._make_context(domain, protocols)
        return self._contexts[key]

    def _make_context(self, domain: str, protocols: tuple[str, ...]) -> ssl.SSLContext:
        until = datetime.datetime.now(datetime.UTC) + _LIFE
        leaf = self._authority.issue_cert(*_names(domain), not_after=until)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        # The standard library reads keys from files only; this one is gone before anyone can connect.
        with leaf.private_key_and_cert_chain_pem.tempfile(dir=str(self._directory)) as path:
            context.load_cert_chain(path)
        return context


def _names(domain: str) -> list[str]:
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(domain))]
    return [domain, f"*.{domain}"]


def _system_roots() -> bytes:
    """What this machine trusts already, so that the bundle can stand in for it."""
    paths = ssl.get_default_verify_paths()
    for path in (os.environ.get("SSL_CERT_FILE"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if path and os.path.isfile(path):
            return b"\n" + Path(path).read_bytes()
    return b""
