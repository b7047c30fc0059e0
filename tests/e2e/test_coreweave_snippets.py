"""The clean-up snippets that users of cwsandbox know, on CoreWeave itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.coreweave_emulator import needs_emulator, serving
from tests.unit import test_api_cleanup_snippets as guide

from lowtide import Sandbox

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

_WHOLE_DISK = "test_manual_stop_with_grace_and_with_snapshot"
"""Its snapshot is of everything; CoreWeave's is of a volume, as below."""

tag = guide.tag
globals().update(
    {name: test for name, test in vars(guide).items() if name.startswith("test_") and name != _WHOLE_DISK}
)


@pytest.fixture(scope="module")
def emulator() -> Iterator[None]:
    for _ in serving():
        yield


@pytest.fixture(autouse=True)
def chosen(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_PROVIDER", "coreweave")


def test_manual_stop_with_grace_and_with_a_snapshot_of_the_volume(tag: str) -> None:
    volume = {"file_system_snapshot": {"mount_path": "/workspace"}}
    sandbox = Sandbox.run(tags=[tag], provider_options=volume)
    sandbox.write_file("/workspace/note", "kept").result()
    report = sandbox.stop(graceful_shutdown_seconds=30.0, snapshot_on_stop=True).result()
    assert report.snapshot_id is not None
    with Sandbox.run(snapshot=report.snapshot_id, tags=[tag], provider_options=volume) as again:
        assert again.read_file("/workspace/note").result() == b"kept"
    sandbox.stop(missing_ok=True).result()
