"""The clean-up snippets that users of cwsandbox know, unchanged but for the import, on the local provider."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator

import pytest

import lowtide as cwsandbox
from lowtide import Sandbox, SandboxDefaults, SandboxGone, SandboxNotFoundError, Session

IMAGE = f"python:{sys.version_info.major}.{sys.version_info.minor}"
"""Where it cannot be had, this very Python stands in for it; for one of another version it would not."""


@pytest.fixture
def tag() -> Iterator[str]:
    tag = f"snippet-{secrets.token_hex(6)}"
    yield tag
    assert Sandbox.list(tags=[tag]).result() == []


def test_context_manager(tag: str) -> None:
    with Sandbox.run(tags=[tag]) as sandbox:
        result = sandbox.exec(["echo", "Hello, World!"]).result()
        print(result.stdout)
    assert result.stdout == "Hello, World!\n"


def test_main_command_and_container_image(tag: str) -> None:
    with Sandbox.run("sleep", "infinity", container_image=IMAGE, tags=[tag]) as sandbox:
        assert sandbox.exec(["python3", "-c", "print(6 * 7)"]).result().stdout == "42\n"


async def test_async_context_manager(tag: str) -> None:
    async with Sandbox.run(tags=[tag]) as sandbox:
        result = await sandbox.exec(["echo", "hello"])
    assert result.stdout == "hello\n"


def test_session_cleans_up_all_its_sandboxes(tag: str) -> None:
    defaults = SandboxDefaults(container_image=IMAGE, tags=(tag,))
    with Session(defaults) as session:
        sb1 = session.sandbox()
        sb2 = session.sandbox()
        cwsandbox.results([sb1.exec(["echo", "1"]), sb2.exec(["echo", "2"])])
    with Sandbox.session({"tags": [tag]}) as session:
        session.sandbox().start().result()


def test_manual_stop_with_grace_and_with_snapshot(tag: str) -> None:
    sandbox = Sandbox.run(tags=[tag])
    sandbox.stop(graceful_shutdown_seconds=30.0).result()
    sandbox.stop(missing_ok=True).result()
    with pytest.raises(SandboxGone):
        sandbox.exec(["true"]).result()

    sandbox = Sandbox.run(tags=[tag])
    sandbox.write_file("/root/note", "kept").result()
    report = sandbox.stop(snapshot_on_stop=True).result()
    assert report.snapshot_id is not None
    with Sandbox.run(snapshot=report.snapshot_id, tags=[tag]) as again:
        assert again.read_file("/root/note").result() == b"kept"


def test_session_close(tag: str) -> None:
    session = Session(SandboxDefaults(tags=(tag,)))
    try:
        session.sandbox().wait(120)
    finally:
        session.close().result()


def test_stop_in_parallel(tag: str) -> None:
    sandboxes = [Sandbox.run(tags=[tag]) for _ in range(3)]
    cwsandbox.results([sb.stop() for sb in sandboxes])


def test_stop_by_tag_list_adopt_and_delete(tag: str) -> None:
    made = [Sandbox.run(tags=[tag]) for _ in range(4)]
    sandboxes = Sandbox.list(tags=[tag]).result()
    assert {sb.sandbox_id for sb in sandboxes} == {sb.sandbox_id for sb in made}
    sandboxes[0].stop().result()

    with Session() as session:
        session.adopt(sandboxes[1])

    assert made[2].sandbox_id is not None
    Sandbox.delete(made[2].sandbox_id).result()
    Sandbox.delete(made[2].sandbox_id, missing_ok=True).result()
    with pytest.raises(SandboxNotFoundError):
        Sandbox.delete(made[2].sandbox_id).result()

    assert made[3].sandbox_id is not None
    found = Sandbox.from_id(made[3].sandbox_id).result()
    assert found.tags == (tag,)
    found.stop().result()
    assert len(Sandbox.list(tags=[tag], show_terminated=True).result()) == 4
    with pytest.raises(SandboxNotFoundError):
        Sandbox.from_id("no-such-sandbox").result()


def test_wait_for_some(tag: str) -> None:
    with Session(tags=[tag]) as session:
        boxes = [session.sandbox() for _ in range(2)]
        done, pending = cwsandbox.wait(boxes, num_returns=2, timeout=120)
        assert (len(done), pending) == (2, [])
        slow, quick = boxes[0].exec(["sleep", "600"]), boxes[1].exec(["true"])
        done_processes, _ = cwsandbox.wait([slow, quick], num_returns=1, timeout=120)
        assert done_processes == [quick]
