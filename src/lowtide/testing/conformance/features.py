"""Conformance of what a provider may declare: snapshots, ports, pause, limits, a lifetime, a main command."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable
from contextlib import suppress

import pytest

from lowtide import Sandbox
from lowtide.engine import engine
from lowtide.errors import ResourceExhaustedError, SandboxError, UnsupportedError, ValidationError
from lowtide.providers.base import Capability, Provider, SandboxState
from lowtide.providers.optional import Logs, Snapshots
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    eventually,
    requires,
    sh,
)
from lowtide.testing.conformance.lifecycle import is_gone


class FeaturesConformance(Conformance):
    @pytest.fixture
    def make_limited(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider
    ) -> Callable[..., Sandbox]:
        """Makes sandboxes with limits. A provider may find that this machine or account cannot; clearly, then."""

        def make(**limits: object) -> Sandbox:
            try:
                return make_sandbox(resources={"limits": limits})
            except UnsupportedError as error:
                refusal = error
            assert refusal.provider == provider.name
            assert refusal.feature
            assert refusal.alternative
            pytest.skip(f"refused clearly: {refusal}")

        return make

    @requires(Capability.COMMAND)
    def test_a_main_command_runs_in_the_working_dir_with_the_environment(
        self, make_sandbox: Callable[..., Sandbox]
    ) -> None:
        box = make_sandbox(
            "sh",
            "-c",
            'pwd > made; printf %s "$WORD" >> made; sleep 1000',
            working_dir="/tmp",
            environment_variables={"WORD": "x y"},
        )
        eventually(
            lambda: sh(box, "cat /tmp/made 2>/dev/null || true") == "/tmp\nx y",
            what="what the main command writes",
        )

    @requires(Capability.COMMAND)
    def test_a_main_command_that_ends_completes_the_sandbox(
        self, make_sandbox: Callable[..., Sandbox], provider_under_test: ProviderUnderTest
    ) -> None:
        box = make_sandbox("sh", "-c", "echo first; echo last")
        box.wait_until_complete().result(ANSWER_SECONDS)
        assert box.get_status() is SandboxState.COMPLETED
        assert box.returncode == 0
        if provider_under_test.keeps_logs_of_the_ended:
            assert "".join(box.stream_logs()) == "first\nlast\n"
            assert "".join(box.stream_logs(follow=True, tail_lines=1)) == "last\n"

    @requires(Capability.COMMAND, Capability.LOGS)
    def test_the_log_of_the_main_process(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider, provider_under_test: ProviderUnderTest
    ) -> None:
        script = "seq 3; echo four >&2; until [ -e /tmp/go ]; do sleep 0.05; done; printf '\\377end\\n'"
        box = make_sandbox("sh", "-c", script)
        eventually(lambda: len("".join(box.stream_logs())) == 11, what="what the main command prints")
        assert sorted("".join(box.stream_logs()).split()) == ["1", "2", "3", "four"]
        assert len("".join(box.stream_logs(tail_lines=2)).split()) == 2
        assert len("".join(box.stream_logs(tail_lines=2**31)).split()) == 4
        with pytest.raises(ValidationError):
            box.stream_logs(tail_lines=0)
        assert sorted(_log_from_elsewhere(provider, box.sandbox_id).split()) == [b"1", b"2", b"3", b"four"]
        left = box.stream_logs(follow=True)
        next(left)
        left.close()
        following = box.stream_logs(follow=True)
        first = next(following)
        with suppress(SandboxError):  # the sandbox may end before this is answered
            box.write_file("/tmp/go", b"").result(ANSWER_SECONDS)
        printed = first + "".join(following)
        assert sorted(printed.split())[:4] == ["1", "2", "3", "four"]
        if provider_under_test.follows_logs_to_the_end:
            assert printed.endswith("\ufffdend\n")

    @requires(Capability.COMMAND, Capability.LOGS)
    def test_a_log_keeps_the_newest_and_nobody_has_to_read_it(
        self, make_sandbox: Callable[..., Sandbox], provider_under_test: ProviderUnderTest
    ) -> None:
        size = provider_under_test.output_bytes // 100 * 100
        line = "0" * 99
        script = f"yes {line} 2>/dev/null | head -c {size}; echo last; touch /tmp/over; sleep 1000"
        box = make_sandbox("sh", "-c", script)
        eventually(lambda: box.exists("/tmp/over").result(ANSWER_SECONDS), what="the end of the flood")
        eventually(
            lambda: "".join(box.stream_logs(tail_lines=1)) == "last\n", what="its last line in the log"
        )
        kept = "".join(box.stream_logs())
        broken = provider_under_test.full_pipe_error
        assert kept.endswith(f"{line}\nlast\n") or (broken and kept.endswith(f"{broken}\nlast\n"))

    @requires(Capability.LIFETIME)
    def test_a_lifetime_ends_it_without_being_asked(
        self, make_sandbox: Callable[..., Sandbox], provider_under_test: ProviderUnderTest, provider: Provider
    ) -> None:
        box = make_sandbox(max_lifetime_seconds=provider_under_test.max_lifetime_seconds)
        assert sh(box, "echo alive") == "alive\n"
        eventually(lambda: is_gone(provider, box.sandbox_id), seconds=90, what="the end by lifetime")
        with pytest.raises(SandboxError):
            box.exec(["true"]).result(ANSWER_SECONDS)

    @requires(Capability.SNAPSHOT)
    def test_a_new_sandbox_starts_from_a_snapshot(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider, provider_under_test: ProviderUnderTest
    ) -> None:
        assert isinstance(provider, Snapshots)
        more, whole = provider_under_test.snapshot_keywords, provider_under_test.snapshot_of == "/"
        first = make_sandbox(**more)
        first.write_file("/opt/kept", b"one").result(ANSWER_SECONDS)
        link = "/srv/d/link" if whole else "/opt/d/link"
        sh(first, f"mkdir -p {link[:6]} && ln -s /opt/kept {link} && rm -rf /var/tmp")
        snapshot_id = first.snapshot().result(ANSWER_SECONDS)
        try:
            first.write_file("/opt/kept", b"changed after").result(ANSWER_SECONDS)
            second = make_sandbox(snapshot=snapshot_id, **more)
            assert second.read_file(link).result(ANSWER_SECONDS) == b"one"
            assert second.exists("/var/tmp").result(ANSWER_SECONDS) is not whole
            second.write_file("/opt/kept", b"two").result(ANSWER_SECONDS)
            assert first.read_file("/opt/kept").result(ANSWER_SECONDS) == b"changed after"
            third = make_sandbox(snapshot=snapshot_id, **more)
            assert third.read_file("/opt/kept").result(ANSWER_SECONDS) == b"one"
            for box in (second, third):
                box.stop().result(ANSWER_SECONDS)
        finally:
            assert engine().run(provider.delete_snapshot(snapshot_id), ANSWER_SECONDS)
        assert snapshot_id not in engine().run(provider.list_snapshots(), ANSWER_SECONDS)

    @requires(Capability.SNAPSHOT)
    def test_a_snapshot_on_stop(
        self, make_sandbox: Callable[..., Sandbox], provider: Provider, provider_under_test: ProviderUnderTest
    ) -> None:
        assert isinstance(provider, Snapshots)
        more = provider_under_test.snapshot_keywords
        first = make_sandbox(**more)
        first.write_file("/opt/kept", b"last words").result(ANSWER_SECONDS)
        report = first.stop(snapshot_on_stop=True).result(ANSWER_SECONDS)
        assert report.snapshot_id is not None
        try:
            assert is_gone(provider, first.sandbox_id)
            second = make_sandbox(snapshot=report.snapshot_id, **more)
            assert second.read_file("/opt/kept").result(ANSWER_SECONDS) == b"last words"
            second.stop().result(ANSWER_SECONDS)
        finally:
            engine().run(provider.delete_snapshot(report.snapshot_id), ANSWER_SECONDS)

    @requires(Capability.PAUSE)
    def test_pause_and_resume_keep_files(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox()
        box.write_file("/tmp/x", b"before").result(ANSWER_SECONDS)
        box.pause().result(ANSWER_SECONDS)
        assert box.get_status() is SandboxState.PAUSED
        box.resume().result(ANSWER_SECONDS)
        assert box.read_file("/tmp/x").result(ANSWER_SECONDS) == b"before"
        assert sh(box, "echo on") == "on\n"

    @requires(Capability.PORTS)
    def test_a_port_is_reached_by_its_url(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox(ports=[8000])
        if box.exec(["sh", "-c", "command -v python3"]).result(ANSWER_SECONDS).returncode != 0:
            pytest.skip("no Python in this sandbox to serve with")
        box.write_file("/tmp/www/index.html", b"served" * 50_000).result(ANSWER_SECONDS)
        server = box.exec(["python3", "-m", "http.server", "8000", "-d", "/tmp/www"])
        url = box.url(8000).result(ANSWER_SECONDS)
        request = urllib.request.Request(url.url + "/index.html", headers=dict(url.headers))

        def served() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return bool(answer.read() == b"served" * 50_000)
            except OSError:
                return False

        eventually(served, what="an answer on the port")
        server.cancel()

    @requires(Capability.MEMORY_LIMIT)
    def test_a_memory_limit_holds(self, make_limited: Callable[..., Sandbox]) -> None:
        box = make_limited(memory="128Mi")
        # 400 MB in one shell variable; head and tr keep it to POSIX tools.
        result = box.exec(["sh", "-c", "x=$(head -c 400000000 /dev/zero | tr '\\0' x); echo ${#x}"]).result(
            ANSWER_SECONDS
        )
        assert "400000000" not in result.stdout

    @requires(Capability.PIDS_LIMIT)
    def test_a_process_limit_holds(self, make_limited: Callable[..., Sandbox]) -> None:
        box = make_limited(pids=64)
        script = "i=0; while [ $i -lt 200 ]; do sleep 5 & i=$((i+1)); done; wait; echo all"
        result = box.exec(["sh", "-c", script]).result(ANSWER_SECONDS)
        assert result.returncode != 0 or result.stderr

        def room() -> bool:
            try:
                return box.exec(["true"]).result(ANSWER_SECONDS).returncode == 0
            except ResourceExhaustedError:  # full: nothing can be started, and it says so
                return False

        eventually(room, what="room for a command")

    @requires(Capability.CPU_LIMIT)
    def test_a_cpu_limit_is_accepted(self, make_limited: Callable[..., Sandbox]) -> None:
        assert sh(make_limited(cpu="500m"), "echo ran") == "ran\n"

    @requires(Capability.DISK_LIMIT)
    def test_a_disk_limit_holds(self, make_limited: Callable[..., Sandbox]) -> None:
        box = make_limited(disk="64Mi")
        result = box.exec(["sh", "-c", "head -c 200000000 /dev/zero > /opt/fill"]).result(ANSWER_SECONDS)
        assert result.returncode != 0
        assert box.stat("/opt/fill").result(ANSWER_SECONDS).size < 64 * 1024 * 1024
        assert sh(box, "rm /opt/fill && echo room > /opt/small && cat /opt/small") == "room\n"


def _log_from_elsewhere(provider: Provider, sandbox_id: str | None) -> bytes:
    """As another process reads it, which has the account and the sandbox's id."""

    async def read() -> bytes:
        other = type(provider).connect({**os.environ, **provider.credentials()})
        assert isinstance(other, Logs)
        assert sandbox_id is not None
        try:
            reading = other.logs(sandbox_id, follow=False, tail_lines=None)
            return b"".join([data async for data in reading])
        finally:
            await other.aclose()

    return engine().run(read(), ANSWER_SECONDS)
