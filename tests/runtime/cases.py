"""What every runtime must do, as classes that a provider's module runs on its own runtime (fixture `runtime`)."""

from __future__ import annotations

import secrets
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxFailedError, SandboxNotFoundError
from lowtide.runtime.actions import ErrorObservation, ListObservation, RunObservation
from lowtide.runtime.base import Runtime, new_sid, session_tag
from lowtide.runtime.served import Served

ANSWER_SECONDS = 120.0


class Shell:
    """One session of its own, so that tests share a sandbox and nothing else."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.session = runtime, f"t{secrets.token_hex(4)}"

    def __call__(self, command: str, **keywords: Any) -> RunObservation | ErrorObservation:
        keywords.setdefault("no_change_timeout", 60.0)
        return self.runtime.run_command(command, session=self.session, **keywords).result(ANSWER_SECONDS)

    def until(self, text: str, seen: str = "") -> str:
        """Read on until the command has said that."""
        for _ in range(100):
            if text in seen:
                return seen
            seen += self("", no_change_timeout=0.3).content
        pytest.fail(f"it never said {text!r}: {seen!r}")


@pytest.fixture
def shell(runtime: Runtime) -> Shell:
    return Shell(runtime)


class ShellCases:
    """A persistent bash, as agents use it."""

    def test_exit_code_output_directory_and_duration_are_told(self, shell: Shell) -> None:
        seen = shell("cd /tmp && echo out && echo err >&2 && (exit 7)")
        assert seen.content == "out\nerr\n"
        assert seen.exit_code == 7
        assert isinstance(seen, RunObservation)
        assert seen.metadata.working_dir == "/tmp"
        assert 0 <= seen.metadata.duration_seconds < 60

    def test_a_command_that_does_not_exist_is_127(self, shell: Shell) -> None:
        seen = shell("nonexistent_command")
        assert seen.exit_code == 127
        assert "command not found" in seen.content

    def test_state_persists(self, shell: Shell) -> None:
        shell(
            "mkdir -p /tmp/deep && cd /tmp/deep; NAME='a \"b\"'; export UP=1; f() { echo f:$1; }; alias ll='echo al'"
        )
        assert shell('pwd; echo "$NAME $UP"; f x').content == '/tmp/deep\na "b" 1\nf:x\n'

    def test_the_last_exit_code_is_there_for_the_next_command(self, shell: Shell) -> None:
        shell("(exit 9)")
        assert shell("echo $?").content == "9\n"

    def test_variables_are_added_exactly(self, runtime: Runtime, shell: Shell) -> None:
        value = "abc\"def'$HOME\nline \\ `x`"
        runtime.add_env_vars({"QUUX": value}, session=shell.session).result(ANSWER_SECONDS)
        assert shell('printf %s "$QUUX"').content == value
        assert shell("bash -c 'printf %s \"$QUUX\"'").content == value

    @pytest.mark.parametrize(
        ("command", "output"),
        [
            ('echo \\\n -e "foo"', "foo\n"),
            ("cat <<EOF\nhello $((1+1))\n  'quoted' \"too\"\nEOF", "hello 2\n  'quoted' \"too\"\n"),
            ("cat <<'A'; cat <<'B'\n$x\nA\n`y`\nB", "$x\n`y`\n"),
            ("for i in 1 2; do\n  for j in a b\n  do echo $i$j\n  done\ndone", "1a\n1b\n2a\n2b\n"),
            ("i=0; while [ $i -lt 3 ]; do i=$((i+1)); echo $i; done", "1\n2\n3\n"),
            ("echo 'one'\necho \"two\n  three\"\n\n# a comment\necho four", "one\ntwo\n  three\nfour\n"),
            ("echo \"a!b\" 'c!!d'", "a!b c!!d\n"),
            ('bash -c "echo \\"it\'s\\" \'x\'"', "it's x\n"),
            ("printf '%s' no-newline", "no-newline"),
            ("echo äöü ✓", "äöü ✓\n"),
        ],
    )
    def test_text_reaches_bash_as_it_is(self, shell: Shell, command: str, output: str) -> None:
        seen = shell(command)
        assert (seen.content, seen.exit_code) == (output, 0)

    def test_find_with_an_escaped_semicolon(self, shell: Shell) -> None:
        shell("mkdir -p /tmp/fnd && echo needle >/tmp/fnd/a.txt")
        seen = shell("find /tmp/fnd -name '*.txt' -exec grep -l needle {} \\;")
        assert (seen.content, seen.exit_code) == ("/tmp/fnd/a.txt\n", 0)

    def test_a_syntax_error_is_told_and_the_shell_goes_on(self, shell: Shell) -> None:
        seen = shell("echo 'unbalanced")
        assert seen.exit_code == 2
        assert "unexpected EOF" in seen.content
        assert shell("if true; then").exit_code != 0
        assert shell("echo fine").content == "fine\n"

    def test_strict_mode_ends_the_command_and_not_the_session(self, shell: Shell) -> None:
        assert shell("x=kept; set -euo pipefail").exit_code == 0
        seen = shell("false; echo not reached")
        assert (seen.content, seen.exit_code) == ("", 1)
        seen = shell("echo $undefined; echo not reached")
        assert seen.exit_code != 0
        assert "not reached" not in seen.content
        assert shell("false | true; echo not reached").exit_code == 1
        assert shell("set +euo pipefail; echo $x").content == "kept\n"

    def test_exit_is_answered_and_the_state_goes_on(self, shell: Shell) -> None:
        shell("x=5; f() { echo f$x; }; cd /usr")
        seen = shell("echo bye; exit 42")
        assert (seen.content, seen.exit_code) == ("bye\n", 42)
        assert shell("f; pwd").content == "f5\n/usr\n"
        assert shell("(exit 3); exit").exit_code == 3
        assert shell("f").content == "f5\n"

    def test_a_replaced_or_killed_shell_is_said_and_a_new_one_starts_there(self, shell: Shell) -> None:
        shell("cd /usr")
        seen = shell("exec sh -c 'echo replaced; exit 4'")
        assert (seen.content, seen.exit_code) == ("replaced\n", 4)
        assert "new one starts in /usr" in seen.metadata.suffix
        assert shell("kill -9 $$").exit_code == 137
        assert shell("pwd").content == "/usr\n"

    def test_a_prompt_is_answered(self, shell: Shell) -> None:
        seen = shell('read -p "Enter name: " name && echo "Hello $name"', no_change_timeout=0.5)
        assert (seen.content, seen.exit_code) == ("Enter name: ", -1)
        seen = shell("John", is_input=True)
        assert (seen.content, seen.exit_code) == ("Hello John\n", 0)

    def test_input_that_nobody_reads_is_never_a_command(self, shell: Shell) -> None:
        shell("sleep 1.5", no_change_timeout=0.3)
        seen = shell("echo should not run\necho neither", is_input=True)
        assert (seen.content, seen.exit_code) == ("", 0)
        assert shell("echo next").content == "next\n"

    def test_python_asks_twice(self, shell: Shell) -> None:
        asked = shell(
            'python3 -c \'a = input("A? "); b = input("B? "); print(a + b)\'', no_change_timeout=1.0
        )
        shell.until("A? ", asked.content)
        asked = shell("x", is_input=True, no_change_timeout=1.0)
        shell.until("B? ", asked.content)
        seen = shell("y", is_input=True)
        assert seen.content.endswith("xy\n")
        assert seen.exit_code == 0

    def test_input_without_a_running_command_is_refused(self, shell: Shell) -> None:
        seen = shell("echo run anyway", is_input=True)
        assert isinstance(seen, ErrorObservation)
        assert "no command is running" in seen.content
        assert isinstance(shell(""), ErrorObservation)

    def test_a_new_command_waits_for_the_old_one_to_be_ended(self, shell: Shell) -> None:
        assert shell("sleep 100", timeout=0.5).exit_code == -1
        seen = shell("echo second")
        assert seen.exit_code == -1
        assert seen.content == ""
        assert "previous command is still running" in seen.metadata.suffix
        assert shell("C-c").exit_code == 130
        assert shell("echo third").content == "third\n"

    def test_ctrl_c_ends_a_loop_and_all_behind_it(self, shell: Shell) -> None:
        assert shell("while true; do sleep 0.1; done; echo behind", no_change_timeout=0.4).exit_code == -1
        seen = shell("C-c", is_input=True)
        assert seen.exit_code == 130
        assert "behind" not in seen.content

    def test_ctrl_d_and_ctrl_z(self, shell: Shell) -> None:
        assert shell("cat", no_change_timeout=0.4).exit_code == -1
        assert "back" in shell.until("back", shell("back", is_input=True, no_change_timeout=0.5).content)
        assert shell("C-d", is_input=True).exit_code == 0
        assert shell("sleep 100", no_change_timeout=0.4).exit_code == -1
        seen = shell("C-z", is_input=True)
        assert seen.exit_code == 148
        assert "Stopped" in seen.content
        assert shell("kill %1; jobs >/dev/null; echo ok").content.endswith("ok\n")

    def test_output_goes_on_piece_by_piece_each_once(self, shell: Shell) -> None:
        seen = shell("for i in 1 2 3; do echo part$i; sleep 0.7; done", timeout=0.4)
        assert seen.exit_code == -1
        content = seen.content
        for _ in range(40):
            seen = shell("", timeout=0.4)
            content += seen.content
            if seen.exit_code != -1:
                break
        assert (content, seen.exit_code) == ("part1\npart2\npart3\n", 0)

    def test_a_background_job_returns_at_once_and_lives_on(self, shell: Shell) -> None:
        began = time.monotonic()
        seen = shell("sleep 30 & echo pid:$!")
        assert seen.exit_code == 0
        assert time.monotonic() - began < 25
        assert shell("kill -0 $! && echo alive").content == "alive\n"
        shell("kill $!; wait $! 2>/dev/null")

    def test_long_output_keeps_its_beginning_and_end(self, shell: Shell) -> None:
        seen = shell("for i in $(seq 1 5000); do echo Line $i; done")
        assert seen.content.startswith("Line 1\n")
        assert seen.content.endswith("Line 5000\n")
        assert seen.content.count("\n") == 5000
        seen = shell("for i in $(seq 1 50000); do echo Line $i; done")
        assert seen.exit_code == 0
        assert "bytes of output left out here" in seen.content
        assert seen.metadata.dropped_bytes > 0
        assert all(f"Line {n}\n" in seen.content for n in (1, 40000, 45000, 50000))

    def test_binary_noise_is_survived(self, shell: Shell) -> None:
        seen = shell("head -c 200000 /dev/urandom; printf '\\036\\037\\033[2J'")
        assert seen.exit_code == 0
        assert shell("echo clean").content == "clean\n"

    def test_a_full_screen_program_is_left_and_the_terminal_is_sane(self, shell: Shell) -> None:
        full = "import curses, time; s = curses.initscr(); curses.raw(); s.getch()"
        assert shell(f"TERM=xterm python3 -c '{full}'", no_change_timeout=2.0).exit_code == -1
        seen = shell("q", is_input=True)
        assert seen.exit_code == 0
        assert shell("read -t 20 line; echo got:$line", no_change_timeout=0.4).exit_code == -1
        assert shell("typed", is_input=True).content == "got:typed\n"

    def test_no_pager_waits(self, shell: Shell) -> None:
        seen = shell("seq 500 | ${PAGER:-less} | tail -1", timeout=30)
        assert (seen.content, seen.exit_code) == ("500\n", 0)

    def test_sessions_run_beside_each_other(self, runtime: Runtime) -> None:
        names = [f"p{secrets.token_hex(4)}" for _ in range(3)]
        for name in names:
            runtime.run_command(f"me={name}", session=name).result(ANSWER_SECONDS)
        began = time.monotonic()
        running = [runtime.run_command("sleep 2; echo $me", session=name) for name in names]
        assert [one.result(ANSWER_SECONDS).content for one in running] == [f"{name}\n" for name in names]
        assert time.monotonic() - began < 6 + 30

    def test_a_one_off_stands_beside_a_busy_session(self, shell: Shell) -> None:
        shell("cd /usr")
        shell("sleep 100", timeout=0.4)
        seen = shell("pwd; x=1; exit 3", is_static=True)
        assert (seen.content, seen.exit_code) == ("/usr\n", 3)
        shell("C-c")
        ended = shell("echo begun; sleep 100", is_static=True, timeout=1.0)
        assert ended.exit_code == -1
        assert ended.content == "begun\n"

    def test_cwd_of_one_command(self, shell: Shell) -> None:
        assert shell("pwd", cwd="/usr").content == "/usr\n"

    def test_output_is_streamed_as_it_appears(self, runtime: Runtime, shell: Shell) -> None:
        came: list[tuple[float, str]] = []
        seen = shell(
            "echo first; sleep 1; echo second",
            on_output=lambda piece: came.append((time.monotonic(), piece)),
        )
        assert "".join(piece for _, piece in came) == seen.content == "first\nsecond\n"
        assert came[-1][0] - came[0][0] > 0.5

    def test_cancel_ends_what_ignores_ctrl_c(self, runtime: Runtime, shell: Shell) -> None:
        running = runtime.run_command(
            "trap '' INT; echo up; sleep 1000", session=shell.session, no_change_timeout=600.0, timeout=600.0
        )
        time.sleep(0.5)
        assert runtime.cancel(shell.session, grace_seconds=0.5).result(ANSWER_SECONDS) is True
        assert running.result(ANSWER_SECONDS).exit_code != 0
        assert shell("echo again").content == "again\n"
        assert runtime.cancel(shell.session).result(ANSWER_SECONDS) is False


class FileCases:
    """Reading, writing, editing, moving files."""

    @pytest.fixture
    def folder(self, runtime: Runtime) -> str:
        path = f"/tmp/files-{secrets.token_hex(4)}"
        runtime.run_command(f"mkdir {path}").result(ANSWER_SECONDS)
        return path

    def test_write_and_read(self, runtime: Runtime, folder: str) -> None:
        path = f"{folder}/new/dir/ä file.txt"
        text = "one\ntwo ✓\nthree"
        assert runtime.write(path, text).result(ANSWER_SECONDS).success
        assert runtime.read(path).result(ANSWER_SECONDS).content == text
        assert runtime.read(path, start=1, end=2).result(ANSWER_SECONDS).content == "two ✓\n"
        runtime.write(path, "2\n", start=1, end=2).result(ANSWER_SECONDS)
        assert runtime.read(path).result(ANSWER_SECONDS).content == "one\n2\nthree"

    def test_a_missing_file_is_an_observation(self, runtime: Runtime, folder: str) -> None:
        seen = runtime.read(f"{folder}/missing").result(ANSWER_SECONDS)
        assert isinstance(seen, ErrorObservation)
        assert seen.error_id == "not-found"

    def test_a_picture_the_home_and_a_directory(self, runtime: Runtime, folder: str) -> None:
        made = f"printf 'P\\0' >{folder}/p.png; echo here >~/h.txt; touch {folder}/f"
        runtime.run_command(made).result(ANSWER_SECONDS)
        assert runtime.read(f"{folder}/p.png").result(ANSWER_SECONDS).content == "data:image/png;base64,UAA="
        assert runtime.read("~/h.txt").result(ANSWER_SECONDS).content == "here\n"
        assert runtime.edit("view", folder).result(ANSWER_SECONDS).content == "f\np.png"

    def test_edits(self, runtime: Runtime, folder: str) -> None:
        path = f"{folder}/e.py"
        assert runtime.edit("create", path, file_text="a = 1\nb = 2\n").result(ANSWER_SECONDS).success
        again = runtime.edit("create", path, file_text="x").result(ANSWER_SECONDS)
        assert isinstance(again, ErrorObservation)
        seen = runtime.edit("str_replace", path, old_str="a = 1", new_str="a = 10").result(ANSWER_SECONDS)
        assert "     1\ta = 10" in seen.content
        runtime.edit("insert", path, insert_line=1, new_str="# here").result(ANSWER_SECONDS)
        assert runtime.read(path).result(ANSWER_SECONDS).content == "a = 10\n# here\nb = 2\n"
        assert (
            "     2\t# here" in runtime.edit("view", path, view_range=[2, 2]).result(ANSWER_SECONDS).content
        )
        runtime.edit("undo_edit", path).result(ANSWER_SECONDS)
        assert runtime.read(path).result(ANSWER_SECONDS).content == "a = 10\nb = 2\n"

    def test_a_listing_has_directories_first(self, runtime: Runtime, folder: str) -> None:
        runtime.run_command(f"cd {folder} && mkdir zdir Adir && touch b.txt A.txt .hidden").result(
            ANSWER_SECONDS
        )
        seen = runtime.list_files(folder).result(ANSWER_SECONDS)
        assert isinstance(seen, ListObservation)
        assert seen.files == ("Adir/", "zdir/", ".hidden", "A.txt", "b.txt")

    def test_a_file_and_a_directory_go_up_and_come_down(
        self, runtime: Runtime, folder: str, tmp_path: Path
    ) -> None:
        source = tmp_path / "tree"
        (source / "sub").mkdir(parents=True)
        (source / "a.bin").write_bytes(bytes(range(256)) * 5000)
        (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "sub" / "run.sh").chmod(0o755)
        runtime.upload(source, f"{folder}/made/by/upload").result(ANSWER_SECONDS)
        runtime.upload(source / "a.bin", folder).result(ANSWER_SECONDS)
        ran = runtime.run_command(f"{folder}/made/by/upload/sub/run.sh; wc -c <{folder}/a.bin").result(
            ANSWER_SECONDS
        )
        assert ran.content.split() == ["ran", "1280000"]
        out = tmp_path / "out.zip"
        seen = runtime.download(f"{folder}/made/by/upload", out).result(ANSWER_SECONDS)
        assert seen.destination == str(out)  # type: ignore[attr-defined]
        with zipfile.ZipFile(out) as archive:
            assert sorted(archive.namelist()) == ["a.bin", "sub/run.sh"]
            assert archive.read("a.bin") == (source / "a.bin").read_bytes()

    def test_a_missing_source_creates_nothing(self, runtime: Runtime, folder: str, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            runtime.upload(tmp_path / "missing", f"{folder}/never").result(ANSWER_SECONDS)
        assert runtime.run_command(f"test -e {folder}/never").result(ANSWER_SECONDS).exit_code == 1


class ServedCases:
    """How it is connected and closed, where the action server is served inside a hosted sandbox."""

    kind: type[Runtime]
    scheme = "http"

    def there(self, sid: str) -> list[Sandbox]:
        return Sandbox.list(tags=[session_tag(sid)], provider=self.kind.provider).result(ANSWER_SECONDS)

    async def test_basic_use(self) -> None:
        runtime = self.kind(sid=new_sid())
        await runtime.connect()
        seen = await runtime.run_command("echo working")
        assert (seen.content, seen.exit_code) == ("working\n", 0)
        await runtime.aclose()
        assert await Sandbox.list(tags=[session_tag(runtime.sid)], provider=self.kind.provider) == []

    def test_error_safe_clean_up(self) -> None:
        with pytest.raises(ZeroDivisionError), self.kind() as runtime:
            runtime.run_command("true").result(ANSWER_SECONDS)
            raise ZeroDivisionError
        assert self.there(runtime.sid) == []
        runtime.close()

    def test_a_failed_connect_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(self: Served) -> None:
            raise SandboxFailedError("no", reason="test")

        monkeypatch.setattr(Served, "_reach", fail)
        runtime = self.kind()
        with pytest.raises(SandboxFailedError):
            runtime.connect().result(ANSWER_SECONDS)
        assert self.there(runtime.sid) == []

    def test_nothing_to_attach_to(self) -> None:
        with pytest.raises(SandboxNotFoundError):
            self.kind(sid=new_sid(), attach_to_existing=True).connect().result(ANSWER_SECONDS)

    def test_the_server_has_an_address(self, runtime: Runtime) -> None:
        assert runtime.server_url().result(ANSWER_SECONDS).url.startswith(self.scheme)
