"""Conformance of exec: exit codes, arguments, environment, timeouts, signals, and what a command leaves."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from lowtide import Sandbox
from lowtide.errors import CommandTimeoutError, OutputLimitError, SandboxExecutionError, ValidationError
from lowtide.providers.base import Capability
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    ProviderUnderTest,
    commands_inside,
    duration_token,
    eventually,
    requires,
    sh,
)


class ExecConformance(Conformance):
    @pytest.mark.parametrize("code", [0, 1, 42, 255])
    def test_exit_code_is_the_commands_own(self, box: Sandbox, code: int) -> None:
        result = box.exec(["sh", "-c", f"exit {code}"]).result(ANSWER_SECONDS)
        assert result.returncode == code
        assert list(result.command) == ["sh", "-c", f"exit {code}"]

    def test_death_by_signal_is_128_plus_its_number(self, box: Sandbox) -> None:
        assert box.exec(["sh", "-c", "kill -9 $$"]).result(ANSWER_SECONDS).returncode == 137

    def test_a_command_that_does_not_exist_is_127_with_a_word_on_stderr(self, box: Sandbox) -> None:
        result = box.exec(["/no/such/program"]).result(ANSWER_SECONDS)
        assert result.returncode == 127
        assert result.stderr

    def test_a_command_that_is_not_executable_is_126_with_a_word_on_stderr(
        self, box: Sandbox, place: str
    ) -> None:
        box.write_file(f"{place}/plain", b"just text").result(ANSWER_SECONDS)
        sh(box, f"chmod 644 {place}/plain")
        result = box.exec([f"{place}/plain"]).result(ANSWER_SECONDS)
        assert result.returncode == 126
        assert result.stderr

    def test_check_turns_a_failing_exit_code_into_an_error_with_the_result(self, box: Sandbox) -> None:
        with pytest.raises(SandboxExecutionError) as caught:
            box.exec(["sh", "-c", "echo out; echo err >&2; exit 7"], check=True).result(ANSWER_SECONDS)
        assert caught.value.result is not None
        assert caught.value.result.returncode == 7
        assert caught.value.result.stdout == "out\n"
        assert caught.value.result.stderr == "err\n"
        assert caught.value.sandbox_id == box.sandbox_id

    def test_arguments_arrive_untouched(self, box: Sandbox) -> None:
        odd = [
            "",
            " ",
            "two words",
            "$HOME",
            "`id`",
            "*",
            "a'b",
            'a"b',
            "a\\b",
            "line\nbreak",
            "ü→",
            "-n",
            "--",
            ";",
            "&",
        ]
        result = box.exec(["printf", "%s\\0", *odd]).result(ANSWER_SECONDS)
        assert result.stdout_bytes.decode().split("\0")[:-1] == odd

    def test_two_thousand_arguments(self, box: Sandbox) -> None:
        result = box.exec(["sh", "-c", "echo $#", "sh", *(["x" * 40] * 2000)]).result(ANSWER_SECONDS)
        assert result.stdout == "2000\n"

    @pytest.mark.parametrize(
        "command", ["ls -l", [], ["a\0b"], [1]], ids=["string", "empty", "nul", "number"]
    )
    def test_a_command_that_is_no_list_of_strings_is_refused(self, box: Sandbox, command: object) -> None:
        with pytest.raises(ValidationError) as caught:
            box.exec(command)  # type: ignore[arg-type]
        assert caught.value.argument == "command"

    def test_cwd_is_where_the_command_runs(self, box: Sandbox, place: str) -> None:
        box.make_dir(f"{place}/with space").result(ANSWER_SECONDS)
        assert sh(box, "pwd", cwd=f"{place}/with space") == f"{place}/with space\n"

    def test_a_cwd_that_does_not_exist_runs_nothing(self, box: Sandbox) -> None:
        result = box.exec(["echo", "ran"], cwd="/no/such/place").result(ANSWER_SECONDS)
        assert result.returncode == 126
        assert "ran" not in result.stdout
        assert result.stderr

    def test_a_relative_cwd_is_refused(self, box: Sandbox) -> None:
        with pytest.raises(ValidationError) as caught:
            box.exec(["pwd"], cwd="tmp")
        assert caught.value.argument == "cwd"

    def test_env_comes_on_top_of_the_sandboxs_own(self, make_sandbox: Callable[..., Sandbox]) -> None:
        box = make_sandbox(environment_variables={"ONE": "1", "TWO": "2"})
        odd = "a b\n\"c\" 'd' $HOME ü"
        script = 'printf "%s|%s|%s|%s" "$ONE" "$TWO" "$ODD" "${EMPTY-unset}"'
        assert sh(box, script) == "1|2||unset"
        assert sh(box, script, env={"TWO": "zwei", "ODD": odd, "EMPTY": ""}) == f"1|zwei|{odd}|"
        assert sh(box, 'test -n "$PATH" && command -v sh >/dev/null && echo ok', env={"X": "y"}) == "ok\n"

    @pytest.mark.parametrize("name", ["", "A=B", "A\0B"], ids=["empty", "equals", "nul"])
    def test_a_bad_environment_name_is_refused(self, box: Sandbox, name: str) -> None:
        with pytest.raises(ValidationError) as caught:
            box.exec(["env"], env={name: "x"})
        assert caught.value.argument == "env"

    @requires(Capability.USER)
    def test_exec_as_another_user(self, box: Sandbox) -> None:
        try:
            result = box.exec(["id", "-u"], user="1000").result(ANSWER_SECONDS)
        except ValidationError as error:
            assert error.argument == "user"
            pytest.skip(f"refused clearly: {error}")
        if result.returncode == 126 and result.stderr:
            pytest.skip(f"refused clearly: {result.stderr.strip()}")
        assert result.stdout == "1000\n"

    @requires(Capability.USER)
    def test_no_such_user_is_an_error_and_a_file_that_cannot_be_executed_is_126(self, box: Sandbox) -> None:
        with pytest.raises(ValidationError) as caught:
            box.exec(["id"], user="no-such-user").result(ANSWER_SECONDS)
        assert caught.value.argument == "user"
        assert box.exec(["/etc/passwd"]).result(ANSWER_SECONDS).returncode == 126

    def test_timeout_ends_the_whole_tree_and_keeps_what_was_printed(
        self, box: Sandbox, provider_under_test: ProviderUnderTest
    ) -> None:
        token = duration_token()
        script = f"echo begun; echo oops >&2; sh -c 'sleep {token}; true' & sleep {token}"
        with pytest.raises(CommandTimeoutError) as caught:
            box.exec(["sh", "-c", script], timeout_seconds=provider_under_test.timeout_seconds).result(
                ANSWER_SECONDS
            )
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.result is not None
        assert caught.value.result.stdout == "begun\n"
        # A shell that outlives its child by a moment may add a line about it.
        assert caught.value.result.stderr.startswith("oops\n")
        assert token not in commands_inside(box)

    @pytest.mark.parametrize(
        "escape",
        [
            "setsid sleep {token} &",
            "(setsid sh -c 'sleep {token} & wait' >/dev/null 2>&1 &) ",
            "(trap '' TERM HUP INT; setsid sleep {token} </dev/null >/dev/null 2>&1 &) ",
            "(env -i setsid sleep {token} </dev/null >/dev/null 2>&1 &) ",
        ],
        ids=["own-session", "double-fork", "deaf-to-TERM", "no-environment"],
    )
    def test_timeout_ends_what_left_the_session(
        self, box: Sandbox, escape: str, provider_under_test: ProviderUnderTest
    ) -> None:
        token = duration_token()
        # `exec` puts the parent out of the way: what was started is nobody's child when the time is up.
        script = escape.format(token=token) + f"\necho begun; exec sleep {token}"
        with pytest.raises(CommandTimeoutError) as caught:
            box.exec(["sh", "-c", script], timeout_seconds=provider_under_test.timeout_seconds).result(
                ANSWER_SECONDS
            )
        assert caught.value.result is not None
        assert caught.value.result.stdout == "begun\n"
        assert token not in commands_inside(box)

    def test_timeout_ends_a_command_that_ignores_term(
        self, box: Sandbox, provider_under_test: ProviderUnderTest
    ) -> None:
        token = duration_token()
        script = f"trap '' TERM; while :; do sleep {token}; done"
        with pytest.raises(CommandTimeoutError):
            box.exec(["sh", "-c", script], timeout_seconds=provider_under_test.timeout_seconds).result(
                ANSWER_SECONDS
            )
        assert token not in commands_inside(box)

    def test_timeout_leaves_other_commands_alone(
        self, box: Sandbox, provider_under_test: ProviderUnderTest
    ) -> None:
        bystander = box.exec(["sh", "-c", "echo here; cat"], stdin=True)
        next(iter(bystander.stdout))
        with pytest.raises(CommandTimeoutError):
            box.exec(["sleep", "1000"], timeout_seconds=provider_under_test.timeout_seconds).result(
                ANSWER_SECONDS
            )
        assert bystander.poll() is None
        assert bystander.stdin is not None
        bystander.stdin.close().result(ANSWER_SECONDS)
        assert bystander.result(ANSWER_SECONDS).returncode == 0

    def test_a_command_within_its_timeout_is_not_touched(self, box: Sandbox) -> None:
        assert (
            box.exec(["sh", "-c", "sleep 0.2; echo ok"], timeout_seconds=60).result(ANSWER_SECONDS).stdout
            == "ok\n"
        )

    def test_a_waiting_limit_is_not_a_command_timeout(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", "read line; echo got $line"], stdin=True)
        with pytest.raises(TimeoutError):
            process.result(timeout=0.2)
        assert process.stdin is not None
        process.stdin.writeline("it").result(ANSWER_SECONDS)
        assert process.result(ANSWER_SECONDS).stdout == "got it\n"

    def test_cancel_ends_the_tree(self, box: Sandbox) -> None:
        token = duration_token()
        process = box.exec(["sh", "-c", f"(setsid sleep {token} &); echo up; sleep {token}"])
        next(iter(process.stdout))
        assert process.cancel()
        eventually(lambda: token not in commands_inside(box), what="the end of the cancelled tree")

    def test_a_background_job_that_holds_stdout_does_not_hold_the_call(self, box: Sandbox) -> None:
        token = duration_token()
        result = box.exec(["sh", "-c", f"sleep {token} & head -c 300000 /dev/zero"]).result(ANSWER_SECONDS)
        assert result.returncode == 0
        assert len(result.stdout_bytes) == 300_000
        assert token in commands_inside(box), "the background job belongs to the sandbox and goes on"

    def test_more_output_than_allowed_ends_the_tree(self, box: Sandbox) -> None:
        token = duration_token()
        process = box.exec(["sh", "-c", f"sleep {token} & yes {token}"], max_output_bytes=100_000)
        with pytest.raises(OutputLimitError) as caught:
            process.result(ANSWER_SECONDS)
        assert caught.value.result is not None
        assert 0 < len(caught.value.result.stdout_bytes) <= 100_000
        assert token not in commands_inside(box)

    @requires(Capability.SIGNALS)
    def test_a_signal_reaches_the_command(self, box: Sandbox) -> None:
        process = box.exec(
            ["sh", "-c", "trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.1; done"]
        )
        chunks = iter(process.stdout)
        assert "ready" in next(chunks)
        process.send_signal(signal.SIGUSR1)
        result = process.result(ANSWER_SECONDS)
        assert result.returncode == 5
        assert result.stdout == "ready\ncaught\n"

    @requires(Capability.SIGNALS)
    def test_kill_ends_what_ignores_everything_else(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", "trap '' TERM INT HUP; echo ready; while :; do sleep 0.1; done"])
        next(iter(process.stdout))
        process.kill()
        assert process.wait(ANSWER_SECONDS) == 137

    @requires(Capability.SIGNALS)
    def test_terminate_is_term(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", "echo ready; exec sleep 1000"])
        next(iter(process.stdout))
        process.terminate()
        assert process.wait(ANSWER_SECONDS) == 143

    @requires(Capability.SIGNALS)
    def test_a_signal_to_a_command_that_has_ended_is_silent(self, box: Sandbox) -> None:
        process = box.exec(["true"])
        process.result(ANSWER_SECONDS)
        process.send_signal(signal.SIGTERM)
        process.kill()
        assert process.returncode == 0

    def test_poll_returncode_and_wait_agree(self, box: Sandbox) -> None:
        process = box.exec(["sh", "-c", "read line; exit 9"], stdin=True)
        assert process.poll() is None
        assert process.returncode is None
        assert process.stdin is not None
        process.stdin.writeline("go").result(ANSWER_SECONDS)
        assert process.wait(ANSWER_SECONDS) == 9
        assert process.poll() == process.returncode == 9
        assert process.done()

    def test_a_command_that_closed_its_streams_is_still_waited_for(self, box: Sandbox) -> None:
        result = box.exec(["sh", "-c", "exec 1>&- 2>&-; sleep 0.5; exit 3"]).result(ANSWER_SECONDS)
        assert result.returncode == 3

    def test_thirty_commands_at_once(self, box: Sandbox) -> None:
        running = [box.exec(["sh", "-c", f"sleep 0.2; echo {n}; exit {n}"]) for n in range(30)]
        finished = [process.result(ANSWER_SECONDS) for process in running]
        assert [r.returncode for r in finished] == list(range(30))
        assert [r.stdout for r in finished] == [f"{n}\n" for n in range(30)]

    def test_orphans_are_reaped(self, box: Sandbox) -> None:
        # Each writes its number down, so that it is known whom to look for, and then dies without a parent.
        sh(box, "for i in 1 2 3 4 5 6 7 8; do (sh -c 'echo $$ >>/tmp/orphans; exec sleep 0.2' &) ; done")
        eventually(lambda: sh(box, "wc -l </tmp/orphans").strip() == "8", what="the start of all orphans")
        # One may end between two looks, so a file that is gone says nothing; that there is a /proc is asked first.
        script = "cat /proc/self/stat >/dev/null || exit 1; for pid in $(cat /tmp/orphans); do cat /proc/$pid/stat; done 2>/dev/null; :"
        eventually(lambda: sh(box, script) == "", what="the end of all orphans: none asleep, none a zombie")
