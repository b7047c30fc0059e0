"""A real API server behind a proxy that goes silent and lies: nothing is believed that the server has not said."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kubernetes_node import IMAGE, Node, needs_node
from tests.lying_engine import HTML, LyingProxy, json_answer

from lowtide.errors import SandboxUnavailableError, ValidationError
from lowtide.providers.base import ProcessSpec
from lowtide.providers.inside import link
from lowtide.providers.kubernetes import KubernetesProvider
from lowtide.providers.kubernetes.pod import pods

pytestmark = [*needs_node, pytest.mark.timeout(180)]

WATCHES = r"/pods\?.*watch=1"


@asynccontextmanager
async def behind_proxy(tmp_path: Path) -> AsyncIterator[tuple[Node, LyingProxy]]:
    """Sandboxes whose provider speaks to the server through the proxy; they end over the direct way."""
    node = Node()
    access = node.provider._access
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    async with LyingProxy.before_kubernetes(access.server, tls) as proxy:
        context = {"cluster": "c", "user": "u", "namespace": access.namespace}
        config = {
            "clusters": [{"name": "c", "cluster": {"server": proxy.url}}],
            "users": [{"name": "u", "user": {"token": access.user["token"]}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        environ = {"KUBECONFIG": str(tmp_path / "kubeconfig"), "PATH": os.environ["PATH"]}
        direct, node.provider = node.provider, KubernetesProvider.connect(environ, {"image": IMAGE})
        try:
            yield node, proxy
        finally:
            await node.provider.aclose()
            node.provider = direct
            await node.aclose()


async def there(node: Node, name: str) -> bool:
    """Whether the server itself has the pod."""
    direct = KubernetesProvider.connect(os.environ)
    try:
        return await direct._api.get(f"{pods(direct._access.namespace)}/{name}") is not None
    finally:
        await direct.aclose()


@pytest.mark.parametrize(
    "answer", [json_answer(b""), HTML, json_answer(b"[1]\n")], ids=["empty", "page", "no-event"]
)
async def test_watches_that_end_at_once_cost_few_requests_and_waits_end(
    tmp_path: Path, answer: bytes
) -> None:
    async with behind_proxy(tmp_path) as (node, proxy):
        proxy.lie("GET", WATCHES, forward=False, answer=answer)
        sandbox = await node.create(node.spec())
        began, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        async with asyncio.timeout(90):
            await node.provider.wait_ready(sandbox.sandbox_id)
            assert await node.provider.destroy(sandbox.sandbox_id) is True
        assert not await there(node, sandbox.sandbox_id)
        # Two waits, each at most ten a second until they have slowed down, and then one in two seconds.
        assert proxy.count("GET", WATCHES) < 40 + (loop.time() - began)


async def test_a_watch_that_says_deleted_is_no_end(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path) as (node, proxy):
        box = await node.ready()
        found = await node.provider._lookup.pod(box)
        event = json.dumps({"type": "DELETED", "object": found}).encode() + b"\n"
        proxy.lie("GET", WATCHES, forward=False, answer=json_answer(event))
        deletes = proxy.lie("DELETE", "/pods/", forward=False, answer=json_answer(b'{"kind": "Status"}'))
        ending = asyncio.ensure_future(node.provider.destroy(box))
        done, _ = await asyncio.wait([ending], timeout=3)
        assert not done
        assert await there(node, box)
        proxy._lies.remove(deletes)
        ending.cancel()
        await asyncio.wait([ending])
        proxy.truth()
        assert await node.provider.destroy(box) is True
        assert not await there(node, box)


async def test_a_page_in_answer_to_a_delete_or_a_create_is_unavailable(tmp_path: Path) -> None:
    async with behind_proxy(tmp_path) as (node, proxy):
        box = await node.ready()
        proxy.lie("DELETE", "/pods/", forward=False, answer=HTML)
        with pytest.raises(SandboxUnavailableError, match="not the API server's own answer"):
            await node.provider.destroy(box)
        assert await there(node, box)
        proxy.lie("POST", "/pods", times=1, forward=False, answer=HTML)
        with pytest.raises(SandboxUnavailableError, match="not the API server's own answer"):
            await node.provider.create(spec := node.spec())
        proxy.truth()
        found = await node.provider.find(spec)
        if found is not None:
            await node.provider.destroy(found.sandbox_id)


async def test_a_connection_that_goes_silent_is_replaced_and_commands_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_QUIET_SECONDS", 0.5, raising=False)
    async with behind_proxy(tmp_path) as (node, proxy):
        box = await node.ready()
        script = "echo ran >>/ran; read x; echo said; exit 5"
        handle = await node.provider.start_process(box, ProcessSpec(argv=("sh", "-c", script), stdin=True))
        proxy.go_silent()
        await handle.write_stdin(b"go\n")
        async with asyncio.timeout(40):  # sooner than the websocket's own heartbeat
            assert b"".join([data async for _, data in handle.output()]) == b"said\n"
            assert await handle.wait() == 5
            assert (await node.run(box, "cat", "/ran"))[1] == b"ran\n"


@pytest.mark.parametrize("name", ["LOWTIDE_KEY", "LOWTIDE_FIRST"])
async def test_variables_that_the_program_inside_takes_are_refused(node: Node, name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        await node.create(node.spec(environment={name: "x"}))
