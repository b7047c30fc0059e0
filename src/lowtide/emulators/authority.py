"""The emulators' own certificate authority: made new at every start, its key never leaves memory for long."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=30)


class Authority:
    """Signs what the CONNECT proxy shows. Trusted by nobody but who is told to (``SSL_CERT_FILE``)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, "lowtide emulators, this machine only")]
        )
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._contexts: dict[tuple[str, ...], ssl.SSLContext] = {}
        self.certificate_file = directory / "ca.pem"
        self.bundle_file = directory / "ca-bundle.pem"
        pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        self.certificate_file.write_bytes(pem)
        self.bundle_file.write_bytes(pem + _system_roots())

    def context(self, domain: str, protocols: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
        """A server context for `domain` and everything one label below it, or for an address."""
        key = (domain, *protocols)
        if key not in self._contexts:
            self._contexts[key] = self._make_context(domain, protocols)
        return self._contexts[key]

    def _make_context(self, domain: str, protocols: tuple[str, ...]) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        names = x509.SubjectAlternativeName(_names(domain))
        leaf = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domain)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + _LIFE)
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        # The standard library reads keys from files only; this one is gone before anyone can connect.
        handle, path = tempfile.mkstemp(dir=self._directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(leaf.public_bytes(serialization.Encoding.PEM))
                file.write(
                    key.private_bytes(
                        serialization.Encoding.PEM,
                        serialization.PrivateFormat.PKCS8,
                        serialization.NoEncryption(),
                    )
                )
            context.load_cert_chain(path)
        finally:
            os.unlink(path)
        return context


def _names(domain: str) -> list[x509.GeneralName]:
    try:
        return [x509.IPAddress(ipaddress.ip_address(domain))]
    except ValueError:
        return [x509.DNSName(domain), x509.DNSName(f"*.{domain}")]


def _system_roots() -> bytes:
    """What this machine trusts already, so that the bundle can stand in for it."""
    paths = ssl.get_default_verify_paths()
    for path in (os.environ.get("SSL_CERT_FILE"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt"):
        if path and os.path.isfile(path):
            return b"\n" + Path(path).read_bytes()
    return b""
