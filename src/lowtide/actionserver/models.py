"""Actions and observations: what an agent asks for and what came of it, as typed models with versioned JSON.

The JSON is the one agents' clients already speak: ``{"action": "run", "args": {…}, "timeout": 120}`` and
``{"observation": "run", "content": …, "extras": {…}, "message": …, "success": …}``, each with ``"version"``.
Arguments that are not known here are ignored, so that a newer client is still understood.
"""

from __future__ import annotations

from lowtide.actionserver import VERSION
from lowtide.actionserver.checks import fault_of

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing and dataclasses are not loaded inside: they cost as much as all the rest
    from collections.abc import Mapping
    from typing import Any, ClassVar, dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda cls: cls


class InvalidAction(ValueError):
    """What was asked for makes no sense; the message says why. Status 400."""


@dataclass_transform(kw_only_default=True)
class Model:
    """Keyword-only fields with defaults, equality, and JSON. Immutable by convention."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _required: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        own = [name for name in cls.__annotations__ if not name.startswith("_") and name != "kind"]
        cls._fields = tuple(dict.fromkeys((*cls._fields, *own)))
        cls._required = frozenset(name for name in cls._fields if not hasattr(cls, name))

    def __init__(self, **values: Any) -> None:
        for name in values:
            if name not in self._fields:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
        for name in self._fields:
            if name in values:
                setattr(self, name, values[name])
            elif name in self._required:
                raise TypeError(f"{type(self).__name__} needs {name!r}")
            else:
                value = getattr(type(self), name)
                setattr(self, name, dict(value) if isinstance(value, dict) else value)

    def fields(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self._fields}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash((type(self), repr(self)))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__name__}({shown})"


def _plain(value: Any) -> Any:
    if isinstance(value, Model):
        return value.fields()
    return list(value) if isinstance(value, tuple) else value


# Actions.

DEFAULT_SESSION = "default"


class Action(Model):
    """Something an agent asks for."""

    kind: ClassVar[str] = ""
    timeout: float | None = None
    """Seconds; None is the server's own limit. What it means is said by each action."""

    def to_json(self) -> dict[str, Any]:
        arguments = self.fields()
        timeout = arguments.pop("timeout")
        return {"version": VERSION, "action": self.kind, "args": arguments, "timeout": timeout}

    @staticmethod
    def from_json(data: Any) -> Action:
        """Raises InvalidAction with what is wrong."""
        if not isinstance(data, dict):
            raise InvalidAction("an action is a JSON object")
        version = data.get("version", VERSION)
        if not isinstance(version, int) or version > VERSION:
            raise InvalidAction(f"version {version!r} is not understood here; this server speaks {VERSION}")
        kind = data.get("action")
        cls = ACTIONS.get(kind) if isinstance(kind, str) else None
        if cls is None:
            known = ", ".join(sorted(ACTIONS))
            raise InvalidAction(f"unknown action {kind!r}; known are {known}")
        arguments = data.get("args", {})
        if not isinstance(arguments, dict):
            raise InvalidAction("args must be a JSON object")
        values = {name: value for name, value in arguments.items() if name in cls._fields}
        values["timeout"] = data.get("timeout", values.get("timeout"))
        for name in cls._required:
            if values.get(name) is None:
                raise InvalidAction(f"{cls.kind} needs {name!r}")
        action = cls(**{name: value for name, value in values.items() if value is not None})
        action.check()
        return action

    def check(self) -> None:
        """Raises InvalidAction for a value of a wrong type."""
        for name in self._fields:
            wrong = fault_of(name, getattr(self, name), getattr(type(self), name, ""))
            if wrong is not None:
                raise InvalidAction(f"{self.kind}: {name} {wrong}")


class Run(Action):
    """A command in the session's shell.

    An empty `command` reads on from one that still runs; `is_input` sends `command` to it as a line, or
    as a key when it is ``C-c``, ``C-d`` or ``C-z``. `timeout` (hard) and `no_change_timeout` (soft: no
    new output) end the waiting and not the command. `blocking` leaves the soft one out. `is_static` runs
    it in a shell of its own, beside the session, and there a timeout ends it.
    """

    kind: ClassVar[str] = "run"
    command: str
    is_input: bool = False
    blocking: bool = False
    is_static: bool = False
    cwd: str | None = None
    no_change_timeout: float | None = None
    session: str = DEFAULT_SESSION
    hidden: bool = False


class RunIPython(Action):
    """Code in an IPython kernel that keeps its state. After `timeout` seconds it is interrupted."""

    kind: ClassVar[str] = "run_ipython"
    code: str
    session: str = DEFAULT_SESSION
    kernel_init_code: str = ""


class Read(Action):
    """A file: all of it, the lines `start` to `end` (from 0, -1 is the end), or the 1-based `view_range`."""

    kind: ClassVar[str] = "read"
    path: str
    start: int = 0
    end: int = -1
    view_range: list[int] | None = None


class Write(Action):
    """Replace a file, or with `start` and `end` those of its lines."""

    kind: ClassVar[str] = "write"
    path: str
    content: str
    start: int = 0
    end: int = -1


class Edit(Action):
    """`command` is view, create, str_replace, insert or undo_edit."""

    kind: ClassVar[str] = "edit"
    command: str
    path: str
    file_text: str | None = None
    old_str: str | None = None
    new_str: str | None = None
    insert_line: int | None = None
    view_range: list[int] | None = None


class ListFiles(Action):
    """The names in a directory: directories first, each with a slash, then files."""

    kind: ClassVar[str] = "list"
    path: str = "."


class Upload(Action):
    """A file or a directory of this machine (`source`) into the directory `destination` of the sandbox."""

    kind: ClassVar[str] = "upload"
    source: str
    destination: str


class Download(Action):
    """A file or directory of the sandbox (`path`) as a zip on this machine."""

    kind: ClassVar[str] = "download"
    path: str
    destination: str | None = None


ACTIONS: dict[str, type[Action]] = {
    cls.kind: cls for cls in (Run, RunIPython, Read, Write, Edit, ListFiles, Upload, Download)
}


# Observations.


class Metadata(Model):
    """What is known about a command besides its output. `exit_code` is -1 while it runs."""

    exit_code: int = -1
    pid: int = -1
    username: str | None = None
    hostname: str | None = None
    working_dir: str | None = None
    py_interpreter_path: str | None = None
    prefix: str = ""
    suffix: str = ""
    duration_seconds: float = 0.0
    dropped_bytes: int = 0
    session: str = DEFAULT_SESSION


class Observation(Model):
    """What came of an action."""

    kind: ClassVar[str] = ""
    content: str = ""

    @property
    def success(self) -> bool:
        return True

    @property
    def message(self) -> str:
        return f"{self.kind} done"

    def to_json(self) -> dict[str, Any]:
        extras = self.fields()
        content = extras.pop("content")
        return {
            "version": VERSION,
            "observation": self.kind,
            "content": content,
            "extras": extras,
            "message": self.message,
            "success": self.success,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Observation:
        kind = data.get("observation")
        cls = OBSERVATIONS.get(kind if isinstance(kind, str) else "")
        if cls is None:
            raise InvalidAction(f"unknown observation {kind!r}")
        values = {name: value for name, value in data.get("extras", {}).items() if name in cls._fields}
        if "metadata" in values:
            known = {k: v for k, v in values["metadata"].items() if k in Metadata._fields}
            values["metadata"] = Metadata(**known)
            if type(values["metadata"].exit_code) is not int:
                raise InvalidAction(f"an exit code may not be {values['metadata'].exit_code!r}")
        if not isinstance(data.get("content", ""), str):
            raise InvalidAction("the content of an observation is text")
        for name in ("files", "results"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(content=data.get("content", ""), **values)


class RunObservation(Observation):
    kind: ClassVar[str] = "run"
    command: str = ""
    metadata: Metadata = Metadata()
    hidden: bool = False

    @property
    def exit_code(self) -> int:
        return self.metadata.exit_code

    @property
    def success(self) -> bool:
        return self.metadata.exit_code == 0

    @property
    def message(self) -> str:
        if self.exit_code == -1:
            return "The command is still running."
        return f"The command ended with exit code {self.exit_code}."

    def __str__(self) -> str:
        return f"{self.metadata.prefix}{self.content}{self.metadata.suffix}"


class IPythonObservation(Observation):
    """`results` are MIME bundles in the order they came; `content` is all of it as text."""

    kind: ClassVar[str] = "run_ipython"
    code: str = ""
    results: tuple[dict[str, Any], ...] = ()
    error: dict[str, Any] | None = None
    image_urls: list[str] | None = None

    @property
    def success(self) -> bool:
        return self.error is None


class ReadObservation(Observation):
    kind: ClassVar[str] = "read"
    path: str = ""


class WriteObservation(Observation):
    kind: ClassVar[str] = "write"
    path: str = ""


class EditObservation(Observation):
    kind: ClassVar[str] = "edit"
    path: str = ""
    prev_exist: bool = False
    old_content: str | None = None
    new_content: str | None = None


class ListObservation(Observation):
    kind: ClassVar[str] = "list"
    path: str = ""
    files: tuple[str, ...] = ()


class UploadObservation(Observation):
    kind: ClassVar[str] = "upload"
    path: str = ""
    size: int = 0


class DownloadObservation(Observation):
    kind: ClassVar[str] = "download"
    path: str = ""
    destination: str = ""
    size: int = 0


class ErrorObservation(Observation):
    """The action was understood and could not be done; `error_id` is a word for programs."""

    kind: ClassVar[str] = "error"
    error_id: str = ""

    @property
    def exit_code(self) -> int:
        """As an observation of a command has it: there is none."""
        return -1

    @property
    def metadata(self) -> Metadata:
        return Metadata()

    @property
    def success(self) -> bool:
        return False

    @property
    def message(self) -> str:
        return self.content


OBSERVATIONS: dict[str, type[Observation]] = {
    cls.kind: cls
    for cls in (
        RunObservation,
        IPythonObservation,
        ReadObservation,
        WriteObservation,
        EditObservation,
        ListObservation,
        UploadObservation,
        DownloadObservation,
        ErrorObservation,
    )
}
