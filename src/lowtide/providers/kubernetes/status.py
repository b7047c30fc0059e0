"""What a Pod's status means: its state, why it will never run, why it ended. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from lowtide.providers.base import Labels, SandboxInfo, SandboxState
from lowtide.providers.inside.program import EXPIRED
from lowtide.providers.kubernetes.pod import CONTAINER, Json

# Reasons with which a container waits while all is well; everything else it waits with is trouble.
_PROGRESS = frozenset({"ContainerCreating", "PodInitializing", ""})

_OVER = {"Succeeded": SandboxState.COMPLETED, "Failed": SandboxState.FAILED}

# Kubernetes' words for an end, in lowtide's.
_ENDS = {
    "DeadlineExceeded": "expired",
    "Evicted": "evicted",
    "Preempting": "evicted",
    "OOMKilled": "oom",
    "NodeLost": "node-lost",
    "NodeShutdown": "node-shutdown",
    "Shutdown": "node-shutdown",
    "Terminated": "node-shutdown",
    "Completed": "exited",
    "Error": "exited",
    "ContainerCannotRun": "failed",
    "StartError": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a pod does not run: Kubernetes' own reason and message."""

    reason: str
    message: str
    ended: bool = False
    """True when it ran, or was to run, and is over; False when it cannot start."""


def is_ours(thing: Json) -> bool:
    return Labels.from_dict(thing["metadata"].get("labels") or {}) is not None


def info(pod: Json, sandbox_id: str) -> SandboxInfo:
    meta, status = pod["metadata"], pod.get("status") or {}
    problem = trouble(pod)
    ended = _terminated(status)
    return SandboxInfo(
        sandbox_id=sandbox_id,
        state=_state(pod),
        labels=meta.get("labels") or {},
        created_at=_time(meta.get("creationTimestamp")),
        exit_code=ended.get("exitCode") if ended else None,
        reason=f"{problem.reason}: {problem.message}" if problem else None,
    )


def running(pod: Json) -> bool:
    if pod["metadata"].get("deletionTimestamp") or (pod.get("status") or {}).get("phase") != "Running":
        return False
    return "running" in (_container(pod["status"]).get("state") or {})


def starting(pod: Json) -> bool:
    """On a node, not yet running, and nothing says that it will not."""
    return (pod.get("status") or {}).get("phase") == "Pending" and trouble(pod) is None


def has_run(pod: Json) -> bool:
    """Its containers have been started; none of them ever is again."""
    return any("running" in state or "terminated" in state for state in _states(pod))


def all_terminated(pod: Json, *, has_run: bool) -> bool:
    """The node itself has said that no container of this pod runs any more.

    A container that it has removed already, the node shows as one that waits; then the phase says that it has
    ended. A phase alone says too little: that of an evicted pod ends while its containers still run, and
    one past its deadline can still be about to start.
    """
    states = _states(pod)
    if any("running" in (one.get("state") or {}) for one in _first(pod.get("status") or {})):
        return False
    if has_run and (pod.get("status") or {}).get("phase") in _OVER:
        return not any("running" in state for state in states)
    return bool(states) and all("terminated" in state for state in states)


def _states(pod: Json) -> list[Json]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return [one.get("state") or {} for one in statuses]


def never_started(pod: Json) -> bool:
    """No container of this pod has ever been made, and the node says why (its image, its configuration)."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return bool(statuses) and all(
        not one.get("containerID")
        and not one.get("lastState")
        and ((one.get("state") or {}).get("waiting") or {}).get("reason", "") not in _PROGRESS
        for one in statuses
    )


def unschedulable(pod: Json) -> Trouble | None:
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return Trouble(
                reason=condition.get("reason") or "Unschedulable",
                message=condition.get("message") or "no node takes it",
            )
    return None


def trouble(pod: Json) -> Trouble | None:
    """Why commands cannot run in it, now and for good; None while it runs or may still start."""
    meta, status = pod["metadata"], pod.get("status") or {}
    ended = _terminated(status)
    if ended or status.get("phase") in _OVER:
        reason = status.get("reason") or (ended or {}).get("reason") or str(status["phase"])
        if (ended or {}).get("exitCode") == EXPIRED and not status.get("reason"):
            reason = "DeadlineExceeded"  # by the program's own clock
        return Trouble(reason=reason, message=_message(status, ended), ended=True)
    if meta.get("deletionTimestamp"):
        return Trouble(reason="Deleted", message="it is being deleted", ended=True)
    for one in (_container(status), *_first(status)):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in _PROGRESS:
            return Trouble(reason=waiting["reason"], message=waiting.get("message") or waiting["reason"])
    return unschedulable(pod)


def word(reason: str) -> str:
    """The reason of a `SandboxGone`."""
    return _ENDS.get(reason, reason.lower())


def _state(pod: Json) -> SandboxState:
    phase = (pod.get("status") or {}).get("phase")
    if phase in _OVER:
        return _OVER[phase]
    if pod["metadata"].get("deletionTimestamp"):
        return SandboxState.ENDING
    return SandboxState.PENDING if phase == "Pending" else SandboxState.RUNNING


def _container(status: Json) -> Json:
    for one in status.get("containerStatuses") or []:
        if one.get("name") == CONTAINER:
            return dict(one)
    return {}


def _first(status: Json) -> list[Json]:
    """The container that brings the program in, where there is one."""
    return status.get("initContainerStatuses") or []


def _terminated(status: Json) -> Json | None:
    """How its main container ended, or the one before it, without which that never starts."""
    for one in (_container(status), *_first(status)):
        ended: Json | None = (one.get("state") or {}).get("terminated")
        if ended is not None and (one.get("name") == CONTAINER or ended.get("exitCode")):
            return ended
    return None


def _message(status: Json, ended: Json | None) -> str:
    parts = [status.get("message"), (ended or {}).get("message")]
    if ended and ended.get("exitCode") is not None:
        parts.append(f"its main process ended with exit code {ended['exitCode']}")
    return "; ".join(str(part).strip() for part in parts if part) or "no message"


def deadline(pod: Json) -> datetime | None:
    """The fixed end, once a node has taken the pod: the clock begins then."""
    begin = _time((pod.get("status") or {}).get("startTime"))
    seconds = pod["spec"].get("activeDeadlineSeconds")
    return begin + timedelta(seconds=seconds) if begin is not None and seconds is not None else None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
