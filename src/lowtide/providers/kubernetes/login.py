"""Who asks: the headers and the TLS context of every request, by token, file, certificate or a plug-in's answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from lowtide import threads
from lowtide.engine import children_take_signals
from lowtide.providers.kubernetes.access import Access, beside, content, refused

_FILE_SECONDS = 60.0
"""A token's file is read again after this time, as kubectl does: service accounts' tokens rotate."""
_PLUGIN_SECONDS = 60.0
_EARLY_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Good for requests until that moment of the machine's clock; None: until it is refused."""

    headers: tuple[tuple[str, str], ...]
    tls: ssl.SSLContext | None
    until: float | None


class Login:
    """One per connection. What a plug-in or file gave is kept until it expires or is refused."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._pass: Pass | None = None
        self._asking = asyncio.Lock()

    async def get(self) -> Pass:
        async with self._asking:
            known = self._pass
            if known is None or (known.until is not None and time.time() >= known.until):
                known = self._pass = await asyncio.to_thread(_make, self._access)
            return known

    async def refused(self, used: Pass) -> bool:
        """The server does not take it. Whether another one is worth a try."""
        async with self._asking:
            if self._pass is used:
                self._access = await asyncio.to_thread(self._access.read_again)
                self._pass = None
        return (await self.get()).headers != used.headers or "exec" in self._access.user


def _make(access: Access) -> Pass:
    try:
        return _read(access)
    except (AttributeError, KeyError, TypeError, UnicodeError):  # a word where a list or mapping has to be
        raise refused("the kubeconfig's user or cluster is not what Kubernetes describes") from None


def _read(access: Access) -> Pass:
    user = access.user
    token: str | None = None
    until: float | None = None
    certificate, key = content(user, "client-certificate"), content(user, "client-key")
    if user.get("tokenFile"):
        found = content({**user, "token-file": user["tokenFile"]}, "token-file")
        token, until = (found or b"").decode("utf-8", "replace").strip(), time.time() + _FILE_SECONDS
    elif user.get("token"):
        token = str(user["token"]).strip()
    elif user.get("username"):
        pair = f"{user['username']}:{user.get('password') or ''}"
        return _checked(access, [("Authorization", f"Basic {_base64(pair)}")], certificate, key, None)
    elif user.get("exec") is not None:
        answer = _ask_plugin(access)
        token, until = answer.get("token"), _expiry(answer.get("expirationTimestamp"))
        if answer.get("clientCertificateData"):
            certificate = str(answer["clientCertificateData"]).encode()
            key = str(answer.get("clientKeyData") or "").encode()
    elif user.get("auth-provider"):
        raise refused(
            "the kubeconfig logs in by an auth-provider, which Kubernetes removed in 1.26: use an exec plug-in"
        )
    headers = [("Authorization", f"Bearer {token}")] if token else []
    return _checked(access, headers, certificate, key, until)


def _checked(
    access: Access,
    headers: list[tuple[str, str]],
    certificate: bytes | None,
    key: bytes | None,
    until: float | None,
) -> Pass:
    user = access.user
    if user.get("as-user-extra"):
        raise refused("the kubeconfig's as-user-extra is not supported")
    if user.get("as"):
        headers.append(("Impersonate-User", str(user["as"])))
        headers += [("Impersonate-Group", str(group)) for group in user.get("as-groups") or ()]
        if user.get("as-uid"):
            headers.append(("Impersonate-Uid", str(user["as-uid"])))
    if not all(value.isascii() and value.isprintable() for _, value in headers):
        raise refused("the kubeconfig's token or user has a character that cannot be sent")
    return Pass(headers=tuple(headers), tls=_tls(access, certificate, key), until=until)


def _tls(access: Access, certificate: bytes | None, key: bytes | None) -> ssl.SSLContext | None:
    cluster = access.cluster
    authority = content(cluster, "certificate-authority")
    insecure = bool(cluster.get("insecure-skip-tls-verify"))
    if insecure and authority:
        raise refused(
            "the kubeconfig's cluster has both an authority and insecure-skip-tls-verify: take one out"
        )
    if access.server.startswith("http:"):
        return None
    try:
        return _context(authority, insecure, certificate, key)
    except (ssl.SSLError, ValueError, OSError):
        raise refused("a certificate or key in the kubeconfig is not one (PEM, without a password)") from None


@lru_cache(maxsize=8)  # connections are kept by their context: a new token is no reason for new ones
def _context(
    authority: bytes | None, insecure: bool, certificate: bytes | None, key: bytes | None
) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
    # Clusters make their own certificates; what Python 3.13 asks of them beyond that they do not hold.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        with _as_files(certificate, key or b"") as (chain, private):
            # With a password that is wrong, so that OpenSSL asks nobody at the terminal for one.
            context.load_cert_chain(chain, private, password=lambda: "")
    return context


@contextlib.contextmanager
def _as_files(*contents: bytes) -> Iterator[list[str]]:
    """OpenSSL takes keys only from files: these are in memory where the system has such, and gone at once."""
    with contextlib.ExitStack() as stack:
        paths = []
        for data in contents:
            if hasattr(os, "memfd_create"):
                file = stack.enter_context(open(os.memfd_create("lowtide"), "wb", buffering=0))
                paths.append(f"/proc/self/fd/{file.fileno()}")
            else:
                file = stack.enter_context(tempfile.NamedTemporaryFile(buffering=0))  # type: ignore[assignment]
                paths.append(str(file.name))
            file.write(data)
        yield paths


def _ask_plugin(access: Access) -> Mapping[str, Any]:
    """client.authentication.k8s.io: the program says on its standard output who we are."""
    plugin = access.user["exec"]
    if not isinstance(plugin, dict) or not plugin.get("command"):
        raise refused("the kubeconfig's exec plug-in has no command")
    command = str(plugin["command"])
    if plugin.get("interactiveMode") == "Always":
        raise refused(f"the credential plug-in {command} needs a terminal: log in with kubectl first")
    if os.path.dirname(command):
        command = beside(access.user, command)
    environ = {name: value for name, value in {**os.environ, **access.environ}.items() if value}
    environ.update({str(one.get("name")): str(one.get("value", "")) for one in plugin.get("env") or ()})
    environ["KUBERNETES_EXEC_INFO"] = _about(access, plugin)
    argv = [command, *map(str, plugin.get("args") or ())]
    try:
        with children_take_signals():
            done = threads.run_process(
                argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PLUGIN_SECONDS
            )
    except subprocess.TimeoutExpired:
        raise refused(f"the credential plug-in {command} did not answer in {_PLUGIN_SECONDS:.0f} s") from None
    except (OSError, ValueError) as error:
        hint = plugin.get("installHint")
        raise refused(
            f"the credential plug-in {command} could not be run{f': {hint}' if hint else ''}"
        ) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise refused(f"the credential plug-in {command} failed ({done.returncode}): {said}")
    try:
        answer = json.loads(done.stdout)["status"]
        if not isinstance(answer, dict) or not (answer.get("token") or answer.get("clientCertificateData")):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise refused(f"the credential plug-in {command} gave neither a token nor a certificate") from None
    return answer


def _about(access: Access, plugin: Mapping[str, Any]) -> str:
    """What the plug-in is told: which cluster, where it asks for that."""
    about: dict[str, Any] = {"interactive": False}
    if plugin.get("provideClusterInfo"):
        cluster, authority = access.cluster, content(access.cluster, "certificate-authority")
        said = ("tls-server-name", "insecure-skip-tls-verify", "proxy-url")
        about["cluster"] = {
            "server": access.server,
            **({"certificate-authority-data": base64.b64encode(authority).decode()} if authority else {}),
            **{name: cluster[name] for name in said if cluster.get(name)},
        }
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    return json.dumps({"kind": "ExecCredential", "apiVersion": version, "spec": about})


def _expiry(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp() - _EARLY_SECONDS if text else None
    except ValueError:
        return time.time() + _FILE_SECONDS


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
