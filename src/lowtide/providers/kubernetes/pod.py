"""A sandbox as Kubernetes objects: its Pod, its Secret and, with ``network="none"``, its NetworkPolicy. No I/O."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from lowtide.errors import UnsupportedError, ValidationError
from lowtide.providers import hosted
from lowtide.providers.base import NetworkMode, SandboxSpec
from lowtide.providers.inside import program
from lowtide.providers.kubernetes.options import KubernetesOptions

Json = dict[str, Any]

CONTAINER = "main"
NAME_PREFIX = "lowtide-"
MAX_LIFETIME_SECONDS = 2**31 - 1
DEFAULT_LIFETIME_SECONDS = 7 * 86_400
"""The deadline of a pod that nobody gave one: it cannot be moved later, and there has to be one."""
_LATER_SECONDS = 60
"""The node's deadline comes that much after the program's own, which ends everything at once and says why."""
DIRECTORY = "/.lowtide"
PROGRAM = f"{DIRECTORY}/inside"
ARCHITECTURE = "kubernetes.io/arch"
_ONLY_EXECUTABLE = 0o111  # nobody but root may read it: so who runs it cannot be looked into

# What root needs to be root inside its own files; nothing that reaches the node or raw sockets. SETPCAP is the
# program's alone: no command has it, so that none may look into the process that holds the channel.
_ROOT_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETPCAP", "SETUID",
)  # fmt: skip

_LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def pod_name(lease_id: str) -> str:
    return NAME_PREFIX + lease_id


def pods(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def secrets(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/secrets"


def policies(namespace: str) -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"


BESIDE = (secrets, policies)
"""What may stand beside a pod, under its name."""


def is_name(text: str) -> bool:
    """Safe as one part of an API path."""
    return _DNS_LABEL.fullmatch(text) is not None


def options_of(spec: SandboxSpec) -> KubernetesOptions:
    return hosted.options_of(spec, KubernetesOptions, "kubernetes")


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
    if program.KEY in spec.environment:
        raise ValidationError(
            f"{program.KEY} is lowtide's own", argument="environment_variables", provider="kubernetes"
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


def pod(spec: SandboxSpec, *, default_image: str, architecture: str, key: bytes | None) -> Json:
    """`key` None: it and the program are in the Secret. Else the right to make one is missing: the key stands in
    the Pod, and a first container, which needs a shell, writes the program."""
    options = options_of(spec)
    fixed = spec.fixed_lifetime_seconds or DEFAULT_LIFETIME_SECONDS
    cap = min(MAX_LIFETIME_SECONDS - _LATER_SECONDS, max(1, math.ceil(fixed)))
    lifetime = min(cap, max(1, math.ceil(spec.lifetime_seconds or fixed)))
    mount = {"name": "lowtide", "mountPath": DIRECTORY, "readOnly": True}
    container: Json = {
        "name": CONTAINER,
        "image": spec.image or default_image,
        "imagePullPolicy": options.image_pull_policy,
        "command": [PROGRAM, "guard", str(lifetime), str(cap)],
        "args": [_literal(part) for part in spec.command or ()],
        "env": [{"name": name, "value": _literal(value)} for name, value in spec.environment.items()],
        "resources": _resources(spec, options),
        "securityContext": _container_security(options),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # so that a main command's last words are heard
        "volumeMounts": [mount],
    }
    secret = pod_name(spec.lease_id)
    volume: Json = {"name": "lowtide"}
    if key is None:
        reference = {"name": secret, "key": "key"}
        container["env"].append({"name": program.KEY, "valueFrom": {"secretKeyRef": reference}})
        item = {"key": "inside", "path": "inside", "mode": _ONLY_EXECUTABLE}
        volume["secret"] = {"secretName": secret, "items": [item], "defaultMode": _ONLY_EXECUTABLE}
    else:
        container["env"].append({"name": program.KEY, "value": key.hex()})
        volume["emptyDir"] = {"medium": "Memory", "sizeLimit": "1Mi"}
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
        "activeDeadlineSeconds": cap + _LATER_SECONDS,
        "securityContext": _pod_security(options),
        "containers": [container],
        "volumes": [volume],
        "nodeSelector": {ARCHITECTURE: architecture, **options.node_selector},
    }
    if key is not None:
        line = f"echo {program.packed(architecture)} | base64 -d | gzip -d >{PROGRAM} && chmod 111 {PROGRAM}"
        body["initContainers"] = [
            {
                **{k: container[k] for k in ("image", "imagePullPolicy", "resources", "securityContext")},
                "name": "program",
                "command": ["/bin/sh", "-c", line],
                "volumeMounts": [{**mount, "readOnly": False}],
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ]
    for number, path in enumerate(options.tmpfs):
        container["volumeMounts"].append({"name": f"tmpfs-{number}", "mountPath": path})
        body["volumes"].append({"name": f"tmpfs-{number}", "emptyDir": {"medium": "Memory"}})
    for field, value in (
        ("runtimeClassName", spec.isolation.value if spec.isolation is not None else options.runtime_class),
        ("priorityClassName", options.priority_class),
        ("serviceAccountName", options.service_account),
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


def secret(spec: SandboxSpec, *, architecture: str, key: bytes) -> Json:
    """The program, and the key that only whoever may read secrets here is to know."""
    data = {"inside": program.program(architecture, provider="kubernetes"), "key": key.hex().encode()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": pod_name(spec.lease_id), "labels": spec.labels.as_dict()},
        "type": "Opaque",
        "immutable": True,  # so that no node watches it
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


def key_in_secret(thing: Json) -> bytes | None:
    text = (thing.get("data") or {}).get("key")
    return bytes.fromhex(base64.b64decode(text).decode()) if text else None


def key_in_pod(thing: Json) -> bytes | None:
    for container in thing["spec"]["containers"]:
        for variable in (container.get("env") or ()) if container["name"] == CONTAINER else ():
            if variable["name"] == program.KEY and variable.get("value"):
                return bytes.fromhex(variable["value"])
    return None


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
    """The patch that makes the garbage collector take what stands beside a pod with it."""
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
        # Not fsGroup: it would make the program's file readable, and so its processes open, to that group.
        security["supplementalGroups"] = [options.fs_group]
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
