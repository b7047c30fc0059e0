"""What the conformance classes stand on: the provider under test, its sandboxes, and looking inside them."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from lowtide import Sandbox, Session
from lowtide.providers.base import Capability

if TYPE_CHECKING:
    from lowtide.providers.base import Provider

ANSWER_SECONDS = 120.0
"""How long one ordinary call may take before it counts as hung. Not a measure of speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderUnderTest:
    """Which provider, and how its sandboxes are made."""

    name: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Create keywords for every sandbox of the suite."""
    output_bytes: int = 50 * 1024 * 1024
    """How much one command prints in the test of large output."""
    big_file_bytes: int = 300 * 1000 * 1000
    parallel: int = 12
    """How many sandboxes are used by threads at once."""
    crowd: int = 16
    """How many sandboxes are started and stopped at once."""
    timeout_seconds: float = 3.0
    """A command timeout that is long enough for a command to have started."""
    max_lifetime_seconds: float = 4.0
    """The shortest lifetime the provider takes."""
    snapshot_keywords: Mapping[str, Any] = field(default_factory=dict)
    """More create keywords for sandboxes that snapshots are taken of or that start from one."""
    snapshot_of: str = "/"
    """What a snapshot holds: all, or one directory. It has ``/opt`` in it."""
    follows_logs_to_the_end: bool = True
    """False where a sandbox that ends takes the last lines of its log with it."""
    keeps_logs_of_the_ended: bool = True
    """False where a sandbox whose main command has ended is gone, with its log."""
    full_pipe_error: str = ""
    """Where a write into a full pipe may fail although it should wait: what a program says of it then."""
    without: frozenset[Capability] = frozenset()
    """What the provider declares and `keywords` take away: tested to be refused."""


def requires(*capabilities: Capability) -> pytest.MarkDecorator:
    """A test that is only there for a provider that declares these capabilities."""
    return pytest.mark.lowtide_requires(*capabilities)


def refuses(*capabilities: Capability) -> pytest.MarkDecorator:
    """A test of the refusal, once for each of these that a provider does not declare: its argument `capability`."""
    return pytest.mark.lowtide_refuses(*capabilities)


class Conformance:
    """Base of all conformance classes. The test module defines the fixture `provider_under_test`.

    One that is subclassed by hand, and not by `tests`, skips what the provider's capabilities exclude.
    """

    declared: ClassVar[frozenset[Capability] | None] = None
    """What the provider declares, where that is known when the tests are collected."""

    @pytest.fixture(scope="class")
    @classmethod
    def provider(cls, provider_under_test: ProviderUnderTest) -> Provider:
        """The adapter itself, for the few tests that have to act underneath the public API."""
        from lowtide.providers import registry

        return registry.provider(provider_under_test.name)

    @pytest.fixture(autouse=True)
    def _declared_capabilities(self, request: pytest.FixtureRequest, provider: Provider) -> None:
        for mark in request.node.iter_markers("lowtide_requires"):
            missing = [str(capability) for capability in mark.args if capability not in provider.capabilities]
            if missing:
                pytest.skip(f"{provider.name} does not declare: {', '.join(missing)}")

    @pytest.fixture
    def make_sandbox(self, provider_under_test: ProviderUnderTest) -> Iterator[Callable[..., Sandbox]]:
        """Makes started sandboxes that end with the test."""
        made: list[Sandbox] = []

        def make(*command: str, **keywords: Any) -> Sandbox:
            sandbox = Sandbox.run(*command, **create_keywords(provider_under_test, **keywords))
            made.append(sandbox)
            return sandbox

        yield make
        for stopping in [sandbox.stop(graceful_shutdown_seconds=0.0) for sandbox in made]:
            stopping.result(ANSWER_SECONDS)

    @pytest.fixture(scope="class")
    @classmethod
    def box(cls, provider_under_test: ProviderUnderTest) -> Iterator[Sandbox]:
        """One sandbox for all tests of a class that leave it as it was."""
        with Sandbox.run(**create_keywords(provider_under_test)) as sandbox:
            sandbox.wait(ANSWER_SECONDS)
            yield sandbox

    @pytest.fixture
    def place(self, box: Sandbox) -> str:
        """A directory of the test's own in `box`."""
        path = f"/tmp/{secrets.token_hex(6)}"
        box.make_dir(path).result(ANSWER_SECONDS)
        return path

    @pytest.fixture
    def session(self, provider_under_test: ProviderUnderTest) -> Iterator[Session]:
        with Session(create_keywords(provider_under_test)) as session:
            yield session

    @pytest.fixture
    def tag(self) -> str:
        """A tag that no other test uses."""
        return f"conformance-{secrets.token_hex(6)}"


def create_keywords(under_test: ProviderUnderTest, **keywords: Any) -> dict[str, Any]:
    return {"provider": under_test.name, **under_test.keywords, **keywords}


def duration_token() -> str:
    """A number of seconds to sleep that can be recognised in a process list."""
    return f"{random.randrange(10_000_000, 99_999_999)}"


def commands_inside(sandbox: Sandbox) -> str:
    """The command lines of all processes in the sandbox."""
    script = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
    return sandbox.exec(["sh", "-c", script]).result(ANSWER_SECONDS).stdout


def eventually(check: Callable[[], bool], *, seconds: float = 60.0, what: str = "it") -> None:
    """Wait for something that happens on its own. Fails when it has not happened in a generous time."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not happen within {seconds:.0f} s")
        time.sleep(0.05)


def sh(sandbox: Sandbox, script: str, **keywords: Any) -> str:
    """Run a script that must succeed; its standard output."""
    result = sandbox.exec(["sh", "-c", script], **keywords).result(ANSWER_SECONDS)
    assert result.returncode == 0, result.stderr
    return result.stdout
