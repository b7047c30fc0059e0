"""The agent's view of a sandbox: `connect()`, `run(action)`, `close()`, the same on every provider."""

from lowtide.runtime.base import Runtime
from lowtide.runtime.config import RuntimeConfig
from lowtide.runtime.coreweave import CoreWeaveRuntime
from lowtide.runtime.daytona import DaytonaRuntime
from lowtide.runtime.docker import DockerRuntime
from lowtide.runtime.e2b import E2BRuntime
from lowtide.runtime.kubernetes import KubernetesRuntime
from lowtide.runtime.local import LocalRuntime
from lowtide.runtime.modal import ModalRuntime
from lowtide.runtime.runloop import RunloopRuntime

__all__ = [
    "CoreWeaveRuntime",
    "DaytonaRuntime",
    "DockerRuntime",
    "E2BRuntime",
    "KubernetesRuntime",
    "LocalRuntime",
    "ModalRuntime",
    "RunloopRuntime",
    "Runtime",
    "RuntimeConfig",
]
