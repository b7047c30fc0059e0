"""The proxy of a sandbox with an allow-list ends with it, and never leaves a way that nobody watches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.container_engine import IMAGE, needs_docker

from lowtide import Sandbox, UnsupportedError
from lowtide.machine import home
from lowtide.providers.local.sandbox_directory import ProcessMark, SandboxDirectory

ALLOW = ["nobody.invalid", "10.99.98.0/24"]
BOUND_SECONDS = 15.0


def proxy_of(sandbox_id: str) -> ProcessMark:
    mark = SandboxDirectory(home() / "local" / "sandboxes" / sandbox_id).proxy()
    assert mark is not None
    assert mark.alive()
    return mark


def gone_within(mark: ProcessMark, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while mark.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not mark.alive()


def test_a_program_that_ignores_the_end_of_its_children_has_a_proxy() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Sandbox.run(provider="local", network=ALLOW) as box:
            assert box.exec(["sh", "-c", "exit 7"]).result(60).returncode == 7
            proxy_of(box.sandbox_id)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_stop_ends_the_proxy_before_it_returns() -> None:
    with Sandbox.run(provider="local", network=ALLOW) as box:
        mark = proxy_of(box.sandbox_id)
        status = Path(f"/proc/{mark.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        if os.geteuid() == 0:
            assert "CapEff:\t0000000000000000" in status
            assert "Uid:\t65534" in status
        box.stop().result(60)
        assert not mark.alive()


def test_a_killed_proxy_leaves_a_sandbox_without_a_network() -> None:
    with Sandbox.run(provider="local", network=ALLOW) as box:
        mark = proxy_of(box.sandbox_id)
        os.kill(mark.pid, signal.SIGKILL)
        assert gone_within(mark, BOUND_SECONDS)
        code = "import socket; socket.create_connection(('10.99.98.1', 80), 5)"
        done = box.exec(["python3", "-c", code]).result(60)
        assert "ConnectionRefusedError" in done.stderr


@pytest.mark.parametrize("network", [ALLOW, "internet"], ids=["allow-list", "internet"])
def test_the_proxy_runs_in_the_control_groups_of_its_sandbox(network: Any) -> None:
    limits = {"limits": {"cpu": "0.5", "memory": "256Mi"}}
    with Sandbox.run(provider="local", network=network, resources=limits) as box:
        assert box.sandbox_id is not None
        _, first = SandboxDirectory(home() / "local" / "sandboxes" / box.sandbox_id).processes()
        assert first is not None
        groups, proxys = _groups(first.pid), _groups(proxy_of(box.sandbox_id).pid)
        limited = {name: group for name, group in groups.items() if box.sandbox_id in group}
        assert limited, groups
        assert {name: proxys[name] for name in limited if name != "pids"} == {
            name: group for name, group in limited.items() if name != "pids"
        }


def _groups(pid: int) -> dict[str, str]:
    """By controller, or "" in version 2."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {name: group for _, name, group in (line.split(":", 2) for line in lines)}


_OWNER = """
import sys, time
from lowtide import Sandbox
box = Sandbox.run(provider="local", network={allow!r}, keep={keep!r}, keep_for_seconds=300)
print(box.sandbox_id, flush=True)
{then}
"""


def owner(then: str, keep: str = "never") -> tuple[subprocess.Popen[str], str]:
    code = _OWNER.format(allow=ALLOW, keep=keep, then=then)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_killed_owner_leaves_no_proxy() -> None:
    process, sandbox_id = owner("time.sleep(300)")
    mark = proxy_of(sandbox_id)
    process.kill()
    process.communicate()
    assert gone_within(mark, BOUND_SECONDS)


def test_a_kept_sandbox_keeps_its_network_until_it_is_deleted() -> None:
    process, sandbox_id = owner("box.stop().result(60)", keep="always")
    mark = proxy_of(sandbox_id)
    process.communicate(timeout=60)
    assert mark.alive()
    Sandbox.delete(sandbox_id).result(60)
    assert not mark.alive()


def test_a_refused_entry_names_itself_before_anything_is_made() -> None:
    with pytest.raises(ValueError, match=r"169\.254\.169\.254"):
        Sandbox.run(provider="local", network=["169.254.169.254"])


@pytest.mark.parametrize("provider", ["e2b", "daytona"])
def test_a_port_is_refused_by_name_where_the_service_has_none(provider: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        Sandbox.run(provider=provider, network=["example.org:8443"])
    assert (caught.value.provider, caught.value.feature) == (provider, "network-ports")


def _proxies(sandbox_id: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if b"providers.network" in line and sandbox_id.encode() in line:
                found.append(int(name))
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may enter a container's network")
@pytest.mark.parametrize("how", [pytest.param(how, marks=needs_docker) for how in ("stop", "the engine")])
def test_the_proxy_of_a_container_ends_with_it(how: str) -> None:
    with Sandbox.run(provider="docker", container_image=IMAGE, network=ALLOW) as box:
        assert len(_proxies(box.sandbox_id)) == 1
        if how == "stop":
            box.stop().result(60)
        else:
            subprocess.run(["docker", "rm", "-f", box.sandbox_id], check=True, capture_output=True)
        deadline = time.monotonic() + BOUND_SECONDS
        while _proxies(box.sandbox_id) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _proxies(box.sandbox_id) == []


def test_an_engine_on_another_machine_is_refused_by_name() -> None:
    from lowtide.providers.docker import network
    from lowtide.providers.docker.access import resolve

    with pytest.raises(UnsupportedError, match="another machine"):
        network.check(resolve({"DOCKER_HOST": "tcp://engine.example:2375"}))


@pytest.mark.parametrize("engine", [pytest.param("docker", marks=needs_docker)])
def test_an_engine_without_gvisor_is_named_and_nothing_is_made(engine: str) -> None:
    info = json.loads(
        subprocess.run(["docker", "info", "-f", "{{json .Runtimes}}"], check=True, capture_output=True).stdout
    )
    if "runsc" in info:
        pytest.skip("this engine has it")
    with pytest.raises(UnsupportedError) as caught:
        Sandbox.run(provider=engine, container_image=IMAGE, isolation="gvisor").exec(["true"]).result(60)
    assert (caught.value.provider, caught.value.feature) == ("docker", "gvisor")
