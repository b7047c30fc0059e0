"""What `make test` runs: the part of the suite for whoever just cloned. No engine, no account, under three minutes.

The marker `newcomer` chooses it: all of `tests/unit`, the conformance suite and the runtime on the local provider, but
for what takes long, which `make test-all` has; of each file of the crash matrix the first case on local sandboxes; what
carries the mark itself, such as one quickstart of each emulator.
"""

from __future__ import annotations

import pytest

WHOLE = (
    "tests/unit/",
    "tests/conformance/test_local.py",
    "tests/runtime/test_core.py",
    "tests/runtime/test_local.py",
)
APART = (
    "tests/unit/test_suite_",
    "tests/unit/test_inside_",
    "tests/unit/test_images_hostile.py",
    "tests/unit/test_local_bound.py",
    "tests/unit/test_local_pull.py",
    "tests/unit/test_testing_plugin.py",
    "tests/unit/test_cli_copy.py",
    "tests/unit/test_cli_habits.py",
    "tests/unit/test_cli_image.py",
    "tests/unit/test_cli_snapshot.py",
)
"""Of it, what takes much of its time and is the same on every Python: the suite's own rules, the program inside (C, also
under gVisor and on another processor), hostile images, pulls and bounds, runs of pytest in pytest, and the commands whose
tests start one interpreter after the other."""
ONE_OF_EACH = "tests/crash/"
LONG = ("alone", "slow", "engine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    stand_for: dict[str, pytest.Item] = {}
    for item in items:
        if item.nodeid.startswith(WHOLE):
            if not item.nodeid.startswith(APART) and not any(map(item.get_closest_marker, LONG)):
                item.add_marker(pytest.mark.newcomer)
        elif item.nodeid.startswith(ONE_OF_EACH):
            file = item.nodeid.partition("::")[0]
            known = stand_for.setdefault(file, item)
            if _on_local(item) and not _on_local(known):
                stand_for[file] = item
    for item in stand_for.values():
        item.add_marker(pytest.mark.newcomer)


def _on_local(item: pytest.Item) -> bool:
    return (
        isinstance(item, pytest.Function)
        and getattr(item, "callspec", None) is not None
        and (item.callspec.params.get("world") == "local")
    )
