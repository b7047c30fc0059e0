"""Ports and the network of a container."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator

import pytest
from tests.container_engine import DOCKER, Boxes, boxes_on, needs_docker

from lowtide.providers.base import Network, NetworkMode, ProcessSpec

FULL, NONE = Network(mode=NetworkMode.INTERNET), Network(mode=NetworkMode.NONE)


async def _fetch(url: str) -> bytes:
    """Waits for a server that is just starting."""

    def attempt() -> bytes:
        with urllib.request.urlopen(url, timeout=10) as answer:
            body: bytes = answer.read()
            return body

    for _ in range(100):
        try:
            return await asyncio.to_thread(attempt)
        except OSError:
            await asyncio.sleep(0.1)
    return await asyncio.to_thread(attempt)


@pytest.mark.parametrize(
    ("network", "ports", "listen"),
    [
        pytest.param(FULL, (8000,), "0.0.0.0", id="published"),
        pytest.param(FULL, (), "127.0.0.1", id="not-declared-and-on-loopback"),
        pytest.param(NONE, (), "127.0.0.1", id="without-a-network"),
        pytest.param(NONE, (8000,), "127.0.0.1", id="declared-without-a-network"),
    ],
)
async def test_a_server_inside_can_be_reached(
    boxes: Boxes, network: Network, ports: tuple[int, ...], listen: str
) -> None:
    box = await boxes.make(network=network, ports=ports, working_dir="/srv")

    async def page() -> AsyncIterator[bytes]:
        yield b"x" * 3_000_000

    await boxes.provider.write_file(box, "/srv/page", page())
    server = ("python3", "-m", "http.server", "--bind", listen, "8000")
    handle = await boxes.provider.start_process(box, ProcessSpec(argv=server))
    url = (await boxes.provider.url(box, 8000)).url
    assert url.startswith("http://127.0.0.1:")
    bodies = await asyncio.gather(*(_fetch(f"{url}/page") for _ in range(5)))
    assert [len(body) for body in bodies] == [3_000_000] * 5
    await handle.terminate(0.0)


async def test_a_port_on_which_nobody_listens_closes_the_connection(boxes: Boxes) -> None:
    box = await boxes.make()
    url = (await boxes.provider.url(box, 9)).url
    with pytest.raises(OSError):
        await asyncio.to_thread(urllib.request.urlopen, url, timeout=20)


async def test_without_a_network_there_is_only_loopback(boxes: Boxes) -> None:
    box = await boxes.make()
    assert (await boxes.run(box, "ls", "/sys/class/net"))[1].split() == ["lo"]


@needs_docker[1]
async def test_sandboxes_with_a_network_do_not_reach_each_other() -> None:
    """On Docker; Podman has no such switch for one network, which docs/docker.md says."""
    async with boxes_on(DOCKER) as boxes:
        first, second = await asyncio.gather(boxes.make(network=FULL), boxes.make(network=FULL))
        networks = (await boxes.provider.inspect(first))["NetworkSettings"]["Networks"]
        address = next(iter(networks.values()))["IPAddress"]
        server = ("python3", "-m", "http.server", "--bind", "0.0.0.0", "8000")
        await boxes.provider.start_process(first, ProcessSpec(argv=server))
        ask = f"import urllib.request as u; print(len(u.urlopen('http://{address}:8000/', timeout=3).read()))"
        for _ in range(100):
            if (await boxes.run(first, "python3", "-c", ask))[0] == 0:
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the server never came up")
        code, out, said = await boxes.run(second, "python3", "-c", ask)
        assert (code, out) == (1, ""), said


async def test_memory_has_a_limit_unless_another_is_asked_for(boxes: Boxes) -> None:
    box = await boxes.make()
    assert (await boxes.provider.inspect(box))["HostConfig"]["Memory"] == 4 << 30
