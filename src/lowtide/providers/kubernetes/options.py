"""What only Kubernetes understands about one sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Goes in `SandboxSpec.options`. Everything has a safe default; names are Kubernetes' own where it has one."""

    namespace: str | None = None
    """None: the provider's. Another one must be readable with the same credentials."""
    runtime_class: str | None = None
    """For example ``gvisor`` or ``kata``: a kernel boundary between the sandbox and the node."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """With ``kubernetes.io/arch`` among it, for nodes of another architecture than the API server's."""
    tolerations: tuple[Mapping[str, str | int], ...] = ()
    priority_class: str | None = None
    unschedulable_seconds: float = 0.0
    """How long a pod that no node takes may wait for one (a cluster autoscaler). 0: fail at once."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    environment_secrets: tuple[str, ...] = ()
    """Names of Secrets whose keys become environment variables: what must not stand in the Pod itself."""

    cpu_request: float | None = None
    """None: a tenth of a core, or the limit where that is less."""
    memory_request_bytes: int | None = None
    """None: the memory limit."""
    ephemeral_storage_bytes: int | None = None
    """Above this the node evicts the pod: an end, not an error of the write. So it is not `Limits.disk_bytes`."""

    service_account: str | None = None
    """Only its identity (image pulls, pod policies). Its token is never mounted."""
    run_as_user: int | None = None
    """None: the image's user. A number other than 0 also drops every capability."""
    run_as_group: int | None = None
    fs_group: int | None = None
    """A further group of every process. Not Kubernetes' own fsGroup, which would let it read the program inside."""
    user_namespace: bool = False
    """Root inside is nobody on the node (``hostUsers: false``); needs a cluster that supports it."""
    read_only_root: bool = False
    tmpfs: tuple[str, ...] = ()
    """Directories in memory, writable also with a read-only root."""
    add_capabilities: tuple[str, ...] = ()
    allow_privilege_escalation: bool = False
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] = "RuntimeDefault"

    termination_grace_seconds: int = 5
    """How long the main process has after SIGTERM when the lifetime ends or somebody else deletes the pod."""
    annotations: Mapping[str, str] = field(default_factory=dict)
