"""gVisor as a second wall: finding runsc, what bwrap makes around it, and the container it runs.

bwrap makes the same namespaces, layers and groups as for every local sandbox, with the layers at ROOT and next to
nothing beside them. There runsc runs one container, whose main process is the program inside. So whatever ends the
sandbox (a destroy, its lifetime's alarm, a limit) ends gVisor with it, and nothing of it is outside.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowtide.errors import MissingDependencyError, UnsupportedError, ValidationError
from lowtide.providers.base import Capability, NetworkMode, SandboxSpec
from lowtide.providers.inside import program
from lowtide.providers.local import bwrap
from lowtide.providers.local.python_trees import ReadOnlyTree

ROOT = "/rootfs"
CONTAINER = "sandbox"
PROGRAM = "/dev/lowtide/inside"  # in the container's /dev, which is no layer: no snapshot holds it
NPROC = "4096"
"""Processes and threads of gVisor's own, of which it takes some for each process in the sandbox."""
_RUNSC, _BUNDLE, _STATE, _PROGRAM_DIRECTORY = "/runsc", "/bundle", "/run/runsc", "/inside"
_CONFIGURATION, _PROGRAM = "12", "13"  # the descriptors of `files`, as the spawner leaves them open
_DEV_BYTES = 1 << 20

# What root can do in there with what is the sandbox's own. Its kernel is gVisor: none of it means anything outside.
_CAPABILITIES = (
    "CAP_CHOWN", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SETGID",
    "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT", "CAP_SYS_RESOURCE",
)  # fmt: skip


def find(environ: Mapping[str, str]) -> str:
    """LOWTIDE_RUNSC, else the one on the search path."""
    named = environ.get("LOWTIDE_RUNSC")
    path = f"{environ.get('PATH', os.defpath)}:/usr/local/bin:/usr/bin:/usr/sbin"
    found = shutil.which(named, path=path) if named else shutil.which("runsc", path=path)
    if found is None:
        raise MissingDependencyError(
            f"isolation='gvisor' needs gVisor's program runsc, and {named or 'it'} is not on this machine. "
            "Install it (Debian: apt install runsc; others: gvisor.dev), or name it with LOWTIDE_RUNSC",
            provider="local",
            install="apt install runsc",
        )
    return os.path.realpath(found)


LACKS = frozenset(
    {
        Capability.NETWORK_INTERNET,  # gVisor has a network of its own, and none is set up for it
        Capability.NETWORK_HOST,
        Capability.NETWORK_ALLOW,
        Capability.NETWORK_PORTS,
        Capability.PIDS_LIMIT,  # gVisor counts none, and its own processes are not the sandbox's
        Capability.TTY,  # Ctrl+C and a new size reach nobody: gVisor's terminals send no signals
    }
)


def check(spec: SandboxSpec) -> None:
    """Refuse what does not go together with it, for whoever comes past the checks of the public surface."""
    if spec.network is not None and spec.network.mode is not NetworkMode.NONE:
        raise together(f"network-{spec.network.mode.value}", "network='none', or no isolation")
    if spec.limits.pids is not None:
        raise together(Capability.PIDS_LIMIT.value, "a memory limit, which bounds them too")
    if program.KEY in spec.environment:
        raise ValidationError(
            f"{program.KEY} is lowtide's own", argument="environment_variables", provider="local"
        )


def together(feature: str, alternative: str) -> UnsupportedError:
    return UnsupportedError(
        f"the local provider cannot do {feature!r} together with isolation='gvisor'; {alternative}",
        provider="local",
        argument="isolation",
        feature=feature,
        alternative=alternative,
    )


def arguments(
    *,
    runsc: str,
    overlays: Sequence[bwrap.Overlay],
    read_only: Sequence[ReadOnlyTree],
    hostname: str,
    translate: Callable[[str], str],
) -> list[str]:
    """For bwrap: the place in which runsc runs. It has every right over these namespaces, which it needs to make
    its own; its own walls stand inside them, and take all of that away from what serves the sandbox."""
    args = bwrap.namespaces(network=False, hostname=hostname)
    args += ["--cap-add", "ALL"]
    args += bwrap.layers(overlays, read_only, translate, root=ROOT)
    args += ["--size", str(_DEV_BYTES), "--tmpfs", f"{ROOT}/dev"]
    args += ["--perms", "0400", "--file", _CONFIGURATION, f"{_BUNDLE}/config.json"]
    args += ["--perms", "0555", "--file", _PROGRAM, f"{_PROGRAM_DIRECTORY}/{os.path.basename(PROGRAM)}"]
    args += ["--ro-bind", translate(runsc), _RUNSC, "--dev", "/dev", "--proc", "/proc"]
    args += ["--dir", "/run", "--dir", "/tmp"]  # noqa: S108 - in namespaces of its own
    return [*args, "--clearenv", "--argv0", "lowtide"]


def files(
    *,
    command: Sequence[str] | None,
    working_dir: str,
    environment: Mapping[str, str],
    key: bytes,
    hostname: str,
) -> list[str]:
    """What `arguments` names by descriptor, in base64: memory only, because an environment may hold secrets."""
    configuration = _configuration(command, working_dir, environment, key, hostname)
    inside = program.program(os.uname().machine, provider="local")
    return [base64.b64encode(data).decode() for data in (json.dumps(configuration).encode(), inside)]


def run(*, owner: int | None) -> list[str]:
    """The main command of the place: it ends with the container, and with the container's exit code."""
    return [*_runsc(owner), "run", "--bundle", _BUNDLE, CONTAINER]


def attach(*, owner: int | None) -> tuple[str, ...]:
    """Open a channel to the program inside."""
    # Without the key, which the container's environment holds: gVisor shows every process's to root.
    without = ("--env", f"{program.KEY}=")
    return (*_runsc(owner), "exec", "--cwd", "/", *without, CONTAINER, PROGRAM, "attach")


def tell(*words: str, owner: int | None) -> tuple[str, ...]:
    """`pause`, `resume`, or `kill` with a signal."""
    return (*_runsc(owner), words[0], CONTAINER, *words[1:])


def _runsc(owner: int | None) -> list[str]:
    # Changes go to the sandbox's own layer and not into gVisor's memory. The groups are the ones around it already.
    words = [_RUNSC, "--root", _STATE, "--network=none", "--ignore-cgroups", "--overlay2=none"]
    # An ordinary user has one id, and no second one for gVisor's own processes.
    return [*words, "--rootless"] if owner is None else words


def _configuration(
    command: Sequence[str] | None,
    working_dir: str,
    environment: Mapping[str, str],
    key: bytes,
    hostname: str,
) -> dict[str, Any]:
    variables = [f"{name}={value}" for name, value in environment.items()]
    return {
        "ociVersion": "1.0.0",
        "hostname": hostname,
        "root": {"path": ROOT, "readonly": False},
        "process": {
            # The lifetime is an alarm outside: this clock is not armed.
            "args": [PROGRAM, "guard", "0", "0", *(command or ())],
            "env": [*variables, f"{program.KEY}={key.hex()}"],
            "cwd": working_dir,  # made, if it is not there, by gVisor: no link in it leads out of ROOT
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": True,
            "capabilities": {name: _CAPABILITIES for name in ("bounding", "effective", "permitted")},
        },
        "mounts": [
            {"destination": "/proc", "type": "proc"},
            {"destination": "/dev", "type": "tmpfs", "options": ["mode=755"]},
            {
                "destination": "/dev/shm",  # noqa: S108 - inside the sandbox
                "type": "tmpfs",
                "options": ["mode=1777", f"size={bwrap.SHM_BYTES}"],
            },
            {
                "destination": os.path.dirname(PROGRAM),
                "source": _PROGRAM_DIRECTORY,
                "type": "bind",
                "options": ["ro"],
            },
        ],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }
