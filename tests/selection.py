"""Which tests run when: `make test` (marker `newcomer`), `make test-all`, and `make test-all FULL=1` (marker `full`).

`make test` is for somebody who just cloned: no engine, no account, under three minutes. It has all of `tests/unit`, the
conformance suite and the runtime on the local provider without the cases that take long; the first case on local
sandboxes of each file of the crash matrix; and tests that carry the marker themselves, such as one quickstart of each
emulator.

`make test-all` runs the whole conformance suite on local, Docker, Kubernetes and E2B. The other providers share the code
for commands, streams, files and trees with these, so they run the cases that reach their own code: the adapter, the
channel, the errors, snapshots and forked connections. The rest of their cases carry the marker `full`.
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

OWN_CODE_ONLY = tuple(
    f"tests/conformance/test_{name}.py"
    for name in ("daytona", "modal", "runloop", "coreweave", "podman", "local_gvisor")
)
OWN_CODE = (
    "TestExec",
    "TestLifecycle",
    "TestEndings",
    "TestFeatures",
    "TestCancellation",
    "TestIsolation",
    "test_fifty_megabytes_of_output_arrive_complete",
    "test_every_byte_value_passes_both_ways",
    "test_ten_megabytes_through_a_command_do_not_lock_up",
    "test_a_terminal_",
    "test_a_tree_comes_back_as_it_went",
    "test_a_tree_with_two_thousand_files",
    "test_bytes_come_back_as_they_went",
    "test_a_big_file_goes_in_and_out",
    "test_missing_is_said_as_missing",
    "test_permission_denied_is_said_as_that",
    "test_many_files_at_once",
    "test_a_crowd_is_started_used_and_stopped_at_once",
    "test_a_forked_child",
    "test_threads_and_two_event_loops_at_once",
)
"""Classes whole, and the beginnings of the names of single cases of other classes."""
LONG = ("alone", "slow", "engine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    stand_for: dict[str, pytest.Item] = {}
    for item in items:
        if item.nodeid.startswith(OWN_CODE_ONLY) and not _reaches_own_code(item):
            item.add_marker(pytest.mark.full)
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


def _reaches_own_code(item: pytest.Item) -> bool:
    _, test_class, test = item.nodeid.split("::", 2)
    return test_class in OWN_CODE or test.startswith(OWN_CODE)


def _on_local(item: pytest.Item) -> bool:
    return (
        isinstance(item, pytest.Function)
        and getattr(item, "callspec", None) is not None
        and (item.callspec.params.get("world") == "local")
    )
