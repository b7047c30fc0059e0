"""Modal's bad days: the real SDK against the emulator, with what the hosted service does now and then."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.modal_emulator import needs_emulator, serving

from lowtide import Sandbox
from lowtide.emulators.handle import Handle
from lowtide.errors import AuthenticationError, SandboxFailedError, SandboxGone, ValidationError
from lowtide.providers.base import Labels, SandboxSpec
from lowtide.providers.modal import ModalProvider

pytestmark = [*needs_emulator, pytest.mark.timeout(300)]

SECONDS = 120.0


@pytest.fixture(scope="module")
def served() -> Iterator[Handle]:
    yield from serving()


@pytest.fixture
def modal(served: Handle) -> Iterator[Handle]:
    yield served
    served.faults.clear()
    assert served.state()["sandboxes"]["modal"] == []


def eventually(check: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.02)


def running(modal: Handle) -> list[Any]:
    found: list[Any] = modal.state()["sandboxes"]["modal"]
    return found


@pytest.mark.parametrize("missing", ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"])
def test_without_a_token_it_says_what_to_set(missing: str) -> None:
    environ = {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-secret-words"}
    del environ[missing]
    with pytest.raises(AuthenticationError, match=missing) as caught:
        ModalProvider.connect(environ)
    assert "secret-words" not in str(caught.value)


def test_a_wrong_token_is_an_authentication_error(modal: Handle) -> None:
    environ = {**modal.environment, "MODAL_TOKEN_SECRET": "as-wrong-words"}

    async def ask() -> None:
        provider = ModalProvider.connect(environ)
        try:
            _ = [one async for one in provider.list({})]
        finally:
            await provider.aclose()

    with pytest.raises(AuthenticationError, match="MODAL_TOKEN_ID") as caught:
        asyncio.run(ask())
    assert "wrong-words" not in str(caught.value)


@pytest.mark.parametrize("fault", ["create-lost", "create-dropped"])
def test_a_create_whose_answers_are_all_lost_is_found_by_its_name(modal: Handle, fault: str) -> None:
    """The SDK asks four times and gives up."""
    modal.faults.add(fault, count=4)
    with Sandbox.run(provider="modal") as box:
        assert box.exec(["echo", "found"]).result(SECONDS).stdout == "found\n"
        assert [one["sandbox_id"] for one in running(modal)] == [box.sandbox_id]


def test_a_cancelled_create_leaves_nothing(modal: Handle) -> None:
    async def cancelled() -> None:
        modal.faults.add("create-slow", seconds=0.5)
        async with asyncio.timeout(0.2):
            async with Sandbox.run(provider="modal"):
                raise AssertionError("it cannot be there yet")

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    eventually(lambda: not running(modal))


def test_a_terminate_that_does_nothing_is_asked_for_again(modal: Handle) -> None:
    box = Sandbox.run(provider="modal")
    box.exec(["true"]).result(SECONDS)
    ignored = modal.faults.add("kill-ignored")
    assert box.stop(graceful_shutdown_seconds=0.0).result(SECONDS).outcome.value == "destroyed"
    assert modal.faults.hits(ignored) == 1


def test_one_that_never_starts_says_so_at_once(modal: Handle) -> None:
    modal.faults.add("create-error-state")
    box = Sandbox.run(provider="modal")
    try:
        with pytest.raises(SandboxFailedError, match="could not be started"):
            box.exec(["true"]).result(SECONDS)
    finally:
        box.stop().result(SECONDS)


def test_a_lost_connection_is_not_noticed(modal: Handle) -> None:
    with Sandbox.run(provider="modal") as box:
        modal.faults.add("exec-dropped", seconds=0.3)
        script = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done"
        assert box.exec(["sh", "-c", script]).result(SECONDS).stdout == "1\n2\n3\n4\n5\n6\n"


def test_gone_mid_command_is_gone(modal: Handle) -> None:
    box = Sandbox.run(provider="modal")
    modal.faults.add("gone-mid-command", seconds=0.5)
    with pytest.raises((SandboxGone, SandboxFailedError)):
        box.exec(["sleep", "100"]).result(SECONDS)
    box.stop().result(SECONDS)


def test_a_lease_that_nobody_renews_ends_the_sandbox_though_modal_cannot(modal: Handle) -> None:
    async def make() -> str:
        provider = ModalProvider.connect(modal.environment)
        labels = Labels(lease_id="01" + os.urandom(12).hex(), ledger_id="nobody", owner="nobody")
        try:
            return (await provider.create(SandboxSpec(labels=labels, lifetime_seconds=2.0))).sandbox_id
        finally:
            await provider.aclose()

    made = asyncio.run(make())
    assert [one["timeout_seconds"] for one in running(modal) if one["sandbox_id"] == made] == [86_400]
    eventually(lambda: made not in [one["sandbox_id"] for one in running(modal)])


def test_another_process_with_the_token_comes_in_and_may_end_it(modal: Handle) -> None:
    box = Sandbox.run(provider="modal")
    box.write_file("/tmp/word", b"shared").result(SECONDS)

    async def elsewhere() -> tuple[bytes, bool, bool]:
        provider = ModalProvider.connect(modal.environment)
        try:
            data = b"".join([one async for one in provider.read_file(str(box.sandbox_id), "/tmp/word")])
            return (
                data,
                await provider.destroy(str(box.sandbox_id)),
                await provider.destroy(str(box.sandbox_id)),
            )
        finally:
            await provider.aclose()

    assert asyncio.run(elsewhere()) == (b"shared", True, False)
    box.stop().result(SECONDS)


def test_commands_beyond_modals_limit_run(modal: Handle) -> None:
    with Sandbox.run(provider="modal") as box:
        long = "x" * 100_000
        assert (
            box.exec(["sh", "-c", 'printf %s "$0" | wc -c', long]).result(SECONDS).stdout.strip() == "100000"
        )
    with pytest.raises(ValidationError, match="too long for Modal"):
        Sandbox.run("echo", "x" * 70_000, provider="modal").exec(["true"]).result(SECONDS)


def test_inside_asyncio_nothing_warns_and_a_forked_child_has_its_own(modal: Handle) -> None:
    script = """
import asyncio, os, warnings
warnings.simplefilter("error")
from lowtide import Sandbox

async def once(word):
    async with Sandbox.run(provider="modal") as box:
        return (await box.exec(["echo", word])).stdout

assert asyncio.run(once("parent")) == "parent\\n"
pid = os.fork()
if pid == 0:
    code = 1
    try:
        code = 0 if asyncio.run(once("child")) == "child\\n" else 2
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert asyncio.run(once("again")) == "again\\n"
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        env={**os.environ, **modal.environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_left_to_the_exit_after_a_sandbox_of_another_provider_it_ends_quietly(modal: Handle) -> None:
    """The SDK is imported after the exit hook was armed, and would stop before it."""
    script = """
from lowtide import Sandbox
local, box = Sandbox.run(provider="local"), Sandbox.run(provider="modal")
assert local.exec(["echo", "1"]).result().stdout + box.exec(["echo", "2"]).result().stdout == "1\\n2\\n"
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **modal.environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert running(modal) == []


@pytest.mark.parametrize("name", ["sandbox", "task-2"])
def test_an_environment_that_is_not_there_proves_nothing_of_a_sandbox(modal: Handle, name: str) -> None:
    async def destroy(sandbox_id: str, **more: str) -> bool:
        provider = ModalProvider.connect({**modal.environment, **more})
        try:
            return await provider.destroy(sandbox_id)
        finally:
            await provider.aclose()

    with Sandbox.run(provider="modal") as box:
        assert box.exec(["true"]).result(SECONDS).returncode == 0
        with pytest.raises(ValidationError, match=name):
            asyncio.run(destroy(str(box.sandbox_id), MODAL_ENVIRONMENT=name))
        assert len(running(modal)) == 1


def test_a_dockerfile_that_changed_is_built_again(modal: Handle, tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    for word in ("one", "two"):
        path.write_text(f"FROM python:3.11\nENV WORD={word}\n")
        with Sandbox.run(provider="modal", provider_options={"dockerfile": str(path)}) as box:
            assert box.exec(["printenv", "WORD"]).result(SECONDS).stdout == f"{word}\n"
    path.unlink()
    with pytest.raises(ValidationError, match="dockerfile") as caught:
        Sandbox.run(provider="modal", provider_options={"dockerfile": str(path)})
    assert caught.value.argument == "dockerfile"


@pytest.mark.parametrize(
    "given",
    [
        {"container_image": "python:3.11\nRUN touch /odd"},
        {"provider_options": {"image": "python:3.11"}},
        {"provider_options": {"secrets": ("word",)}},
        {"provider_options": {"idle_timeout_seconds": 0}},
    ],
)
def test_what_the_sdk_cannot_take_is_refused_before_it_is_asked(modal: Handle, given: Any) -> None:
    with pytest.raises(ValidationError):
        Sandbox.run(provider="modal", **given)
    assert running(modal) == []
