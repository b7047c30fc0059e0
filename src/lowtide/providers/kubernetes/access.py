"""Which cluster, as whom, in which namespace: read from files and environment, without a connection."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lowtide.errors import AuthenticationError, ValidationError
from lowtide.providers import hosted
from lowtide.providers.kubernetes.errors import PROVIDER, SERVICE

NAMESPACE = "LOWTIDE_KUBERNETES_NAMESPACE"
CONTEXT = "LOWTIDE_KUBERNETES_CONTEXT"
IMAGE = "LOWTIDE_KUBERNETES_IMAGE"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

_OPTIONS = ("context", "image", "kubeconfig", "namespace")
# What another process needs to read the same kubeconfig and run the same credential plug-in.
_INHERITED = ("HOME", "PATH", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
_DIRECTORY = "directory of its kubeconfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One cluster and namespace. `kubeconfig` None means the service account of the pod this runs in."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    image: str | None = None
    """Of sandboxes that name none."""
    cluster: Mapping[str, Any] = field(repr=False)
    user: Mapping[str, Any] = field(repr=False)
    environ: Mapping[str, str] = field(repr=False)

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None) -> Access:
        """kubectl's order: named, KUBECONFIG, ~/.kube/config, the pod's service account."""
        options = options or {}
        if unknown := sorted(set(options) - set(_OPTIONS)):
            words = f"unknown option {unknown[0]!r} for kubernetes; known: {', '.join(_OPTIONS)}"
            raise SERVICE.error(ValidationError, words, argument=unknown[0])
        if importlib.util.find_spec("aiohttp") is None:
            raise hosted.missing_dependency(PROVIDER, "aiohttp")
        found = cls._found(environ, options)
        return replace(found, image=options.get("image") or environ.get(IMAGE))

    @classmethod
    def _found(cls, environ: Mapping[str, str], options: Mapping[str, Any]) -> Access:
        namespace = options.get("namespace") or environ.get(NAMESPACE)
        context = options.get("context") or environ.get(CONTEXT)
        known = hosted.way_of(environ, *_INHERITED)
        home = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".kube", "config")
        named = options.get("kubeconfig") or environ.get("KUBECONFIG")
        if named:
            paths = [os.path.abspath(os.path.expanduser(p)) for p in str(named).split(os.pathsep) if p]
            return cls._from_files(paths, context, namespace, known)
        if os.path.exists(home):
            return cls._from_files([home], context, namespace, known)
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if host and port and os.path.exists(f"{SERVICE_ACCOUNT}/token"):
            return cls(
                kubeconfig=None,
                context=None,
                namespace=namespace or _read(f"{SERVICE_ACCOUNT}/namespace") or "default",
                cluster={
                    "server": f"https://{f'[{host}]' if ':' in host else host}:{port}",
                    "certificate-authority": f"{SERVICE_ACCOUNT}/ca.crt",
                },
                user={"tokenFile": f"{SERVICE_ACCOUNT}/token"},
                environ=known,
            )
        raise refused(
            "no Kubernetes cluster is configured: set KUBECONFIG to a kubeconfig file, or run inside a pod with a "
            "service account"
        )

    @classmethod
    def _from_files(
        cls, paths: list[str], context: str | None, namespace: str | None, environ: Mapping[str, str]
    ) -> Access:
        config = _merged(paths)
        # Pinned here: `kubectl config use-context` must not move running sandboxes to another cluster.
        name = context or config["current-context"]
        chosen = config["contexts"].get(name)
        if chosen is None:
            known = ", ".join(sorted(config["contexts"])) or "none"
            raise refused(f"the kubeconfig has no context {name!r}; known: {known}")
        found: dict[str, Mapping[str, Any]] = {}
        for kind in ("cluster", "user"):
            wanted = chosen.get(kind)
            thing = config[f"{kind}s"].get(str(wanted)) if wanted else None
            if thing is None and (wanted or kind == "cluster"):
                raise refused(
                    f"the kubeconfig's context {name!r} names the {kind} {wanted!r}, which it lacks"
                )
            found[kind] = thing or {}
        _address(found["cluster"].get("server"), "server")
        return cls(
            kubeconfig=os.pathsep.join(paths),
            context=str(name),
            namespace=namespace or str(chosen.get("namespace") or "default"),
            cluster=found["cluster"],
            user=found["user"],
            environ=environ,
        )

    def read_again(self) -> Access:
        """The same context as its files are now: somebody may have logged in again."""
        if self.kubeconfig is None:
            return self
        paths = self.kubeconfig.split(os.pathsep)
        return replace(self._from_files(paths, self.context, self.namespace, self.environ), image=self.image)

    @property
    def server(self) -> str:
        return str(self.cluster["server"]).rstrip("/")

    @property
    def account(self) -> str:
        """Server, its authority and the namespace: where the sandboxes are, whoever asks for them."""
        cluster = self.cluster
        if self.kubeconfig is None:
            authority = _read(str(cluster["certificate-authority"])) or ""
        else:
            authority = (
                cluster.get("certificate-authority-data") or cluster.get("certificate-authority") or ""
            )
        return _digest(f"{self.server}|{_digest(str(authority))}|{self.namespace}")

    def credentials(self) -> dict[str, str]:
        named = {
            "KUBECONFIG": self.kubeconfig,
            CONTEXT: self.context,
            NAMESPACE: self.namespace,
            IMAGE: self.image,
        }
        return {**self.environ, **{name: value or "" for name, value in named.items()}}

    def proxy(self) -> str | None:
        """By the kubeconfig, else by the environment, which never sends what is for this machine elsewhere."""
        named = self.cluster.get("proxy-url")
        if named:
            return _address(named, "proxy-url").geturl()
        address = urlsplit(self.server)
        environ = self.environ
        found = environ.get(f"{address.scheme}_proxy") or environ.get(f"{address.scheme.upper()}_PROXY")
        excluded = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        return found if found and not _goes_directly(str(address.hostname), excluded) else None


def content(section: Mapping[str, Any], name: str) -> bytes | None:
    """What a section holds as ``name-data`` or, beside its kubeconfig, in the file ``name``."""
    if data := section.get(f"{name}-data"):
        try:
            return base64.b64decode(str(data), validate=True)
        except (binascii.Error, ValueError):
            raise refused(f"{name}-data in the kubeconfig is not base64") from None
    if not section.get(name):
        return None
    path = beside(section, str(section[name]))
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise refused(
            f"{path}, which the kubeconfig names as {name}, cannot be read: {error.strerror}"
        ) from error


def beside(section: Mapping[str, Any], path: str) -> str:
    """Relative paths begin at their kubeconfig, wherever this process stands."""
    return os.path.join(section.get(_DIRECTORY, ""), path)


def _merged(paths: list[str]) -> dict[str, Any]:
    """The files as kubectl merges them: for each name, the first file that has it."""
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise hosted.missing_dependency(PROVIDER, "PyYAML") from error
    result: dict[str, Any] = {"contexts": {}, "clusters": {}, "users": {}, "current-context": None}
    read = 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                config = yaml.safe_load(file) or {}
        except FileNotFoundError:
            continue
        except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
            # Without its words: they quote the line, which may hold a key.
            raise refused(f"the kubeconfig {path} could not be read: {type(error).__name__}") from None
        if not isinstance(config, dict):
            raise refused(f"{path} is no kubeconfig")
        read += 1
        for kind in ("contexts", "clusters", "users"):
            entries = config.get(kind) or []
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                raise refused(f"{path} is no kubeconfig: its {kind} are not a list of named entries")
            for entry in entries:
                thing = entry.get(kind[:-1]) or {}
                if not isinstance(thing, dict):
                    raise refused(f"{path} is no kubeconfig: one of its {kind} is not a mapping")
                result[kind].setdefault(str(entry.get("name")), {**thing, _DIRECTORY: os.path.dirname(path)})
        result["current-context"] = result["current-context"] or config.get("current-context")
    if not read:
        raise refused(f"no kubeconfig at {os.pathsep.join(paths)}: set KUBECONFIG to a file that exists")
    return result


def _goes_directly(host: str, excluded: str) -> bool:
    """As Go reads NO_PROXY: names with all below them, addresses, ranges. This machine is never proxied."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    for entry in (part.strip().lower() for part in excluded.split(",")):
        name = entry.removeprefix("*").lstrip(".")
        if entry == "*" or (name and (host == name or (address is None and host.endswith(f".{name}")))):
            return True
        try:
            if address is not None and entry and address in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            continue
    return False


def _address(text: Any, what: str) -> SplitResult:
    """Without quoting it: it may hold a password."""
    try:
        address = urlsplit(str(text or ""))
        good = (
            address.scheme in ("http", "https")
            and address.hostname
            and (address.port is None or address.port)
        )
        if good and (what == "proxy-url" or "@" not in address.netloc):
            return address
    except ValueError:
        pass
    raise refused(f"the kubeconfig's cluster has no {what} that is an http or https address")


def refused(words: str) -> AuthenticationError:
    return SERVICE.error(AuthenticationError, words)


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
