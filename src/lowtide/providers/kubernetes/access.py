"""Which cluster, as whom, in which namespace: read from files and environment, without a connection."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.errors import AuthenticationError, MissingDependencyError

NAMESPACE = "LOWTIDE_KUBERNETES_NAMESPACE"
CONTEXT = "LOWTIDE_KUBERNETES_CONTEXT"
IMAGE = "LOWTIDE_KUBERNETES_IMAGE"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

# What another process needs to read the same kubeconfig and run the same credential plug-in.
_INHERITED = ("HOME", "PATH", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "HTTPS_PROXY", "NO_PROXY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One cluster and namespace. `kubeconfig` None means the service account of the pod this runs in."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    server: str
    authority: str
    environ: Mapping[str, str]

    @classmethod
    def resolve(cls, environ: Mapping[str, str], options: Mapping[str, Any]) -> Access:
        """kubectl's order: named, KUBECONFIG, ~/.kube/config, the pod's service account."""
        namespace = options.get("namespace") or environ.get(NAMESPACE)
        context = options.get("context") or environ.get(CONTEXT)
        home = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".kube", "config")
        named = options.get("kubeconfig") or environ.get("KUBECONFIG")
        if named:
            paths = [
                os.path.abspath(os.path.expanduser(path)) for path in str(named).split(os.pathsep) if path
            ]
            return cls._from_files(paths, context, namespace, environ)
        if os.path.exists(home):
            return cls._from_files([home], context, namespace, environ)
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if host and port and os.path.exists(f"{SERVICE_ACCOUNT}/token"):
            return cls(
                kubeconfig=None,
                context=None,
                namespace=namespace or _read(f"{SERVICE_ACCOUNT}/namespace") or "default",
                server=f"https://{host}:{port}",
                authority=_digest(_read(f"{SERVICE_ACCOUNT}/ca.crt") or ""),
                environ=_inherited(environ),
            )
        raise AuthenticationError(
            "no Kubernetes cluster is configured: set KUBECONFIG to a kubeconfig file, or run inside a pod with a service account",
            provider="kubernetes",
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
            raise AuthenticationError(
                f"the kubeconfig has no context {name!r}; known: {', '.join(sorted(config['contexts'])) or 'none'}",
                provider="kubernetes",
            )
        cluster = config["clusters"].get(str(chosen.get("cluster"))) or {}
        authority = cluster.get("certificate-authority-data") or cluster.get("certificate-authority") or ""
        return cls(
            kubeconfig=os.pathsep.join(paths),
            context=name,
            namespace=namespace or chosen.get("namespace") or "default",
            server=str(cluster.get("server", "")).rstrip("/"),
            authority=_digest(str(authority)),
            environ=_inherited(environ),
        )

    @property
    def account(self) -> str:
        """Server, its authority and the namespace: where the sandboxes are, whoever asks for them."""
        return _digest(f"{self.server}|{self.authority}|{self.namespace}")

    def credentials(self) -> dict[str, str]:
        known = dict(self.environ)
        known[NAMESPACE] = self.namespace
        if self.kubeconfig is not None:
            known["KUBECONFIG"] = self.kubeconfig
        if self.context is not None:
            known[CONTEXT] = self.context
        return known


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: environ[key] for key in _INHERITED if key in environ}


def _merged(paths: list[str]) -> dict[str, Any]:
    """The files as kubectl merges them: for each name, the first file that has it."""
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise missing_dependency() from error
    result: dict[str, Any] = {"contexts": {}, "clusters": {}, "current-context": None}
    read = 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                config = yaml.safe_load(file) or {}
        except FileNotFoundError:
            continue
        except (OSError, yaml.YAMLError) as error:
            raise AuthenticationError(
                f"the kubeconfig {path} could not be read: {type(error).__name__}", provider="kubernetes"
            ) from error
        read += 1
        for kind, key in (("contexts", "context"), ("clusters", "cluster")):
            for entry in config.get(kind) or []:
                result[kind].setdefault(str(entry.get("name")), entry.get(key) or {})
        result["current-context"] = result["current-context"] or config.get("current-context")
    if not read:
        raise AuthenticationError(
            f"no kubeconfig at {os.pathsep.join(paths)}: set KUBECONFIG to a file that exists",
            provider="kubernetes",
        )
    return result


def missing_dependency() -> MissingDependencyError:
    return MissingDependencyError(
        "the kubernetes provider needs its client: pip install 'lowtide[kubernetes]'",
        install="pip install 'lowtide[kubernetes]'",
        provider="kubernetes",
    )


def _read(path: str) -> str | None:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
