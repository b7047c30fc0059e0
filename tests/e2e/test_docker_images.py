"""Images: without a shell, from a registry, and as snapshots."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.container_engine import (
    REGISTRY,
    Boxes,
    both_engines,
    docker,
    import_bare_image,
    needs_docker,
)

from lowtide.providers.base import ProcessSpec
from lowtide.providers.docker.images import PullProgress, split_reference
from lowtide.providers.optional import FileKind


@pytest.fixture
def bare_image(boxes: Boxes) -> Iterator[str]:
    name = f"lowtide-bare-{secrets.token_hex(4)}:1"
    import_bare_image(boxes.url, name)
    yield name
    docker(boxes.url, "rmi", "-f", name)


async def test_an_image_without_a_shell_runs_commands_and_keeps_files(boxes: Boxes, bare_image: str) -> None:
    box = await boxes.make(image=bare_image)
    try:
        code, _, err = await boxes.run(box, "/only")
        assert (code, err) == (2, "lowtide: not meant to be run by hand\n")
        code, _, err = await boxes.run(box, "sh", "-c", "true")
        assert code == 127
        assert "not found" in err

        async def content() -> AsyncIterator[bytes]:
            yield b"x" * 1_000_000

        assert await boxes.provider.write_file(box, "/data/deep/file", content(), size=1_000_000) == 1_000_000
        got = b"".join([chunk async for chunk in boxes.provider.read_file(box, "/data/deep/file")])
        assert got == b"x" * 1_000_000
        entries = {entry.name: entry.kind for entry in await boxes.provider.list_dir(box, "/data")}
        assert entries == {"deep": FileKind.DIRECTORY}
        tree = b"".join([chunk async for chunk in boxes.provider.read_tree(box, "/data")])

        async def again() -> AsyncIterator[bytes]:
            yield tree

        await boxes.provider.write_tree(box, "/copy", again())
        assert (await boxes.provider.stat(box, "/copy/deep/file")).size == 1_000_000
        await boxes.provider.remove(box, "/data", recursive=True)

        # `init` of a process that is not PID 1 sleeps: the only thing here that runs for long
        handle = await boxes.provider.start_process(box, ProcessSpec(argv=("/only", "init", "1000", "0")))
        await asyncio.sleep(0.3)
        await handle.terminate(0.0)
        assert await handle.wait() == 137
    finally:
        await boxes.provider.destroy(box)


@pytest.mark.skipif(not REGISTRY, reason="no registry: scripts/engines up registry")
@pytest.mark.parametrize(
    "boxes",
    [pytest.param(p.values[0], id="docker", marks=needs_docker) for p in both_engines[:1]],
    indirect=True,
)
async def test_a_missing_image_is_pulled_once_and_with_progress(boxes: Boxes, bare_image: str) -> None:
    reference = f"{REGISTRY}/{bare_image}"
    docker(boxes.url, "tag", bare_image, reference)
    docker(boxes.url, "push", reference)
    docker(boxes.url, "rmi", reference)
    steps: list[PullProgress] = []
    boxes.provider.on_pull = steps.append
    made = await asyncio.gather(*(boxes.make(image=reference) for _ in range(3)))
    try:
        assert len(set(made)) == 3
        assert [step.status for step in steps if "Digest" in step.status][1:] == []
        assert any(step.status for step in steps)
    finally:
        await asyncio.gather(*(boxes.provider.destroy(box) for box in made))
        docker(boxes.url, "rmi", "-f", reference)


async def test_a_snapshot_carries_files_and_not_the_marks_of_its_sandbox(boxes: Boxes) -> None:
    box = await boxes.make(tags=("first",))
    await boxes.run(box, "sh", "-c", "echo kept > /root/note")
    snapshot = await boxes.provider.snapshot(box, "a name: with / odd characters")
    try:
        assert snapshot in await boxes.provider.list_snapshots()
        other = await boxes.make(image=None, snapshot=snapshot, tags=("second",))
        assert await boxes.run(other, "cat", "/root/note") == (0, "kept\n", "")
        tagged = [info.sandbox_id async for info in boxes.provider.list({"lowtide-tag-first": "1"})]
        assert other not in tagged
        assert "lowtide-tag-first" not in (await boxes.provider.get(other)).labels
        await boxes.provider.destroy(other)
    finally:
        assert await boxes.provider.delete_snapshot(snapshot) is True
    assert await boxes.provider.delete_snapshot(snapshot) is False


async def test_only_snapshots_can_be_deleted_as_snapshots(boxes: Boxes, bare_image: str) -> None:
    assert await boxes.provider.delete_snapshot(bare_image) is False
    assert docker(boxes.url, "images", "-q", bare_image)


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("python", ("python", "latest")),
        ("python:3.11", ("python", "3.11")),
        ("127.0.0.1:5000/a/b", ("127.0.0.1:5000/a/b", "latest")),
        ("127.0.0.1:5000/a/b:1", ("127.0.0.1:5000/a/b", "1")),
        ("a/b@sha256:00", ("a/b", "sha256:00")),
    ],
)
def test_a_reference_always_names_one_image(reference: str, parts: tuple[str, str]) -> None:
    assert split_reference(reference) == parts
