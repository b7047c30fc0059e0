"""`Sandbox.run_code` where the provider has no interpreter of its own: the same result type, by what the image has."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections.abc import Iterator

import pytest

from lowtide import Sandbox
from lowtide import code as code_module
from lowtide.errors import (
    CommandTimeoutError,
    SandboxError,
    SandboxGone,
    SandboxUnavailableError,
    UnsupportedError,
)
from lowtide.providers.optional import CodeResult
from tests.container_engine import IMAGE, needs_docker

SECONDS = 120.0


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox.run(provider="local") as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Sandbox]:
    """A Python without ipykernel: only the machine's own is on the path."""
    with Sandbox.run(provider="local", environment_variables={"PATH": "/usr/bin:/bin"}) as made:
        yield made


def test_state_is_kept_and_the_last_expression_is_the_result(box: Sandbox, plain: Sandbox) -> None:
    for one in (box, plain):
        one.run_code("x = 41").result(SECONDS)
        ran = one.run_code("import sys; print('out'); print('err', file=sys.stderr); x + 1").result(SECONDS)
        assert isinstance(ran, CodeResult)
        assert (ran.stdout, ran.results[0]["text/plain"], ran.error) == ("out\n", "42", None)
        assert "err\n" in ran.stderr


def test_contexts_are_apart(plain: Sandbox) -> None:
    plain.run_code("who = 'first'", context="a").result(SECONDS)
    ran = plain.run_code("who", context="b").result(SECONDS)
    assert ran.error is not None
    assert ran.error["name"] == "NameError"
    assert plain.run_code("who", context="a").result(SECONDS).results[0]["text/plain"] == "'first'"


def test_an_error_has_name_value_and_traceback(box: Sandbox, plain: Sandbox) -> None:
    for one in (box, plain):
        ran = one.run_code("def f():\n    return 1 / 0\nf()").result(SECONDS)
        assert ran.error is not None
        assert ran.error["name"] == "ZeroDivisionError"
        assert "division by zero" in ran.error["value"]
        assert "f()" in re.sub("\x1b\\[[0-9;]*m", "", ran.error["traceback"])


def test_rich_results(box: Sandbox, plain: Sandbox) -> None:
    code = "class Page:\n    def _repr_html_(self):\n        return '<b>x</b>'\nPage()"
    for one in (box, plain):
        assert one.run_code(code).result(SECONDS).results[0]["text/html"] == "<b>x</b>"


def test_what_child_processes_print_is_there(plain: Sandbox) -> None:
    ran = plain.run_code("import subprocess; subprocess.run(['echo', 'child']); None").result(SECONDS)
    assert ran.stdout == "child\n"


HOLDER = """
import glob, os, signal
[holder] = [int(path.split('/')[2]) for path in glob.glob('/proc/[0-9]*/cmdline')
            if open(path, 'rb').read().endswith(b'\\0interpret\\0')]
"""


def test_code_that_stops_what_holds_its_time_limit_is_given_up_all_the_same(
    plain: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_module, "_LATE_SECONDS", 1.0)
    plain.run_code(HOLDER).result(SECONDS)  # started, so that the time limit is for the code alone
    # It stops a moment after the signal: answered at once, it would still pass that on.
    stop = "os.kill(holder, signal.SIGSTOP); __import__('time').sleep(0.5)"
    with pytest.raises(CommandTimeoutError, match="did not answer"):
        plain.run_code(stop, timeout_seconds=5).result(SECONDS)
    assert plain.run_code("1 + 1").result(SECONDS).results[0]["text/plain"] == "2"


def test_code_that_speaks_for_its_interpreter_without_end_is_cut_off(
    plain: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_module, "_ANSWER_BYTES", 1 << 20)
    flood = "with open(f'/proc/{holder}/fd/1', 'wb') as out:\n    while True: out.write(b'x' * 65536)"
    with pytest.raises(SandboxUnavailableError, match="an answer over 1048576 bytes"):
        plain.run_code(f"{HOLDER}\n{flood}").result(30)
    assert plain.run_code("1 + 1").result(SECONDS).results[0]["text/plain"] == "2"


@pytest.mark.parametrize(
    "said",
    ["no json", "[]", '{"id": {}}', '{"id": N}', '{"id": N, "result": {"stdout": 5}}'],
    ids=["no json", "a list", "a number that is none", "without a result", "of another type"],
)
def test_code_that_speaks_for_its_interpreter_is_an_error_of_the_sandbox(
    plain: Sandbox, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = "".join(said.replace("N", str(number)) + "\n" for number in range(100))
    forged = f"open(f'/proc/{{__import__(\"os\").getppid()}}/fd/1', 'w').write({lines!r}); import time; time.sleep(9)"
    with pytest.raises(SandboxError, match=r"the interpreters ended|spoke for the interpreter"):
        plain.run_code(forged, context=said[:20]).result(SECONDS)
    gc.collect()
    assert not caplog.records, "a task's error that nobody asked for"


def test_code_in_a_sandbox_that_ends_is_told_that_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with Sandbox.run(provider="local", environment_variables={"PATH": "/usr/bin:/bin"}) as box:
        box.run_code("1").result(SECONDS)
        running = box.run_code("import time; time.sleep(100)")
        Sandbox.delete(str(box.sandbox_id), provider="local").result(SECONDS)
        with pytest.raises(SandboxGone):
            running.result(SECONDS)
    del running, box
    gc.collect()
    assert not caplog.records, "a task's error that nobody asked for"


def test_a_timeout_interrupts_and_keeps_the_state(plain: Sandbox) -> None:
    plain.run_code("kept = 1", context="slow").result(SECONDS)
    with pytest.raises(CommandTimeoutError, match="given up after 1 seconds"):
        plain.run_code("import time; time.sleep(100)", context="slow", timeout_seconds=1).result(SECONDS)
    assert plain.run_code("kept", context="slow").result(SECONDS).results[0]["text/plain"] == "1"


def test_cancelled_code_is_interrupted_and_what_waited_behind_it_never_runs(
    box: Sandbox, plain: Sandbox
) -> None:
    for one in (box, plain):
        one.run_code("import pathlib, time; y = 6").result(SECONDS)
        slow = one.run_code("pathlib.Path('/tmp/begun').touch(); time.sleep(1000)")
        while not one.exists("/tmp/begun").result(SECONDS):
            assert not slow.done()
        behind = one.run_code("y = 0")
        assert behind.cancel()
        assert slow.cancel()
        assert one.run_code("y * 7").result(SECONDS).results[0]["text/plain"] == "42"


def test_an_interpreter_that_ends_is_told_and_started_anew(plain: Sandbox) -> None:
    ran = plain.run_code("import os; os._exit(3)", context="gone").result(SECONDS)
    assert ran.error is not None
    assert "exit code 3" in ran.error["value"]
    assert plain.run_code("1 + 1", context="gone").result(SECONDS).results[0]["text/plain"] == "2"


def test_bash_keeps_its_state(plain: Sandbox) -> None:
    plain.run_code("cd /usr; n=5", language="bash").result(SECONDS)
    ran = plain.run_code("pwd; echo $n; echo err >&2; false", language="bash").result(SECONDS)
    assert (ran.stdout, ran.stderr) == ("/usr\n5\n", "err\n")
    assert ran.error is not None
    assert ran.error["value"] == "1"
    ended = plain.run_code("exit 7", language="bash").result(SECONDS)
    assert ended.error is not None
    assert ended.error["value"] == "7"


def test_javascript_where_the_image_has_node(plain: Sandbox) -> None:
    if plain.exec(["sh", "-c", "command -v node"]).result(SECONDS).returncode != 0:
        with pytest.raises(UnsupportedError, match="no node"):
            plain.run_code("1", language="javascript").result(SECONDS)
        return
    plain.run_code("const x = 20", language="javascript").result(SECONDS)
    ran = plain.run_code("console.log('said'); x + 1", language="javascript").result(SECONDS)
    assert (ran.stdout, ran.results[0]["text/plain"]) == ("said\n", "21")


def test_an_answer_that_would_fill_memory_when_parsed_is_refused(plain: Sandbox) -> None:
    forged = (
        "import os, time\n"
        "with open(f'/proc/{os.getppid()}/fd/1', 'wb') as out:\n"
        "    out.write(b'[' + b'[],' * (12 << 20) + b'[]]\\n')\n"
        "time.sleep(60)"
    )
    tracemalloc.start()
    try:
        with pytest.raises(SandboxUnavailableError, match="1024 MiB of memory"):
            plain.run_code(forged, context="forged").result(SECONDS)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    assert plain.run_code("1 + 1").result(SECONDS).results[0]["text/plain"] == "2"


def test_an_unknown_language_and_an_image_without_python_are_said(plain: Sandbox) -> None:
    with pytest.raises(UnsupportedError, match="known are"):
        plain.run_code("1", language="cobol").result(SECONDS)
    with (
        Sandbox.run(provider="local", environment_variables={"PATH": "/nonexistent"}) as bare,
        pytest.raises(UnsupportedError, match=r"Python 3\.9"),
    ):
        bare.run_code("1").result(SECONDS)


@pytest.mark.parametrize("place", [pytest.param("docker", marks=needs_docker)])
def test_on_an_engine(place: str) -> None:
    with Sandbox.run(provider=place, container_image=IMAGE) as box:
        box.run_code("x = 41").result(SECONDS)
        assert box.run_code("x + 1").result(SECONDS).results[0]["text/plain"] == "42"


def test_ipython_through_a_runtime_keeps_step_with_the_shell() -> None:
    from lowtide.runtime import LocalRuntime

    with LocalRuntime() as runtime:
        runtime.run_command("cd /usr").result(SECONDS)
        seen = runtime.run_ipython("import os; print(os.getcwd()); 6 * 7").result(SECONDS)
        assert seen.content == "/usr\n42"
        slow = runtime.run_ipython("import time; time.sleep(100)", timeout=1).result(SECONDS)
        assert "KeyboardInterrupt" in slow.content
        assert runtime.run_ipython("1 + 1").result(SECONDS).content == "2"
    with LocalRuntime(config={"environment_variables": {"PATH": "/usr/bin:/bin"}}) as runtime:
        missing = runtime.run_ipython("1").result(SECONDS)
        assert not missing.success
        assert "pip install ipykernel" in missing.content
