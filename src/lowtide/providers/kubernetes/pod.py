"""A sandbox as Kubernetes objects: its Pod, its Secret and, with ``network="none"``, its NetworkPolicy. No I/O."""

from __future__ import annotations

import base64
import math
import re
from typing import Any

from lowtide import arguments
from lowtide.errors import ValidationError
from lowtide.providers.base import NetworkMode, SandboxSpec
from lowtide.providers.hosted import asked_for
from lowtide.providers.hosted import options_of as _options_of
from lowtide.providers.inside import program
from lowtide.providers.kubernetes.errors import SERVICE
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
_MOUNT = {"name": "lowtide", "mountPath": DIRECTORY}
_LAST_WORDS = "FallbackToLogsOnError"  # so that a main command's are heard
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
    return _options_of(spec, KubernetesOptions, "kubernetes")


def check(spec: SandboxSpec) -> None:
    """Refuse what this provider cannot do, before anything is created."""
    for key, value in spec.labels.as_dict().items():
        if not _LABEL_NAME.fullmatch(key) or not _LABEL_NAME.fullmatch(value):
            words = f"{key}={value} is no Kubernetes label: at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit"
            raise _wrong("tags", words)
    namespace = options_of(spec).namespace
    if namespace is not None and not _DNS_LABEL.fullmatch(namespace):
        raise _wrong("namespace", f"{namespace!r} is no namespace name")
    arguments.sandbox_environment("environment_variables", spec.environment)
    if spec.isolation is not None and options_of(spec).runtime_class not in (None, spec.isolation.value):
        words = f"isolation={spec.isolation.value!r} is a runtime class, and provider_options name another"
        raise _wrong("isolation", words)


def _wrong(argument: str, words: str) -> ValidationError:
    return SERVICE.error(ValidationError, words, argument=argument)


def wants_policy(spec: SandboxSpec) -> bool:
    """Without a word about the network there is none, as on the local provider."""
    return spec.network is None or spec.network.mode is NetworkMode.NONE


def pod(spec: SandboxSpec, *, default_image: str, architecture: str, key: bytes | None) -> Json:
    """`key` None: it and the program are in the Secret. Else the right to make one is missing: the key stands in
    the Pod, and a first container, which needs a shell, writes the program."""
    options = options_of(spec)
    fixed = spec.fixed_lifetime_seconds or DEFAULT_LIFETIME_SECONDS
    cap = min(MAX_LIFETIME_SECONDS - _LATER_SECONDS, max(1, math.ceil(fixed)))
    container = _container(spec, spec.image or default_image, cap, key)
    secret = pod_name(spec.lease_id)
    item = {"key": "inside", "path": "inside", "mode": _ONLY_EXECUTABLE}
    in_secret = {"secret": {"secretName": secret, "items": [item], "defaultMode": _ONLY_EXECUTABLE}}
    in_memory = {"emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    tmpfs = [{"name": f"tmpfs-{at}", "emptyDir": {"medium": "Memory"}} for at in range(len(options.tmpfs))]
    body = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": options.termination_grace_seconds,
        "activeDeadlineSeconds": cap + _LATER_SECONDS,
        "securityContext": _pod_security(options),
        "initContainers": [_writes_program(container, architecture)] if key is not None else None,
        "containers": [container],
        "volumes": [{"name": "lowtide", **(in_secret if key is None else in_memory)}, *tmpfs],
        "nodeSelector": {ARCHITECTURE: architecture, **options.node_selector},
        "runtimeClassName": spec.isolation.value if spec.isolation is not None else options.runtime_class,
        "priorityClassName": options.priority_class,
        "serviceAccountName": options.service_account,
        "tolerations": [dict(one) for one in options.tolerations],
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "hostUsers": False if options.user_namespace else None,
    }
    metadata = {**_metadata(spec), "annotations": dict(options.annotations)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": asked_for(metadata), "spec": asked_for(body)}


def _container(spec: SandboxSpec, image: str, cap: int, key: bytes | None) -> Json:
    options = options_of(spec)
    lifetime = min(cap, max(1, math.ceil(spec.lifetime_seconds or cap)))
    reference = {"valueFrom": {"secretKeyRef": {"name": pod_name(spec.lease_id), "key": "key"}}}
    tmpfs = [{"name": f"tmpfs-{at}", "mountPath": path} for at, path in enumerate(options.tmpfs)]
    return asked_for(
        {
            "name": CONTAINER,
            "image": image,
            "imagePullPolicy": options.image_pull_policy,
            "command": [PROGRAM, "guard", str(lifetime), str(cap)],
            "args": [_literal(part) for part in spec.command or ()],
            "workingDir": spec.working_dir,
            "env": [
                *({"name": name, "value": _literal(value)} for name, value in spec.environment.items()),
                {"name": program.KEY, **(reference if key is None else {"value": key.hex()})},
            ],
            "envFrom": [{"secretRef": {"name": name}} for name in options.environment_secrets],
            "ports": [{"containerPort": port, "protocol": "TCP"} for port in spec.ports],
            "resources": _resources(spec, options),
            "securityContext": _container_security(options),
            "terminationMessagePolicy": _LAST_WORDS,
            "volumeMounts": [{**_MOUNT, "readOnly": True}, *tmpfs],
        }
    )


def _writes_program(container: Json, architecture: str) -> Json:
    """The container before the main one, of the same image."""
    line = f"echo {program.packed(architecture)} | base64 -d | gzip -d >{PROGRAM} && chmod 111 {PROGRAM}"
    same = ("image", "imagePullPolicy", "resources", "securityContext", "terminationMessagePolicy")
    return {
        **{name: container[name] for name in same if name in container},
        "name": "program",
        "command": ["/bin/sh", "-c", line],
        "volumeMounts": [_MOUNT],
    }


def _metadata(spec: SandboxSpec) -> Json:
    return {"name": pod_name(spec.lease_id), "labels": spec.labels.as_dict()}


def secret(spec: SandboxSpec, *, architecture: str, key: bytes) -> Json:
    """The program, and the key that only whoever may read secrets here is to know."""
    data = {"inside": program.program(architecture, provider="kubernetes"), "key": key.hex().encode()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(spec),
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
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(spec),
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
    cpu, requested = spec.limits.cpu, options.cpu_request
    if requested is None and cpu is not None:
        requested = min(cpu, 0.1)
    limits = {
        "cpu": _millicores(cpu),
        "memory": _text(spec.limits.memory_bytes),
        "ephemeral-storage": _text(options.ephemeral_storage_bytes),
    }
    requests = {"cpu": _millicores(requested), "memory": _text(options.memory_request_bytes)}
    return asked_for({"limits": asked_for(limits), "requests": asked_for(requests)})


def _container_security(options: KubernetesOptions) -> Json:
    root = _ROOT_CAPABILITIES if not options.run_as_user else ()
    return asked_for(
        {
            "allowPrivilegeEscalation": options.allow_privilege_escalation,
            "privileged": False,
            "capabilities": asked_for({"drop": ["ALL"], "add": [*root, *options.add_capabilities]}),
            "readOnlyRootFilesystem": options.read_only_root or None,
        }
    )


def _pod_security(options: KubernetesOptions) -> Json:
    return asked_for(
        {
            "seccompProfile": {"type": options.seccomp_profile},
            "runAsUser": options.run_as_user,
            "runAsNonRoot": True if options.run_as_user else None,
            "runAsGroup": options.run_as_group,
            # Not fsGroup: it would make the program's file readable, and so its processes open, to that group.
            "supplementalGroups": [options.fs_group] if options.fs_group is not None else None,
        }
    )


def _text(number: int | None) -> str | None:
    return str(number) if number is not None else None


def _literal(text: str) -> str:
    """Kubernetes expands $(NAME) in commands and values; doubling keeps a dollar a dollar."""
    return text.replace("$", "$$")


def _millicores(cores: float | None) -> str | None:
    return f"{max(1, round(cores * 1000))}m" if cores is not None else None
