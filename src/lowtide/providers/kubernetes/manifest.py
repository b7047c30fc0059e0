"""A sandbox as Kubernetes objects: its Pod and, with ``network="none"``, its NetworkPolicy. No I/O."""

from __future__ import annotations

import math
import re
from typing import Any

from lowtide.errors import UnsupportedError, ValidationError
from lowtide.providers.base import NetworkMode, SandboxSpec
from lowtide.providers.kubernetes.options import KubernetesOptions

Json = dict[str, Any]

CONTAINER = "main"
NAME_PREFIX = "lowtide-"
MAX_LIFETIME_SECONDS = 2**31 - 1
DEFAULT_LIFETIME_SECONDS = 86_400
"""A pod that nobody gave a lifetime ends after a day: its deadline cannot be moved, and there has to be one."""

# The first process of a sandbox without a command of its own. As PID 1 it takes in and reaps what
# is orphaned, cannot be killed from inside, and on SIGTERM passes it on and leaves when all others
# have: the node ends it after the grace.
IDLE = (
    "trap 'kill -TERM -1 2>/dev/null; while set -- /proc/[0-9]*; [ $# -gt 1 ]; do sleep 0.05; done; exit 0' TERM INT; "
    "while :; do sleep 2147483 & wait $!; done"
)

# What root needs to be root inside its own files; nothing that reaches the node or raw sockets.
_ROOT_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID",
)  # fmt: skip

_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def pod_name(lease_id: str) -> str:
    return NAME_PREFIX + lease_id


def is_name(text: str) -> bool:
    """Safe as one part of an API path."""
    return _DNS_LABEL.fullmatch(text) is not None


def options_of(spec: SandboxSpec) -> KubernetesOptions:
    if spec.options is None:
        return KubernetesOptions()
    if not isinstance(spec.options, KubernetesOptions):
        raise ValidationError(
            f"options must be KubernetesOptions, not {type(spec.options).__name__}",
            argument="options",
            provider="kubernetes",
        )
    return spec.options


def check(spec: SandboxSpec) -> None:
    """Refuse what this provider cannot do, before anything is created."""
    for key, value in spec.labels.as_dict().items():
        if not _LABEL_NAME.fullmatch(key) or not _LABEL_NAME.fullmatch(value):
            raise ValidationError(
                f"{key}={value} is no Kubernetes label: at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
                argument="tags",
                provider="kubernetes",
            )
    namespace = options_of(spec).namespace
    if namespace is not None and not _DNS_LABEL.fullmatch(namespace):
        raise ValidationError(
            f"{namespace!r} is no namespace name", argument="namespace", provider="kubernetes"
        )
    if spec.snapshot is not None:
        raise _unsupported("snapshot", "build an image with what the snapshot would hold")
    if spec.limits.pids is not None:
        raise _unsupported("pids-limit", "the node's kubelet sets it for all pods (podPidsLimit)")
    if spec.limits.disk_bytes is not None:
        raise _unsupported(
            "disk-limit", "KubernetesOptions(ephemeral_storage_bytes=…), which ends the pod above it"
        )
    if spec.isolation is not None and options_of(spec).runtime_class not in (None, spec.isolation.value):
        raise ValidationError(
            f"isolation={spec.isolation.value!r} is a runtime class, and provider_options name another",
            argument="isolation",
            provider="kubernetes",
        )
    if spec.network is not None and spec.network.mode is NetworkMode.ALLOW:
        raise _unsupported("network-allow", "network='none' or 'full', and a NetworkPolicy of your own")


def wants_policy(spec: SandboxSpec) -> bool:
    """Without a word about the network there is none, as on the local provider."""
    return spec.network is None or spec.network.mode is NetworkMode.NONE


def pod(spec: SandboxSpec, *, default_image: str) -> Json:
    options = options_of(spec)
    container: Json = {
        "name": CONTAINER,
        "image": spec.image or default_image,
        "imagePullPolicy": options.image_pull_policy,
        "command": [_literal(part) for part in spec.command]
        if spec.command
        else ["/bin/sh", "-c", _literal(IDLE)],
        "env": [{"name": name, "value": _literal(value)} for name, value in spec.environment.items()],
        "resources": _resources(spec, options),
        "securityContext": _container_security(options),
    }
    if options.environment_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in options.environment_secrets]
    if spec.working_dir:
        container["workingDir"] = spec.working_dir
    if spec.ports:
        container["ports"] = [{"containerPort": port, "protocol": "TCP"} for port in spec.ports]
    body: Json = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.termination_grace_seconds,
        "securityContext": _pod_security(options),
        "containers": [container],
    }
    if options.tmpfs:
        container["volumeMounts"] = [
            {"name": f"tmpfs-{number}", "mountPath": path} for number, path in enumerate(options.tmpfs)
        ]
        body["volumes"] = [
            {"name": f"tmpfs-{number}", "emptyDir": {"medium": "Memory"}}
            for number in range(len(options.tmpfs))
        ]
    if spec.lifetime_seconds is not None:
        body["activeDeadlineSeconds"] = min(MAX_LIFETIME_SECONDS, max(1, math.ceil(spec.lifetime_seconds)))
    for field, value in (
        ("runtimeClassName", spec.isolation.value if spec.isolation is not None else options.runtime_class),
        ("priorityClassName", options.priority_class),
        ("serviceAccountName", options.service_account),
        ("nodeSelector", dict(options.node_selector)),
        ("tolerations", [dict(one) for one in options.tolerations]),
        ("imagePullSecrets", [{"name": name} for name in options.image_pull_secrets]),
    ):
        if value:
            body[field] = value
    if options.user_namespace:
        body["hostUsers"] = False
    metadata: Json = {"name": pod_name(spec.lease_id), "labels": spec.labels.as_dict()}
    if options.annotations:
        metadata["annotations"] = dict(options.annotations)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def policy(spec: SandboxSpec) -> Json:
    """Nothing in, nothing out, for this one pod. The cluster's network plug-in has to enforce it."""
    marks = spec.labels.as_dict()
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": pod_name(spec.lease_id), "labels": marks},
        "spec": {
            "podSelector": {"matchLabels": {"lowtide-lease": spec.lease_id}},
            "policyTypes": ["Ingress", "Egress"],
        },
    }


def owned_by(created: Json) -> Json:
    """The patch that makes the garbage collector take the policy with its pod."""
    meta = created["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
    return {"metadata": {"ownerReferences": [owner]}}


def _resources(spec: SandboxSpec, options: KubernetesOptions) -> Json:
    limits: Json = {}
    requests: Json = {}
    cpu, memory = spec.limits.cpu, spec.limits.memory_bytes
    if cpu is not None:
        limits["cpu"] = _millicores(cpu)
    requested = (
        options.cpu_request
        if options.cpu_request is not None
        else (min(cpu, 0.1) if cpu is not None else None)
    )
    if requested is not None:
        requests["cpu"] = _millicores(requested)
    if memory is not None:
        limits["memory"] = str(memory)
    if options.memory_request_bytes is not None:
        requests["memory"] = str(options.memory_request_bytes)
    if options.ephemeral_storage_bytes is not None:
        limits["ephemeral-storage"] = str(options.ephemeral_storage_bytes)
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _container_security(options: KubernetesOptions) -> Json:
    root = not options.run_as_user
    security: Json = {
        "allowPrivilegeEscalation": options.allow_privilege_escalation,
        "privileged": False,
        "capabilities": {
            "drop": ["ALL"],
            "add": [*(_ROOT_CAPABILITIES if root else ()), *options.add_capabilities],
        },
    }
    if options.read_only_root:
        security["readOnlyRootFilesystem"] = True
    if not security["capabilities"]["add"]:
        del security["capabilities"]["add"]
    return security


def _pod_security(options: KubernetesOptions) -> Json:
    security: Json = {"seccompProfile": {"type": options.seccomp_profile}}
    if options.run_as_user is not None:
        security["runAsUser"] = options.run_as_user
        if options.run_as_user:
            security["runAsNonRoot"] = True
    if options.run_as_group is not None:
        security["runAsGroup"] = options.run_as_group
    if options.fs_group is not None:
        security["fsGroup"] = options.fs_group
    return security


def _literal(text: str) -> str:
    """Kubernetes expands $(NAME) in commands and values; doubling keeps a dollar a dollar."""
    return text.replace("$", "$$")


def _millicores(cores: float) -> str:
    return f"{max(1, round(cores * 1000))}m"


def _unsupported(feature: str, alternative: str) -> UnsupportedError:
    return UnsupportedError(
        f"the kubernetes provider has no {feature}; instead: {alternative}",
        feature=feature,
        alternative=alternative,
        provider="kubernetes",
    )
