"""The shell's protocol against plain bash: whatever a command is made of, output and exit code are the same."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.runtime import LocalRuntime

ANSWER_SECONDS = 120.0

words = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FFF, blacklist_categories=("Cs", "Cc")), max_size=12
)
names = st.sampled_from(["a", "b", "x1", "_v"])
BROKEN = ["echo 'open quote", "if true; then", "echo )"]
"""bash itself counts a syntax error as 1 or 2, by what came before it and where the text came from."""


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


simple = st.one_of(
    st.builds(lambda word: f"echo {quoted(word)}", words),
    st.builds(lambda word: f"printf '%s' {quoted(word)}", words),
    st.builds(lambda name, word: f"{name}={quoted(word)}", names, words),
    st.builds(lambda name: f'echo "[${{{name}-unset}}]"', names),
    st.builds(lambda code: f"(exit {code})", st.integers(0, 255)),
    st.builds(lambda code: f"exit {code}", st.integers(0, 255)),
    st.builds(lambda word: f"cat <<'END'\n{word}\nEND", words.filter(lambda w: w.strip() != "END")),
    st.builds(lambda word: f'echo "$(echo {quoted(word)} | tr a-m n-z)"', words),
    st.sampled_from(
        [
            "echo $?",
            "set -e",
            "set +e",
            "set -u",
            "set -o pipefail",
            "false",
            "true",
            "false | true",
            "pwd",
            "cd /usr",
            "cd /nonexistent 2>/dev/null",
            "echo err >&2",
            "f() { echo f:$#; return 3; }",
            "f one 'two words' 2>/dev/null",
            *BROKEN,
            "if true; then echo yes; fi",
            "for i in 1 2 3; do echo $i; done",
            "printf '\\000\\001\\036\\037\\033[31m\\377'",
            "seq 1 300",
            "exec 3>&1; echo three >&3",
            "x=(1 2 3); echo ${#x[@]}",
            "trap 'echo trapped' USR1; kill -USR1 $$",
            "# only a comment",
            "unset HOME; echo ~root",
            "echo {a,b}{1,2}",
            "[[ abc =~ b(.) ]] && echo ${BASH_REMATCH[1]}",
        ]
    ),
)
scripts = st.lists(simple, min_size=1, max_size=5).map("\n".join)


@pytest.fixture(scope="module")
def runtime() -> Iterator[LocalRuntime]:
    with LocalRuntime() as made:
        yield made


def plain(script: str) -> tuple[str, int]:
    """What bash says to a pipe. Its error messages begin differently, so those of bash itself are not compared."""
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", f"cd /\n{script}"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"},
            check=False,
        )
        out.seek(0)
        return out.read().decode("utf-8", "replace"), done.returncode


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=scripts)
def test_a_script_does_what_plain_bash_does(runtime: LocalRuntime, script: str) -> None:
    # A session for each, because a script may change everything; errors to nowhere, as above.
    session = "fuzz"
    fresh = runtime.run_command("exec 2>/dev/null; unset a b x1 _v x f; cd /", session=session)
    fresh.result(ANSWER_SECONDS)
    seen = runtime.run_command(script, session=session, no_change_timeout=30).result(ANSWER_SECONDS)
    output, code = plain(script)
    try:
        if any(broken in script for broken in BROKEN):
            assert (seen.content, seen.exit_code != 0) == (output, code != 0)
        else:
            assert (seen.content, seen.exit_code) == (output, code)
        after = runtime.run_command("echo still here", session=session, timeout=30).result(ANSWER_SECONDS)
        assert (after.content, after.exit_code) == ("still here\n", 0)
    finally:
        _close(runtime, session)


def _close(runtime: LocalRuntime, session: str) -> None:
    from lowtide.operation import Operation
    from lowtide.runtime.served import Served

    assert isinstance(runtime._backend, Served)
    Operation.start(runtime._backend.client.close_session(session)).result(ANSWER_SECONDS)
