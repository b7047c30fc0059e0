"""Docker and Kubernetes through lowtide, next to the same by the `docker` and `kubectl` commands."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Comparison, Skipped, interleave, timed
from benchmarks.raw import run
from lowtide import Sandbox
from lowtide.lifecycle.lease import new_lease_id

HOW = 'scripts/engines up docker kube; eval "$(scripts/engines env)"'


def docker_life(samples: int) -> Comparison:
    """Both without grace: `docker rm -f` gives none either."""
    docker, image = _docker()
    options = _docker_options()

    def ours() -> None:
        sandbox = Sandbox.run(provider="docker", container_image=image, network="none")
        sandbox.exec(["true"], check=True).result()
        sandbox.stop(graceful_shutdown_seconds=0).result()

    def raw() -> None:
        name = _name()
        try:
            run([docker, "run", "-d", "--name", name, *options, image, "sleep", "infinity"])
            run([docker, "exec", name, "true"])
        finally:
            run([docker, "rm", "-f", name])

    mine, theirs = interleave(lambda: timed(ours), lambda: timed(raw), samples=samples)
    return Comparison(
        name="docker-life",
        what="Docker create→exec→remove",
        against="`docker run -d` + `docker exec` + `docker rm -f` by the docker command",
        limit=0.85,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={"docker": _docker_version(docker), "options": options},
    )


def docker_exec(samples: int) -> Comparison:
    docker, image = _docker()
    with Sandbox.run(provider="docker", container_image=image, network="none") as sandbox:
        argv = [docker, "exec", str(sandbox.wait().sandbox_id), "true"]
        mine, theirs = interleave(_command(sandbox), lambda: timed(lambda: run(argv)), samples=samples)
    return Comparison(
        name="docker-exec",
        what="Docker exec",
        against="`docker exec` by the docker command",
        limit=0.04,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={"docker": _docker_version(docker)},
    )


def kubernetes_create(samples: int) -> Comparison:
    """One Pod and one Secret on both sides, so with the network on: without it lowtide makes a NetworkPolicy, too."""
    kubectl, image = _kubectl()

    def ours() -> float:
        sandbox = Sandbox(provider="kubernetes", container_image=image, network="internet")
        try:
            return timed(sandbox.wait)
        finally:
            sandbox.stop().result()

    def raw() -> float:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            name = _write_pod(file, image)

            def apply_and_wait() -> None:
                run([kubectl, "apply", "-f", file.name])
                run([kubectl, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=120s"])

            try:
                return timed(apply_and_wait)
            finally:
                run([kubectl, "delete", f"pod/{name}", f"secret/{name}", "--ignore-not-found"])

    mine, theirs = interleave(ours, raw, samples=samples, warm_up=1)
    return Comparison(
        name="kubernetes-create",
        what="Kubernetes create→running",
        against="the same Pod and Secret by `kubectl apply` + `kubectl wait`",
        limit=1.05,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={"kubectl": _kubectl_version(kubectl)},
    )


def kubernetes_exec(samples: int) -> Comparison:
    kubectl, image = _kubectl()
    with Sandbox.run(provider="kubernetes", container_image=image, network="internet") as sandbox:
        argv = [kubectl, "exec", str(sandbox.wait().sandbox_id), "--", "true"]
        mine, theirs = interleave(_command(sandbox), lambda: timed(lambda: run(argv)), samples=samples)
    return Comparison(
        name="kubernetes-exec",
        what="Kubernetes exec",
        against="`kubectl exec`",
        limit=0.1,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={"kubectl": _kubectl_version(kubectl)},
    )


def kubernetes_transfer(samples: int) -> Comparison:
    """Kept in memory on this side where the machine can: both are to be measured, not its disk."""
    kubectl, image = _kubectl()
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place,
        Sandbox.run(provider="kubernetes", container_image=image, network="internet") as sandbox,
    ):
        source, back = Path(place, "source"), Path(place, "back")
        source.write_bytes(os.urandom(1_000_000) * 100)
        name = sandbox.wait().sandbox_id

        def ours() -> None:
            sandbox.upload(source, "/opt/ours").result()
            sandbox.download("/opt/ours", back).result()

        def raw() -> None:
            run([kubectl, "cp", str(source), f"{name}:/opt/theirs"])
            run([kubectl, "cp", f"{name}:/opt/theirs", str(back)])

        def whole(move: Callable[[], None]) -> float:
            took = timed(move)
            assert back.stat().st_size == source.stat().st_size
            back.unlink()
            return took

        mine, theirs = interleave(lambda: whole(ours), lambda: whole(raw), samples=samples, warm_up=1)
    return Comparison(
        name="kubernetes-transfer",
        what="Kubernetes: 100 MB up and down",
        against="`kubectl cp` of the same file",
        limit=0.8,
        unit="ms",
        ours=mine,
        raw=theirs,
        details={"kubectl": _kubectl_version(kubectl)},
    )


def _command(sandbox: Sandbox) -> Callable[[], float]:
    return lambda: timed(lambda: sandbox.exec(["true"], check=True).result())


def _name() -> str:
    """Not a sandbox's name: no sweep takes what the reference makes for one of lowtide's."""
    return f"benchmark-{new_lease_id()}"


def _image(extra: str, module: str) -> str:
    if importlib.util.find_spec(module) is None:
        raise Skipped(f"lowtide[{extra}] is not installed")
    image = os.environ.get("LOWTIDE_TEST_IMAGE")
    if not image:
        raise Skipped(f"LOWTIDE_TEST_IMAGE names no image: {HOW}")
    return image


def _docker() -> tuple[str, str]:
    """The command and the image, when the engine has it."""
    image = _image("docker", "aiodocker")
    docker = shutil.which("docker")
    if docker is None:
        raise Skipped("there is no docker command")
    if not _answers([docker, "version"]):
        raise Skipped(f"no Docker engine answers: {HOW}")
    if not _answers([docker, "image", "inspect", image]):
        raise Skipped(f"the Docker engine has no image {image}: {HOW}")
    return docker, image


def _docker_options() -> list[str]:
    """What lowtide asks for in its create call, as the command's options."""
    from lowtide.providers.docker.container import DEFAULT_PIDS
    from lowtide.providers.docker.options import DockerOptions

    options = ["--rm", "--network", "none", "--pids-limit", str(DEFAULT_PIDS)]
    options += [f"--cap-drop={name}" for name in DockerOptions().drop_capabilities]
    return [*options, "--security-opt", "no-new-privileges", "--log-opt", "max-size=10m", "--no-healthcheck"]


def _docker_version(docker: str) -> str:
    return _said([docker, "version", "--format", "command {{.Client.Version}}, engine {{.Server.Version}}"])


def _kubectl() -> tuple[str, str]:
    image = _image("kubernetes", "aiohttp")
    # The one that belongs to the cluster first: a newer one does more, a distributor's wrapper starts twice.
    engines = Path(os.environ.get("ENGINES_HOME") or Path.home() / ".cache" / "engines") / "bin"
    places = (engines / "kubectl", engines / "kubectl-1.20", "kubectl")
    kubectl = next((found for place in places if (found := shutil.which(place))), None)
    if kubectl is None:
        raise Skipped("there is no kubectl command")
    if not _answers([kubectl, "get", "nodes", "--request-timeout=10s"]):
        raise Skipped(f"no Kubernetes cluster answers: {HOW}")
    return kubectl, image


def _kubectl_version(kubectl: str) -> str:
    known = json.loads(_said([kubectl, "version", "-o", "json"]))
    return f"command {known['clientVersion']['gitVersion']}, server {known['serverVersion']['gitVersion']}"


def _write_pod(file: Any, image: str) -> str:
    """What lowtide would make, under another name and with as many labels of other names."""
    from lowtide.providers.base import Labels, Network, NetworkMode, SandboxSpec
    from lowtide.providers.inside import program
    from lowtide.providers.kubernetes import pod

    spec = SandboxSpec(
        labels=Labels(lease_id=new_lease_id(), ledger_id="none", owner="none"),
        image=image,
        network=Network(mode=NetworkMode.INTERNET),
        lifetime_seconds=86400.0,
    )
    architecture = os.uname().machine
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}.get(architecture, architecture)
    things = [
        pod.secret(spec, architecture=architecture, key=program.new_key()),
        pod.pod(spec, default_image=image, architecture=architecture, key=None),
    ]
    name, ours = _name(), pod.pod_name(spec.lease_id)
    for thing in things:
        labels = thing["metadata"]["labels"].items()
        thing["metadata"]["labels"] = {key.replace("lowtide", "benchmark"): value for key, value in labels}
    whole = {"apiVersion": "v1", "kind": "List", "items": things}
    file.write(json.dumps(whole).replace(ours, name))
    file.flush()
    return name


def _answers(argv: list[str]) -> bool:
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _said(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
