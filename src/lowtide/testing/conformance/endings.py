"""Conformance of how processes really end: the cases in which other libraries leave sandboxes behind, or hang.

Each runs in a fresh interpreter, is ended as people and machines end programs, and must leave nothing.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from lowtide import Sandbox, Session
from lowtide.engine import engine
from lowtide.errors import CleanupError, SandboxError, SandboxUnavailableError
from lowtide.lifecycle.lease import Outcome
from lowtide.providers.base import LABEL_PREFIX, Provider
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    create_keywords,
    eventually,
)
from lowtide.testing.conformance.lifecycle import is_gone

_BEGIN = """
import asyncio, gc, os, signal, threading, time
from lowtide import Sandbox, Session
from lowtide.providers import registry
KEYWORDS = {keywords!r}
adapter = type(registry.provider({provider!r}))
# As on a terminal, wherever this is started: nohup and background jobs ignore them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

def ready():
    print("READY", flush=True)

def sleep_on():
    # In pieces: Python does not see a signal that comes between its last look and the sleep, until that is over.
    while True:
        time.sleep(0.1)

def in_flight():
    # Committed by the provider, not yet known to the caller: for as long as it takes somebody to press a key.
    create = adapter.create
    async def slow(self, spec):
        made = await create(self, spec)
        ready()
        await asyncio.sleep(3)
        return made
    adapter.create = slow
"""

DROPPED_SESSION = """
def make():
    Session(KEYWORDS).sandbox().wait()
make()
gc.collect()
ready()
"""
IN_FLIGHT_IN_A_SESSION = """
in_flight()
with Session(KEYWORDS) as session:
    session.sandbox().exec(["true"]).result()
    sleep_on()
"""
IN_FLIGHT_IN_A_BLOCK = """
in_flight()
with Sandbox.run(**KEYWORDS):
    sleep_on()
"""
BARE = """
box = Sandbox.run(**KEYWORDS)
box.wait()
ready()
sleep_on()
"""
IN_A_THREAD = """
thread = threading.Thread(target=lambda: Sandbox.run(**KEYWORDS).wait())
thread.start()
thread.join()
ready()
sleep_on()
"""
AFTER_A_SWALLOWED_INTERRUPT = """
first = Session(KEYWORDS)
first.sandbox().wait()
try:
    os.kill(os.getpid(), signal.SIGINT)
    sleep_on()
except KeyboardInterrupt:
    pass
second = Session(KEYWORDS)
second.sandbox().wait()
ready()
"""
STUCK = """
os.environ["LOWTIDE_EXIT_SECONDS"] = "1"
async def never(self, sandbox_id, *, grace_seconds=0.0):
    await asyncio.sleep(3600)
adapter.destroy = never
box = Sandbox.run(**KEYWORDS)
box.wait()
ready()
"""


class EndingsConformance(Conformance):
    @pytest.mark.parametrize(
        ("script", "number"),
        [
            pytest.param(DROPPED_SESSION, None, id="a session that was dropped and collected"),
            pytest.param(IN_FLIGHT_IN_A_SESSION, signal.SIGTERM, id="SIGTERM while a create is in flight"),
            pytest.param(IN_FLIGHT_IN_A_BLOCK, signal.SIGINT, id="Ctrl+C while a create is in flight"),
            pytest.param(BARE, signal.SIGHUP, id="the terminal closes"),
            pytest.param(IN_A_THREAD, signal.SIGTERM, id="SIGTERM, made in a worker thread"),
            pytest.param(AFTER_A_SWALLOWED_INTERRUPT, None, id="after a swallowed Ctrl+C"),
            pytest.param(STUCK, None, id="a provider that does not end it"),
        ],
    )
    def test_nothing_is_left(
        self,
        script: str,
        number: signal.Signals | None,
        tag: str,
        provider_under_test: ProviderUnderTest,
        provider: Provider,
    ) -> None:
        keywords = create_keywords(provider_under_test, tags=[tag])
        code = _BEGIN.format(keywords=keywords, provider=provider_under_test.name) + script
        program = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "READY\n", program.communicate(timeout=30)[1]
            if number is not None:
                program.send_signal(number)
            _, said = program.communicate(timeout=ANSWER_SECONDS)
        finally:
            program.kill()
            program.wait()
        assert program.returncode == (0 if number is None else -number), said

        async def left() -> list[str]:
            found = provider.list({f"{LABEL_PREFIX}tag-{tag}": "1"})
            return [info.sandbox_id async for info in found if not info.state.terminal]

        eventually(
            lambda: not engine().run(left(), ANSWER_SECONDS), what="the end of what the program had made"
        )

    def test_a_close_that_failed_can_be_repeated(
        self, provider_under_test: ProviderUnderTest, provider: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        session = Session(create_keywords(provider_under_test))
        box = session.sandbox()
        box.wait(ANSWER_SECONDS)
        with monkeypatch.context() as patched:
            patched.setattr(type(provider), "destroy", _failing(SandboxError("not today")))
            with pytest.raises(CleanupError):
                session.close().result(ANSWER_SECONDS)
        # By then the guardian, which nobody patched, may have been quicker with what stayed.
        session.close().result(ANSWER_SECONDS)
        assert is_gone(provider, box.sandbox_id)

    def test_a_provider_that_is_away_at_the_end_is_asked_again(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        box = make_sandbox()
        box.wait(ANSWER_SECONDS)
        monkeypatch.setattr(
            type(provider), "destroy", _failing(SandboxUnavailableError("away"), provider.destroy)
        )
        assert box.stop(graceful_shutdown_seconds=0.0).result(ANSWER_SECONDS).outcome is Outcome.DESTROYED
        assert is_gone(provider, box.sandbox_id)


def _failing(error: SandboxError, then: Callable[..., object] | None = None) -> Callable[..., object]:
    """A `destroy` that fails: always, or once."""
    failed = False

    async def destroy(self: Provider, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        nonlocal failed
        if then is None or not failed:
            failed = True
            raise error
        ended: bool = await then(sandbox_id, grace_seconds=grace_seconds)  # type: ignore[misc]
        return ended

    return destroy
