"""The Kubernetes provider on a real node: bad days that the conformance suite does not know."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import secrets
import shutil
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.kubernetes_node import IMAGE, Node, needs_node

from lowtide import errors
from lowtide.lifecycle.lease import new_lease_id
from lowtide.providers.base import Limits, Network, NetworkMode, ProcessSpec, SandboxState, TerminalSize
from lowtide.providers.kubernetes import KubernetesOptions, KubernetesProvider
from lowtide.providers.kubernetes import pod as objects

pytestmark = [*needs_node, pytest.mark.timeout(300)]


def pods(namespace: str = "default") -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def secrets_path(namespace: str = "default") -> str:
    return f"/api/v1/namespaces/{namespace}/secrets"


def policies(namespace: str = "default") -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"


# What never runs is said at once, with the reason


async def test_a_pod_that_no_node_takes_fails_at_once_with_the_schedulers_words(node: Node) -> None:
    options = KubernetesOptions(node_selector={"lowtide-test": "nowhere"})
    info = await node.create(node.spec(options=options))
    with pytest.raises(errors.SandboxFailedError) as caught:
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 60)
    assert caught.value.reason == "Unschedulable"
    assert "node" in str(caught.value)
    assert caught.value.sandbox_id == info.sandbox_id


async def test_a_pod_that_may_wait_for_a_node_waits_that_long(node: Node) -> None:
    options = KubernetesOptions(node_selector={"lowtide-test": "nowhere"}, unschedulable_seconds=2.0)
    info = await node.create(node.spec(options=options))
    started = time.monotonic()
    with pytest.raises(errors.SandboxFailedError) as caught:
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 60)
    assert caught.value.reason == "Unschedulable"
    assert time.monotonic() - started >= 1.9


async def test_too_much_memory_for_every_node_is_unschedulable(node: Node) -> None:
    info = await node.create(node.spec(limits=Limits(memory_bytes=1 << 50)))
    with pytest.raises(errors.SandboxFailedError, match=r"[Mm]emory"):
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 60)


@pytest.mark.parametrize(
    ("image", "reasons"),
    [
        ("127.0.0.1:1/nothing/here:1", {"ErrImagePull", "ImagePullBackOff"}),
        ("Not A Name", {"InvalidImageName", "InspectFailed"}),
    ],
)
async def test_an_image_that_cannot_be_pulled_fails_at_once_with_the_reason(
    node: Node, image: str, reasons: set[str]
) -> None:
    info = await node.create(node.spec(image=image))
    with pytest.raises(errors.SandboxFailedError) as caught:
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 90)
    assert caught.value.reason in reasons
    assert image.split(":")[0] in str(caught.value)


async def test_an_image_that_must_be_there_and_is_not(node: Node) -> None:
    options = KubernetesOptions(image_pull_policy="Never")
    info = await node.create(node.spec(image="lowtide-no-such-image:1", options=options))
    with pytest.raises(errors.SandboxFailedError) as caught:
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 60)
    assert caught.value.reason == "ErrImageNeverPull"


async def test_a_main_command_that_does_not_exist_says_so(node: Node) -> None:
    info = await node.create(node.spec(command=("/no/such/program",)))
    with pytest.raises(errors.SandboxError) as caught:
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 60)
    assert "/no/such/program" in str(caught.value)
    assert not isinstance(caught.value, TimeoutError)


async def test_a_pod_the_node_cannot_make_fails_with_the_nodes_words(node: Node) -> None:
    """A volume that cannot be mounted shows in no status, only in events."""
    spec = node.spec()
    body = objects.pod(spec, default_image=IMAGE, architecture="amd64", key=None)
    body["spec"]["volumes"].append({"name": "v", "secret": {"secretName": "lowtide-no-such-secret"}})
    body["spec"]["containers"][0]["volumeMounts"].append({"name": "v", "mountPath": "/v"})
    await node.kube("POST", pods(), body)
    info = await node.create(spec)
    with pytest.raises(errors.SandboxFailedError, match="lowtide-no-such-secret") as caught:
        await asyncio.wait_for(node.provider.wait_ready(info.sandbox_id), 120)
    assert caught.value.reason == "FailedMount"


async def test_an_unknown_runtime_class_is_refused_and_leaves_nothing(node: Node) -> None:
    spec = node.spec(options=KubernetesOptions(runtime_class="no-such-class"), network=None)
    with pytest.raises(errors.SandboxFailedError, match="no-such-class"):
        await node.create(spec)
    assert await node.provider.find(spec) is None


# Ended by somebody else


async def test_a_drained_pod_is_gone_with_the_reason_while_a_command_runs(node: Node) -> None:
    sandbox_id = await node.ready()
    handle = await node.provider.start_process(sandbox_id, ProcessSpec(argv=("sleep", "1000")))
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": sandbox_id}}
    await node.kube("POST", f"{pods()}/{sandbox_id}/eviction", eviction)
    with pytest.raises(errors.SandboxGone) as caught:
        await asyncio.wait_for(handle.wait(), 60)
    assert caught.value.reason in ("deleted", "evicted", "exited")
    with pytest.raises(errors.SandboxGone):
        async for _ in handle.output():
            pass
    await handle.aclose()


async def test_use_after_somebody_deleted_the_pod_says_gone(node: Node) -> None:
    sandbox_id = await node.ready()
    await node.kube("DELETE", f"{pods()}/{sandbox_id}", {"gracePeriodSeconds": 0})
    for use in (
        lambda: node.run(sandbox_id, "true"),
        lambda: node.provider.write_file(sandbox_id, "/tmp/x", _chunks(b"x")),
        lambda: node.provider.url(sandbox_id, 80),
        lambda: node.provider.wait_ready(sandbox_id),
    ):
        with pytest.raises(errors.SandboxGone) as caught:
            await use()
        assert caught.value.reason == "deleted"
    with pytest.raises(errors.SandboxNotFoundError):
        async with asyncio.timeout(60):  # Kubernetes takes what was made beside it in its own time
            while (await node.provider.get(sandbox_id)).state is SandboxState.FAILED:
                await asyncio.sleep(0.1)
    assert await node.provider.destroy(sandbox_id) is False


async def test_a_pod_deleted_while_it_starts_is_gone_for_who_waits(node: Node) -> None:
    info = await node.create(
        node.spec(options=KubernetesOptions(node_selector={"x": "y"}, unschedulable_seconds=60))
    )
    waiting = asyncio.ensure_future(node.provider.wait_ready(info.sandbox_id))
    await asyncio.sleep(0.5)
    await node.kube("DELETE", f"{pods()}/{info.sandbox_id}", {})
    with pytest.raises(errors.SandboxGone):
        await asyncio.wait_for(waiting, 30)


async def test_the_lifetime_ends_it_without_us_and_says_expired(node: Node) -> None:
    sandbox_id = await node.ready(lifetime_seconds=4)
    deadline = time.monotonic() + 60
    while not (await node.provider.get(sandbox_id)).state.terminal:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    with pytest.raises(errors.SandboxGone) as caught:
        await node.run(sandbox_id, "true")
    assert caught.value.reason == "expired"


async def test_the_pods_deadline_cannot_be_moved_and_the_programs_clock_can(node: Node) -> None:
    sandbox_id = await node.ready(lifetime_seconds=6, fixed_lifetime_seconds=900)
    path = f"{pods()}/{sandbox_id}"
    pod = await node.kube("GET", path)
    assert pod["spec"]["activeDeadlineSeconds"] == 960
    with pytest.raises(Exception, match="must be less than or equal to previous value"):
        await node.provider._api.request(
            "PATCH", path, body={"spec": {"activeDeadlineSeconds": 961}}, merge=True
        )
    until = await node.provider.renew(sandbox_id, 600)
    assert until is not None
    assert 590 < (until - datetime.now(UTC)).total_seconds() <= 601
    await asyncio.sleep(7)
    assert (await node.run(sandbox_id, "echo", "still"))[1] == b"still\n"
    until = await node.provider.renew(sandbox_id, 86_400)  # as far as the fixed end allows
    assert until is not None
    assert (until - datetime.now(UTC)).total_seconds() <= 901


async def test_more_memory_than_allowed_by_the_main_process_is_oom(node: Node) -> None:
    eat = "x=$(head -c 400000000 /dev/zero | tr '\\0' x)"
    info = await node.create(
        node.spec(command=("sh", "-c", f"sleep 2; {eat}"), limits=Limits(memory_bytes=64 << 20))
    )
    await node.provider.wait_ready(info.sandbox_id)
    deadline = time.monotonic() + 60
    while not (await node.provider.get(info.sandbox_id)).state.terminal:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    found = await node.provider.get(info.sandbox_id)
    assert found.state is SandboxState.FAILED
    assert found.exit_code not in (0, None)


# Nothing else touched, nothing left


async def test_other_peoples_pods_with_similar_names_are_untouched(node: Node) -> None:
    name = f"lowtide-{new_lease_id()}"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"lowtide-lease": name[8:], "lowtide-ledger": node.mark}},
        "spec": {
            "containers": [
                {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "600"]}
            ]
        },
    }
    await node.kube("POST", pods(), body)
    try:
        assert await node.provider.destroy(name) is False
        assert [info async for info in node.provider.list({"lowtide-ledger": node.mark})] == []
        with pytest.raises(errors.SandboxNotFoundError):
            await node.provider.get(name)
        with pytest.raises(errors.SandboxGone):
            await node.run(name, "true")
        assert "deletionTimestamp" not in (await node.kube("GET", f"{pods()}/{name}"))["metadata"]
    finally:
        await node.kube("DELETE", f"{pods()}/{name}", {"gracePeriodSeconds": 0})


async def test_create_twice_with_one_lease_makes_one_pod(node: Node) -> None:
    spec = node.spec()
    first, second = await asyncio.gather(node.create(spec), node.create(spec))
    assert first.sandbox_id == second.sandbox_id
    assert len([info async for info in node.provider.list({"lowtide-ledger": node.mark})]) == 1


async def test_destroy_is_calm_when_many_ask_and_when_it_is_gone(node: Node) -> None:
    sandbox_id = await node.ready()
    answers = await asyncio.gather(*(node.provider.destroy(sandbox_id) for _ in range(5)))
    assert any(answers)
    assert await node.provider.destroy(sandbox_id) is False
    assert await node.provider.destroy("lowtide-never-was") is False


async def test_destroy_returns_when_its_processes_are_dead(node: Node) -> None:
    sandbox_id = await node.ready()
    token = f"{secrets.randbelow(10**8) + 10**8}"
    await node.run(
        sandbox_id, "sh", "-c", f"trap '' TERM; setsid sleep {token} </dev/null >/dev/null 2>&1 & true"
    )
    assert _on_this_machine(token), "the node of the tests runs on this machine, or this test proves nothing"
    await node.provider.destroy(sandbox_id)
    assert not _on_this_machine(token)


async def test_what_stands_beside_a_pod_is_owned_by_it_and_found_without_it(node: Node) -> None:
    """Whoever deletes the pod, the cluster takes the rest; who dies before there is one leaves what is found."""
    spec = node.spec()
    await node.kube("POST", secrets_path(), objects.secret(spec, architecture="amd64", key=b"k" * 16))
    found = await node.provider.find(spec)
    assert found is not None
    assert found.state is SandboxState.FAILED
    assert [info.sandbox_id async for info in node.provider.list({"lowtide-ledger": node.mark})] == [
        found.sandbox_id
    ]
    assert await node.provider.destroy(found.sandbox_id) is True
    assert await node.provider.find(spec) is None
    sandbox_id = await node.ready()
    pod = await node.kube("GET", f"{pods()}/{sandbox_id}")
    secret = await node.kube("GET", f"{secrets_path()}/{sandbox_id}")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    key = objects.key_in_secret(secret)
    assert key is not None
    assert key.hex() not in json.dumps(pod)


async def test_a_pod_without_network_has_its_policy_and_takes_it_along(node: Node) -> None:
    sandbox_id = await node.ready(network=Network(mode=NetworkMode.NONE))
    pod = await node.kube("GET", f"{pods()}/{sandbox_id}")
    policy = await node.kube("GET", f"{policies()}/{sandbox_id}")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy["spec"]
    assert "egress" not in policy["spec"]
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    assert policy["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
    assert policy["metadata"]["creationTimestamp"] <= pod["metadata"]["creationTimestamp"]
    await node.provider.destroy(sandbox_id)
    with pytest.raises(Exception, match="not found"):
        await node.kube("GET", f"{policies()}/{sandbox_id}")


async def test_dying_between_policy_and_pod_leaves_something_that_is_found_and_ended(node: Node) -> None:
    spec = node.spec(network=Network(mode=NetworkMode.NONE))
    await node.kube("POST", policies(), objects.policy(spec))
    found = await node.provider.find(spec)
    assert found is not None
    assert found.state is SandboxState.FAILED
    assert [info.sandbox_id async for info in node.provider.list({"lowtide-ledger": node.mark})] == [
        found.sandbox_id
    ]
    assert await node.provider.destroy(found.sandbox_id) is True
    assert await node.provider.find(spec) is None


async def test_a_refused_pod_leaves_no_policy(node: Node) -> None:
    spec = node.spec(network=None, options=KubernetesOptions(annotations={"bad key!": "x"}))
    with pytest.raises(errors.ValidationError):
        await node.create(spec)
    assert await node.provider.find(spec) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.alone
async def test_a_hundred_pods_at_once(node: Node) -> None:
    capacity = await node.kube("GET", "/api/v1/nodes")
    room = sum(int(one["status"]["allocatable"]["pods"]) for one in capacity["items"])
    busy = len((await node.kube("GET", "/api/v1/pods"))["items"])
    count = min(100, room - busy - 4)
    assert count > 0
    ids = await asyncio.gather(*(node.ready() for _ in range(count)))
    assert len(set(ids)) == count
    answers = await asyncio.gather(*(node.run(one, "sh", "-c", "echo $HOSTNAME") for one in ids))
    assert [out.decode().strip() for _, out, _ in answers] == list(ids)
    seen = [info.sandbox_id async for info in node.provider.list({"lowtide-ledger": node.mark})]
    assert sorted(seen) == sorted(ids)
    assert all(await asyncio.gather(*(node.provider.destroy(one) for one in ids)))


async def test_a_list_has_all_pages(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.providers.kubernetes import client

    monkeypatch.setattr(client, "PAGE_SIZE", 2)
    options = KubernetesOptions(node_selector={"lowtide-test": "nowhere"})
    made = [await node.create(node.spec(options=options)) for _ in range(5)]
    seen = [info.sandbox_id async for info in node.provider.list({"lowtide-ledger": node.mark})]
    assert sorted(seen) == sorted(info.sandbox_id for info in made)


# What stands in the pod


async def test_the_pod_is_closed_by_default(node: Node) -> None:
    sandbox_id = await node.ready(environment={"WORD": "$(HOME) $$ `x`"})
    pod = await node.kube("GET", f"{pods()}/{sandbox_id}")
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 7 * 86_400 + 60
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    script = "cat /proc/self/status; ls /var/run/secrets 2>/dev/null; printf '%s' \"$WORD\" >&2"
    _, out, err = await node.run(sandbox_id, "sh", "-c", script)
    lines = dict(line.split(":\t", 1) for line in out.decode().splitlines() if ":\t" in line)
    assert lines["NoNewPrivs"] == "1"
    assert lines["Seccomp"] == "2"
    # setpcap, sys_admin, net_admin, net_raw, sys_module, sys_ptrace, mknod
    for dangerous in (8, 21, 12, 13, 16, 19, 27):
        assert not int(lines["CapBnd"], 16) >> dangerous & 1
    assert "kubernetes.io" not in out.decode()
    assert err == b"$(HOME) $$ `x`"


async def test_options_reach_the_pod(node: Node) -> None:
    options = KubernetesOptions(
        run_as_user=1000, run_as_group=1000, read_only_root=True, tmpfs=("/work",), fs_group=1000
    )
    sandbox_id = await node.ready(options=options, limits=Limits(cpu=0.5, memory_bytes=256 << 20))
    code, out, _ = await node.run(
        sandbox_id,
        "sh",
        "-c",
        "id -u; touch /etc/x 2>/dev/null || echo read-only; touch /work/x && echo writable",
    )
    assert (code, out) == (0, b"1000\nread-only\nwritable\n")
    _, out, _ = await node.run(sandbox_id, "sh", "-c", "grep CapEff /proc/self/status")
    assert out.split()[-1] == b"0000000000000000"
    pod = await node.kube("GET", f"{pods()}/{sandbox_id}")
    assert pod["spec"]["containers"][0]["resources"] == {
        "limits": {"cpu": "500m", "memory": str(256 << 20)},
        "requests": {"cpu": "100m", "memory": str(256 << 20)},
    }


async def test_another_namespace_is_part_of_the_id(node: Node) -> None:
    name = f"lowtide-test-{secrets.token_hex(4)}"
    await node.kube(
        "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    )
    try:
        sandbox_id = await node.ready(options=KubernetesOptions(namespace=name))
        assert sandbox_id.startswith(f"{name}/")
        assert (await node.run(sandbox_id, "echo", "there"))[1] == b"there\n"
        assert [info.sandbox_id async for info in node.provider.list({"lowtide-ledger": node.mark})] == [
            sandbox_id
        ]
        assert await node.provider.destroy(sandbox_id) is True
    finally:
        await node.kube("DELETE", f"/api/v1/namespaces/{name}", {})


# Commands


async def test_an_image_without_a_shell_can_do_everything(node: Node, shellless_image: str) -> None:
    sandbox_id = await node.ready(image=shellless_image)
    assert await node.run(sandbox_id, "/busybox", "echo", "bare") == (0, b"bare\n", b"")
    assert await node.run(sandbox_id, "/busybox", "pwd", cwd="/proc") == (0, b"/proc\n", b"")
    assert b"A=b\n" in (await node.run(sandbox_id, "/busybox", "env", environment={"A": "b"}))[1]
    data = os.urandom(3_000_000)
    assert await node.run(sandbox_id, "/busybox", "cat", stdin=data) == (0, data, b"")
    await node.provider.write_file(sandbox_id, "/deep/er/file", _chunks(data, 100_000))
    assert b"".join([chunk async for chunk in node.provider.read_file(sandbox_id, "/deep/er/file")]) == data
    handle = await node.provider.start_process(sandbox_id, ProcessSpec(argv=("/busybox", "sleep", "777")))
    await handle.terminate(0.5)
    assert await handle.wait() in (143, 137)
    assert b"777" not in (await node.run(sandbox_id, "/busybox", "ps"))[1]


async def test_what_empties_its_environment_and_leaves_the_session_is_ended_too(node: Node) -> None:
    sandbox_id = await node.ready()
    token = f"{secrets.randbelow(10**8) + 10**8}"
    script = f"(env -i setsid sh -c '(sleep {token} &)' </dev/null >/dev/null 2>&1 &); trap '' TERM; sleep {token}; sleep {token}"
    handle = await node.provider.start_process(sandbox_id, ProcessSpec(argv=("sh", "-c", script)))
    await asyncio.sleep(1)
    await handle.terminate(0.3)
    assert await handle.wait() in (137, 143)
    await handle.aclose()
    _, out, _ = await node.run(sandbox_id, "ps", "-eo", "args")
    assert token not in out.decode()


async def test_output_is_complete_when_the_command_ends_right_after_it(node: Node) -> None:
    sandbox_id = await node.ready()
    expected = b"".join(b"%d\n" % number for number in range(1, 300_001))
    for _ in range(3):
        assert await node.run(sandbox_id, "seq", "1", "300000") == (0, expected, b"")


async def test_a_broken_connection_is_made_again_without_losing_a_byte_or_running_twice(node: Node) -> None:
    sandbox_id = await node.ready()
    script = "echo ran >>/tmp/count; seq 1 3000000"
    handle = await node.provider.start_process(sandbox_id, ProcessSpec(argv=("sh", "-c", script)))
    digest, size, broken = hashlib.sha256(), 0, 0
    async for _, data in handle.output():
        digest.update(data)
        size += len(data)
        if size > (broken + 1) * 2_000_000:
            broken += 1
            channel = (await node.provider.clients.get(sandbox_id))._link._channel
            if channel is not None:
                channel.close()
    assert await handle.wait() == 0
    assert broken > 8
    expected = hashlib.sha256(b"".join(b"%d\n" % number for number in range(1, 3_000_001)))
    assert digest.digest() == expected.digest()
    assert (await node.run(sandbox_id, "cat", "/tmp/count"))[1] == b"ran\n"


async def test_environment_values_are_in_no_request_and_no_process_title(node: Node) -> None:
    sandbox_id = await node.ready()
    secret = secrets.token_hex(16)
    script = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; printf %s \"$TOKEN\" >&2"
    _, out, err = await node.run(sandbox_id, "sh", "-c", script, environment={"TOKEN": secret})
    assert err.decode() == secret
    assert secret not in out.decode()


async def test_a_terminal_takes_a_long_command_line(node: Node) -> None:
    sandbox_id = await node.ready()
    long = "x" * 20_000
    handle = await node.provider.start_process(
        sandbox_id,
        ProcessSpec(
            argv=("sh", "-c", "stty size; echo ${#LONG}"),
            environment={"LONG": long},
            tty=TerminalSize(columns=99, rows=31),
        ),
    )
    out = b"".join([data async for _, data in handle.output()])
    assert out == b"31 99\r\n20000\r\n"
    assert await handle.wait() == 0
    await handle.aclose()


async def test_letting_go_of_a_command_leaves_it_running(node: Node) -> None:
    sandbox_id = await node.ready()
    handle = await node.provider.start_process(
        sandbox_id, ProcessSpec(argv=("sh", "-c", "sleep 2; echo late > /tmp/late"))
    )
    await handle.aclose()
    deadline = time.monotonic() + 30
    while (await node.run(sandbox_id, "cat", "/tmp/late"))[1] != b"late\n":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.3)


async def test_an_upload_that_breaks_off_leaves_the_old_file(node: Node) -> None:
    sandbox_id = await node.ready()
    await node.provider.write_file(sandbox_id, "/tmp/file", _chunks(b"old"))

    async def broken() -> AsyncIterator[bytes]:
        yield b"new" * 1000
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        await node.provider.write_file(sandbox_id, "/tmp/file", broken())
    assert b"".join([chunk async for chunk in node.provider.read_file(sandbox_id, "/tmp/file")]) == b"old"
    deadline = time.monotonic() + 30
    while (await node.run(sandbox_id, "sh", "-c", "ls -A /tmp"))[1] != b"file\n":
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def test_a_port_nobody_serves_refuses_and_a_served_one_answers(node: Node) -> None:
    sandbox_id = await node.ready()
    url = await node.provider.url(sandbox_id, 8099)
    assert url.url.startswith("http://127.0.0.1:")
    assert await _get(url.url) is None
    handle = await node.provider.start_process(
        sandbox_id,
        ProcessSpec(argv=("python3", "-m", "http.server", "8099", "--bind", "127.0.0.1"), cwd="/etc"),
    )
    deadline = time.monotonic() + 30
    while (answer := await _get(f"{url.url}/hostname")) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert answer.decode().strip() == sandbox_id
    await handle.aclose()
    await node.provider.destroy(sandbox_id)
    assert await _get(f"{url.url}/hostname") is None


# Access


def test_without_a_cluster_the_error_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(errors.AuthenticationError, match="KUBECONFIG"):
        KubernetesProvider.connect({"HOME": str(tmp_path)})
    with pytest.raises(errors.AuthenticationError, match="no kubeconfig at"):
        KubernetesProvider.connect({"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "missing")})
    with pytest.raises(errors.AuthenticationError, match="no context"):
        KubernetesProvider.connect(os.environ, {"context": "nobody"})


async def test_a_wrong_token_is_an_authentication_error(tmp_path: Path) -> None:
    changed = tmp_path / "kubeconfig"
    original = Path(os.environ["KUBECONFIG"]).read_text()
    token = original.split("token: ")[1].split("}")[0].strip()
    changed.write_text(original.replace(token, "wrong"))
    provider = KubernetesProvider.connect({"KUBECONFIG": str(changed)})
    try:
        with pytest.raises(errors.AuthenticationError) as caught:
            await provider.get("lowtide-x")
        assert "wrong" not in str(caught.value)
    finally:
        await provider.aclose()


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )
    )
    provider = KubernetesProvider.connect({"KUBECONFIG": str(config)})
    try:
        with pytest.raises(errors.SandboxUnavailableError) as caught:
            await provider.get("lowtide-x")
        assert caught.value.retryable
    finally:
        await provider.aclose()


def test_the_credentials_make_the_same_provider_and_hold_no_key() -> None:
    first = KubernetesProvider.connect(os.environ, {"namespace": "somewhere", "image": IMAGE})
    second = KubernetesProvider.connect(first.credentials())
    assert second.account == first.account
    assert second.credentials() == first.credentials()
    assert KubernetesProvider.connect(os.environ).account != first.account
    token = Path(os.environ["KUBECONFIG"]).read_text().split("token: ")[1].split("}")[0].strip()
    assert token not in json.dumps(first.credentials())


# What the tests need


async def _chunks(data: bytes, size: int = 1 << 16) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def _get(url: str) -> bytes | None:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as answer,
        ):
            return await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


def _on_this_machine(token: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


def _import_image(name: str, files: dict[str, bytes], links: dict[str, str]) -> str:
    """A tiny image on the node's own engine, as `docker import` makes it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.mode, entry.size = 0o755, len(data)
            archive.addfile(entry, io.BytesIO(data))
        for path, target in links.items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    subprocess.run(["docker", "import", "-", name], input=content.getvalue(), check=True, capture_output=True)
    return name


def _busybox() -> bytes:
    if not os.environ.get("DOCKER_HOST") or shutil.which("docker") is None:
        pytest.skip("no Docker engine beside the node to make an image on (DOCKER_HOST)")
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("no static busybox on this machine to make an image of (Debian: busybox-static)")
    return Path(program).read_bytes()


@pytest.fixture(scope="module")
def shellless_image() -> str:
    return _import_image("lowtide-test-shellless:latest", {"busybox": _busybox()}, {})
