"""Every public parameter refuses what it cannot take, by name and before anything happens. No provider is asked."""

from __future__ import annotations

import asyncio
import copy
import errno
import inspect
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import lowtide
from lowtide import Operation, Sandbox, SandboxDefaults, SandboxFileError, Session, ValidationError
from lowtide.process import Process, TerminalSession
from lowtide.providers.base import ProcessSpec
from lowtide.stream import StreamWriter

NUMBERS = ["x", True, math.nan, -1, [], 10**400]
SECONDS = [*NUMBERS, 0, math.inf]
GRACES = [*NUMBERS, math.inf]
TIMEOUTS = ["x", True, math.nan, -1, []]
TEXTS = ["", 5, b"x", "a\0b", "\ud800", None]
PATHS = TEXTS
FLAGS = ["x", 1, None]
CELLS = ["x", True, 0, -1, 1.5, 100_000, None]
SIGNALS = ["x", True, 0, -1, 99, None]
MODES = ["x", True, -1, 0o10000, 1.5]
SIZES = ["x", True, -1, 1.5, math.nan]
MOST = [*SIZES, 0]
COMMANDS = ["ls -l", [], [""], [5], ["a\0b"], ["\ud800"], None, {"a": 1}]
ENVIRONMENTS = ["x", {"1": "a"}, {"a": 1}, {"a": "\0"}, {"a": "\ud800"}, []]
STDINS = [5, "\ud800", {"a": 1}, object()]
DATA = [5, None, "\ud800"]
CHUNKS = [5, None, "text"]
TAGS = ["x", ["a b"], [5], ["a", "a"]]
PROVIDERS = ["no-such-provider", 5]

# (owner, method): parameter -> what it refuses. What stands before it in the call is `GIVEN`.
TABLE: dict[tuple[str, str], dict[str, list[Any]]] = {
    ("Sandbox", "exec"): {
        "command": COMMANDS, "cwd": ["relative", *TEXTS[:-1]], "env": ENVIRONMENTS, "stdin": STDINS, "check": FLAGS,
        "timeout_seconds": SECONDS, "tty": FLAGS, "user": TEXTS[:-1], "max_output_bytes": MOST, "capture": FLAGS,
        "drain_seconds": GRACES,
    },
    ("Sandbox", "shell"): {
        "command": COMMANDS[:-2], "width": CELLS[:-1], "height": CELLS[:-1], "cwd": ["relative"], "env": ENVIRONMENTS,
    },
    ("Sandbox", "run_code"): {
        "code": DATA, "language": TEXTS, "context": TEXTS[:-1], "timeout_seconds": SECONDS,
    },
    ("Sandbox", "read_file"): {"path": PATHS, "max_bytes": MOST, "timeout_seconds": SECONDS},
    ("Sandbox", "write_file"): {"path": PATHS, "data": DATA, "mode": MODES, "timeout_seconds": SECONDS},
    ("Sandbox", "read_file_streaming"): {"path": PATHS},
    ("Sandbox", "write_file_streaming"): {"path": PATHS, "data": CHUNKS, "size": SIZES, "mode": MODES},
    ("Sandbox", "upload"): {"local": PATHS, "remote": PATHS},
    ("Sandbox", "download"): {"remote": PATHS, "local": PATHS, "max_bytes": MOST},
    ("Sandbox", "denied_connections"): {},
    ("Sandbox", "list_dir"): {"path": PATHS},
    ("Sandbox", "make_dir"): {"path": PATHS},
    ("Sandbox", "remove"): {"path": PATHS, "recursive": FLAGS},
    ("Sandbox", "exists"): {"path": PATHS},
    ("Sandbox", "stat"): {"path": PATHS},
    ("Sandbox", "url"): {"port": ["x", 0, -1, 65_536, True, None]},
    ("Sandbox", "snapshot"): {"name": ["", "a b", 5]},
    ("Sandbox", "wait"): {"timeout": TIMEOUTS},
    ("Sandbox", "wait_until_complete"): {"timeout": TIMEOUTS, "raise_on_termination": FLAGS},
    ("Sandbox", "stop"): {
        "graceful_shutdown_seconds": GRACES, "snapshot_on_stop": FLAGS, "missing_ok": FLAGS, "keep": FLAGS,
        "failed": FLAGS,
    },
    ("Sandbox", "stream_logs"): {"follow": FLAGS, "tail_lines": MOST},
    ("Session", "function"): {"temp_dir": ["relative", *TEXTS], "timeout_seconds": SECONDS},
    ("Sandbox", "list"): {
        "tags": TAGS, "provider": PROVIDERS, "status": ["sometimes", 5], "show_terminated": FLAGS,
    },
    ("Sandbox", "from_id"): {"sandbox_id": TEXTS, "provider": PROVIDERS},
    ("Sandbox", "delete"): {"sandbox_id": TEXTS, "missing_ok": FLAGS, "provider": PROVIDERS},
    ("Session", "list"): {
        "tags": TAGS, "provider": PROVIDERS, "status": ["sometimes", 5], "show_terminated": FLAGS, "adopt": FLAGS,
        "take": FLAGS,
    },
    ("Session", "from_id"): {"sandbox_id": TEXTS, "adopt": FLAGS, "take": FLAGS, "provider": PROVIDERS},
    ("Session", "adopt"): {"sandbox": [5, None], "take": FLAGS},
    ("Session", "release"): {"sandbox": [5, None]},
    ("Process", "wait"): {"timeout": TIMEOUTS},
    ("Process", "send_signal"): {"number": SIGNALS},
    ("Process", "terminate"): {"grace_seconds": GRACES},
    ("Process", "resize"): {"width": CELLS, "height": CELLS},
    ("Process", "result"): {"timeout": TIMEOUTS},
    ("Process", "exception"): {"timeout": TIMEOUTS},
    ("TerminalSession", "resize"): {"width": CELLS, "height": CELLS},
    ("TerminalSession", "send_signal"): {"number": SIGNALS},
    ("TerminalSession", "wait"): {"timeout": TIMEOUTS},
    ("TerminalSession", "result"): {"timeout": TIMEOUTS},
    ("TerminalSession", "exception"): {"timeout": TIMEOUTS},
    ("StreamWriter", "write"): {"data": DATA},
    ("StreamWriter", "writeline"): {"text": [5, None, "\ud800"]},
}  # fmt: skip
CREATION: dict[str, list[Any]] = {
    "provider": PROVIDERS, "container_image": ["", 5], "command": [5, [], ["\0"]], "args": ["x", [5]],
    "working_dir": ["relative", 5], "environment_variables": ENVIRONMENTS[:-1], "tags": TAGS,
    "resources": ["x", {"memory": "lots"}, {"pids": -1}, {"memory": math.nan}, {"gold": 1}],
    "network": ["sometimes", 5, ["not a host!"]], "isolation": ["sometimes", 5], "ports": ["x", [0], [70_000]],
    "max_lifetime_seconds": SECONDS, "keep": ["sometimes", 5], "keep_for_seconds": SECONDS, "snapshot": ["", 5],
    "defaults": [5, "x"],
}  # fmt: skip
GIVEN: dict[str, Any] = {
    "command": ["true"], "path": "/f", "data": b"", "local": "/etc/passwd", "remote": "/f", "code": "1", "port": 80,
    "sandbox_id": "x", "number": 15, "width": 80, "height": 24, "sandbox": Sandbox(provider="local"), "text": "x",
}  # fmt: skip
UNCHECKED = {"provider_options"}  # the provider's own
COROUTINE = {"send", "throw", "close"}  # what asyncio calls


@pytest.fixture(scope="module")
def things() -> Iterator[dict[str, Any]]:
    async def never() -> Any:
        await asyncio.Event().wait()

    spec = ProcessSpec(argv=("true",))
    process, terminal = Process(never, spec), TerminalSession(never, spec)
    yield {
        "Sandbox": Sandbox(provider="local"),
        "Session": Session(provider="local"),
        "Process": process,
        "TerminalSession": terminal,
        "StreamWriter": terminal.stdin,
    }
    process.cancel()
    terminal.cancel()


@pytest.mark.parametrize(
    ("owner", "method", "parameter"),
    [(*where, parameter) for where, parameters in TABLE.items() for parameter in parameters],
)
def test_a_bad_argument_is_refused_by_name(
    things: dict[str, Any], owner: str, method: str, parameter: str
) -> None:
    call = getattr(things[owner], method)
    for value in TABLE[owner, method][parameter]:
        with pytest.raises(ValidationError) as refused:
            _call(call, parameter, value)
        assert refused.value.argument in (parameter, "data"), (value, refused.value)
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("parameter", CREATION)
@pytest.mark.parametrize("make", [Sandbox, SandboxDefaults, Session], ids=lambda make: make.__name__)
def test_a_bad_keyword_makes_nothing(make: Callable[..., Any], parameter: str) -> None:
    if make is SandboxDefaults and parameter == "defaults":
        return
    for value in CREATION[parameter]:
        with pytest.raises(ValidationError) as refused:
            make(**{parameter: value})
        assert refused.value.argument == parameter, (value, refused.value)


def test_every_public_parameter_is_in_the_table() -> None:
    for kind in (Sandbox, Session, Process, TerminalSession, StreamWriter):
        for name, method in inspect.getmembers(kind, callable):
            if (
                name.startswith("_")
                or name in COROUTINE
                or (kind is not Operation and name in ("start", "over"))
            ):
                continue
            known = inspect.signature(method).parameters.values()
            shown = [p.name for p in known if p.name != "self" and p.kind is not p.VAR_KEYWORD]
            if any(p in CREATION for p in shown[2:]) and name in ("run", "session", "sandbox"):
                assert set(shown) - {"argv"} <= {*CREATION, *UNCHECKED}
                continue
            assert set(shown) <= set(TABLE.get((kind.__name__, name), {})), (kind.__name__, name)
    assert set(inspect.signature(SandboxDefaults).parameters) <= {*CREATION, *UNCHECKED}


def test_results_and_wait_take_no_nonsense() -> None:
    with pytest.raises(ValidationError):
        lowtide.wait([], timeout=math.nan)
    with pytest.raises(ValidationError):
        lowtide.wait([], num_returns=3)
    with pytest.raises(ValidationError):
        lowtide.results([5])  # type: ignore[list-item]
    for nonsense in (5, [5], Operation.over(5)):
        with pytest.raises(ValidationError):
            lowtide.wait(nonsense)  # type: ignore[arg-type]
    for count in (True, 1.0, "1"):
        with pytest.raises(ValidationError):
            lowtide.wait([Operation.over(5)], num_returns=count)  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        lowtide.results(5)  # type: ignore[call-overload]


def test_a_wait_for_ever_is_one(things: dict[str, Any]) -> None:
    done = Operation.over(5)
    assert done.result(math.inf) == done.result(10**400) == done.result(0) == 5


def test_defaults_never_show_what_may_be_secret() -> None:
    secret = SandboxDefaults(
        environment_variables={"TOKEN": "s3cret"}, provider_options={"key": "s3cret"}, tags=["a"]
    )
    assert "s3cret" not in f"{secret!r} {secret}"
    assert (
        repr(secret) == "SandboxDefaults(environment_variables=<TOKEN>, tags=('a',), provider_options=<key>)"
    )


def test_pickling_says_what_to_pass_instead(things: dict[str, Any]) -> None:
    for name, words in {"Sandbox": "sandbox_id", "Session": "sandbox_id", "Process": "result"}.items():
        with pytest.raises(TypeError, match=words):
            pickle.dumps(things[name])


def test_a_pickled_or_copied_file_error_tells_the_same() -> None:
    error = SandboxFileError("/x: full", path="/x", number=errno.ENOSPC, provider="local")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        said = (str(other), other.errno, other.strerror, other.filename, other.path, other.provider)
        assert said == ("/x: full", errno.ENOSPC, "No space left on device", "/x", "/x", "local")


def test_help_shows_every_keyword() -> None:
    for call in (Sandbox, Sandbox.run, Session, Session.sandbox, Sandbox.session):
        assert set(CREATION) <= {*inspect.signature(call).parameters, "defaults"}


def _call(call: Callable[..., Any], parameter: str, value: Any) -> Any:
    wanted = inspect.signature(call).parameters
    given = {name: GIVEN[name] for name, p in wanted.items() if p.default is p.empty and name in GIVEN}
    return call(**{**given, parameter: value})
