"""Conformance of one sandbox's life: made, found, used, ended once, and gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lowtide import Sandbox, results
from lowtide.engine import engine
from lowtide.errors import SandboxError, SandboxGone, SandboxNotFoundError
from lowtide.lifecycle.lease import Outcome
from lowtide.providers.base import Capability, Provider
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    create_keywords,
    eventually,
    requires,
    sh,
)

CALM = (Outcome.DESTROYED, Outcome.ALREADY_GONE)


IMPOSSIBLE_IDS = ("", ".", "..", "../../etc", "/", "a/b/c", "a b", "a\0b", "a\nb", "a?b", "a%2fb", "é")
"""Ids that nothing can have on any provider."""


class LifecycleConformance(Conformance):
    def test_a_with_block_ends_it(self, provider_under_test: ProviderUnderTest, provider: Provider) -> None:
        with Sandbox.run(**create_keywords(provider_under_test)) as box:
            assert sh(box, "echo hello") == "hello\n"
            sandbox_id = box.sandbox_id
            assert sandbox_id
        assert is_gone(provider, sandbox_id)

    def test_an_async_with_block_ends_it(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        async def life() -> str:
            async with Sandbox.run(**create_keywords(provider_under_test)) as box:
                assert (await box.exec(["echo", "hello"])).stdout == "hello\n"
                await box.write_file("/tmp/x", b"1")
                assert await box.read_file("/tmp/x") == b"1"
                assert box.sandbox_id is not None
                return box.sandbox_id

        assert is_gone(provider, asyncio.run(life()))

    def test_inside_a_loop_run_returns_before_the_sandbox_is_there(
        self, provider_under_test: ProviderUnderTest
    ) -> None:
        async def life() -> str:
            box = Sandbox.run(**create_keywords(provider_under_test))
            try:
                return (await box.exec(["echo", "first call waits"])).stdout
            finally:
                await box.stop()

        assert asyncio.run(life()) == "first call waits\n"

    def test_a_handle_starts_on_first_use(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        box = Sandbox(**create_keywords(provider_under_test))
        assert box.sandbox_id is None
        try:
            assert sh(box, "echo started") == "started\n"
            assert box.sandbox_id is not None
        finally:
            box.stop().result(ANSWER_SECONDS)
        assert is_gone(provider, box.sandbox_id)

    def test_stopping_a_handle_that_never_started_is_silent(
        self, provider_under_test: ProviderUnderTest
    ) -> None:
        report = Sandbox(**create_keywords(provider_under_test)).stop().result(ANSWER_SECONDS)
        assert report.outcome is Outcome.ALREADY_GONE

    def test_an_exception_in_the_block_ends_it_and_is_not_masked(
        self, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        box = Sandbox.run(**create_keywords(provider_under_test))
        with pytest.raises(ZeroDivisionError), box:
            _ = 1 // 0
        assert is_gone(provider, box.sandbox_id)

    def test_stop_answers_with_what_happened(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox()
        report = box.stop().result(ANSWER_SECONDS)
        assert report.outcome is Outcome.DESTROYED
        assert report.sandbox_id == box.sandbox_id
        assert report.provider == box.provider
        assert report.seconds >= 0
        assert report.error is None

    def test_stop_twice(self, make_sandbox: Callable[..., Sandbox], provider: Provider) -> None:
        box = make_sandbox()
        box.stop().result(ANSWER_SECONDS)
        assert box.stop().result(ANSWER_SECONDS).outcome in CALM
        assert is_gone(provider, box.sandbox_id)

    def test_stop_from_eight_threads_at_once_is_one_ending(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox()
        start = threading.Barrier(8)

        def stop() -> Outcome:
            start.wait()
            return box.stop().result(ANSWER_SECONDS).outcome

        with ThreadPoolExecutor(8) as threads:
            outcomes = [future.result() for future in [threads.submit(stop) for _ in range(8)]]
        assert set(outcomes) <= set(CALM)
        assert Outcome.DESTROYED in outcomes
        assert is_gone(provider, box.sandbox_id)

    def test_stop_while_commands_run_ends_them(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox()
        running = [box.exec(["sh", "-c", "echo up; sleep 1000"]) for _ in range(3)]
        for process in running:
            next(iter(process.stdout))
        assert box.stop(graceful_shutdown_seconds=0.5).result(ANSWER_SECONDS).outcome is Outcome.DESTROYED
        for process in running:
            # Either the exit code of its death or the sandbox's end: never a hang, never success.
            try:
                assert process.result(ANSWER_SECONDS).returncode != 0
            except SandboxError as error:
                assert not isinstance(error, TimeoutError)
        assert is_gone(provider, box.sandbox_id)

    def test_stop_after_somebody_else_ended_it(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox()
        assert box.sandbox_id is not None
        engine().run(provider.destroy(box.sandbox_id), ANSWER_SECONDS)
        assert box.stop().result(ANSWER_SECONDS).outcome is Outcome.ALREADY_GONE

    @requires(Capability.COMMAND)
    def test_stop_after_it_died_by_itself(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox("sh", "-c", "exit 3")
        box.wait_until_complete().result(ANSWER_SECONDS)
        assert box.returncode == 3
        assert box.stop().result(ANSWER_SECONDS).outcome in CALM
        assert is_gone(provider, box.sandbox_id)

    @requires(Capability.COMMAND)
    def test_a_main_command_gets_time_to_end_itself(self, make_sandbox: Callable[..., Sandbox]) -> None:
        # It writes when it is told to end; the writing is seen through a command that lives as long.
        box = make_sandbox(
            "sh",
            "-c",
            "trap 'echo told > /tmp/told; sleep 1; exit 0' TERM; echo > /tmp/up; while :; do sleep 0.1; done",
        )
        eventually(lambda: box.exists("/tmp/up").result(ANSWER_SECONDS), what="the start")
        witness = box.exec(
            [
                "sh",
                "-c",
                "trap '' TERM; echo up; while ! [ -e /tmp/told ]; do sleep 0.05; done; cat /tmp/told; sleep 100",
            ]
        )
        seen = iter(witness.stdout)
        assert next(seen) == "up\n"
        stopping = box.stop(graceful_shutdown_seconds=30.0)
        assert next(seen) == "told\n"
        assert stopping.result(ANSWER_SECONDS).outcome in CALM

    def test_use_after_stop_says_gone(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox()
        box.stop().result(ANSWER_SECONDS)
        uses: list[Callable[[], Any]] = [
            lambda: box.exec(["true"]).result(ANSWER_SECONDS),
            lambda: box.read_file("/etc/hostname").result(ANSWER_SECONDS),
            lambda: box.write_file("/tmp/x", b"").result(ANSWER_SECONDS),
            lambda: box.list_dir("/").result(ANSWER_SECONDS),
        ]
        for use in uses:
            with pytest.raises(SandboxGone):
                use()
        assert box.get_status().terminal

    def test_use_after_somebody_else_ended_it_says_gone(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox()
        assert box.sandbox_id is not None
        engine().run(provider.destroy(box.sandbox_id), ANSWER_SECONDS)
        with pytest.raises(SandboxGone):
            box.exec(["true"]).result(ANSWER_SECONDS)
        with pytest.raises(SandboxGone):
            box.read_file("/etc/hostname").result(ANSWER_SECONDS)

    def test_list_finds_by_all_of_the_tags(
        self, make_sandbox: Callable[..., Sandbox], tag: str, provider_under_test: ProviderUnderTest
    ) -> None:
        one, two = make_sandbox(tags=[tag, "one"]), make_sandbox(tags=[tag, "two"])
        name = provider_under_test.name

        def ids(*tags: str) -> set[str | None]:
            return {
                box.sandbox_id for box in Sandbox.list(tags=list(tags), provider=name).result(ANSWER_SECONDS)
            }

        assert ids(tag) == {one.sandbox_id, two.sandbox_id}
        assert ids(tag, "two") == {two.sandbox_id}
        assert ids(tag, "three") == set()
        two.stop().result(ANSWER_SECONDS)
        assert ids(tag) == {one.sandbox_id}

    def test_list_includes_what_another_process_made(
        self, tag: str, provider_under_test: ProviderUnderTest
    ) -> None:
        with other_process(provider_under_test, tag) as sandbox_id:
            found = Sandbox.list(tags=[tag], provider=provider_under_test.name).result(ANSWER_SECONDS)
            assert [box.sandbox_id for box in found] == [sandbox_id]
            assert tag in found[0].tags
            assert sh(found[0], "echo through the list") == "through the list\n"

    def test_from_id_gives_a_working_sandbox(
        self, make_sandbox: Callable[..., Sandbox], provider_under_test: ProviderUnderTest
    ) -> None:
        box = make_sandbox()
        assert box.sandbox_id is not None
        box.write_file("/tmp/mark", b"same").result(ANSWER_SECONDS)
        again = Sandbox.from_id(box.sandbox_id, provider=provider_under_test.name).result(ANSWER_SECONDS)
        assert again.sandbox_id == box.sandbox_id
        assert again.read_file("/tmp/mark").result(ANSWER_SECONDS) == b"same"

    def test_from_id_of_nothing_is_not_found(self, provider_under_test: ProviderUnderTest) -> None:
        with pytest.raises(SandboxNotFoundError):
            Sandbox.from_id(MISSING_ID, provider=provider_under_test.name).result(ANSWER_SECONDS)

    def test_delete_ends_a_sandbox_by_its_id(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        box = make_sandbox()
        assert box.sandbox_id is not None
        Sandbox.delete(box.sandbox_id, provider=provider.name).result(ANSWER_SECONDS)
        assert is_gone(provider, box.sandbox_id)
        assert box.stop().result(ANSWER_SECONDS).outcome is Outcome.ALREADY_GONE

    def test_delete_of_nothing_is_an_error_unless_missing_is_ok(
        self, provider_under_test: ProviderUnderTest
    ) -> None:
        with pytest.raises(SandboxNotFoundError):
            Sandbox.delete(MISSING_ID, provider=provider_under_test.name).result(ANSWER_SECONDS)
        Sandbox.delete(MISSING_ID, provider=provider_under_test.name, missing_ok=True).result(ANSWER_SECONDS)

    @pytest.mark.parametrize("sandbox_id", IMPOSSIBLE_IDS, ids=ascii)
    def test_an_id_that_nothing_can_have_is_not_there(self, sandbox_id: str, provider: Provider) -> None:
        with pytest.raises(SandboxNotFoundError):
            engine().run(provider.get(sandbox_id), ANSWER_SECONDS)
        assert engine().run(provider.destroy(sandbox_id), ANSWER_SECONDS) is False

    def test_delete_twice(self, make_sandbox: Callable[..., Sandbox], provider: Provider) -> None:
        box = make_sandbox()
        assert box.sandbox_id is not None
        Sandbox.delete(box.sandbox_id, provider=provider.name).result(ANSWER_SECONDS)
        with pytest.raises(SandboxNotFoundError):
            Sandbox.delete(box.sandbox_id, provider=provider.name).result(ANSWER_SECONDS)
        Sandbox.delete(box.sandbox_id, provider=provider.name, missing_ok=True).result(ANSWER_SECONDS)

    def test_results_stops_many_in_parallel(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> None:
        boxes = [make_sandbox() for _ in range(4)]
        reports = results([box.stop() for box in boxes])
        assert [report.outcome for report in reports] == [Outcome.DESTROYED] * 4
        assert all(is_gone(provider, box.sandbox_id) for box in boxes)

    @pytest.mark.parametrize("ending", ["pass", "import os; os._exit(3)"], ids=["normal exit", "_exit"])
    def test_a_process_that_ends_leaves_nothing(
        self, ending: str, tag: str, provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                _MAKE_ONE.format(keywords=create_keywords(provider_under_test, tags=[tag]), then=ending),
            ],
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
        sandbox_id = done.stdout.strip()
        assert sandbox_id, done.stderr
        eventually(lambda: is_gone(provider, sandbox_id), what="the end of what a dead process had made")

    def test_secrets_are_written_nowhere(self, make_sandbox: Callable[..., Sandbox]) -> None:
        from lowtide.machine import home

        secret = "s3cr3t-conformance-value"
        box = make_sandbox(environment_variables={"TOKEN": secret})
        assert sh(box, 'printf %s "$TOKEN"') == secret
        for folder, _, names in os.walk(home()):
            if "/sandboxes/" in folder:
                continue  # the sandbox's own files are its own business
            for path in (Path(folder, name) for name in names):
                if path.is_file():
                    assert secret.encode() not in path.read_bytes(), f"{path} holds an environment value"


MISSING_ID = "01arz3ndektsv4rrffq69g5fav"

_MAKE_ONE = """
from lowtide import Sandbox
box = Sandbox.run(**{keywords!r})
box.wait()
print(box.sandbox_id, flush=True)
{then}
"""


def is_gone(provider: Provider, sandbox_id: str | None) -> bool:
    """Ask the provider itself. A record that holds nothing any more counts as gone."""
    assert sandbox_id is not None
    try:
        return engine().run(provider.get(sandbox_id), ANSWER_SECONDS).state.terminal
    except (SandboxNotFoundError, SandboxGone):
        return True


class other_process:
    """A sandbox that another process made and holds until the block ends."""

    def __init__(self, under_test: ProviderUnderTest, tag: str) -> None:
        self._code = _MAKE_ONE.format(
            keywords=create_keywords(under_test, tags=[tag]), then="import sys; sys.stdin.read()"
        )

    def __enter__(self) -> str:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=ANSWER_SECONDS)
        finally:
            self._process.kill()
