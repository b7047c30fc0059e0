"""A Python function that runs in a sandbox of its own at every call: what `Session.function` makes of one.

Its source goes there, with what it uses of its module: values, other functions, and by name modules and what was
imported from one of the standard library or an installed package, which the sandbox has to have. Arguments, values
and the result are JSON.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import secrets
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from lowtide import logger, sandbox_json
from lowtide.errors import LowtideError, SandboxError, SandboxFileError, ValidationError
from lowtide.operation import Operation

if TYPE_CHECKING:
    from lowtide.sandbox import Sandbox
    from lowtide.session import Session

P = ParamSpec("P")
R = TypeVar("R")

log = logger.get("lowtide")

_LARGEST_RESULT = 64 << 20
"""In bytes of JSON. It comes from a sandbox, and may be anything; `sandbox_json` bounds what it becomes in memory."""

_RUNNER = """
import importlib, json, sys
given = json.load(sys.stdin)
names = {"__name__": "__lowtide__", **given["values"]}
for name, (module, part) in given["modules"].items():
    names[name] = importlib.import_module(module)
    if part is not None:
        names[name] = getattr(names[name], part)
for source in given["sources"]:
    exec(compile(source, "<function>", "exec"), names)
result = json.dumps(names[given["name"]](*given["args"], **given["kwargs"]))
with open(sys.argv[1], "w") as out:
    out.write(result)
"""


class RemoteFunction(Generic[P, R]):
    """`remote` runs it in a new sandbox, `map` each of many in one, `local` here."""

    def __init__(
        self,
        session: Session,
        function: Callable[P, R],
        options: Mapping[str, Any],
        *,
        temp_dir: str = "/tmp",  # noqa: S108 - in the sandbox
        timeout_seconds: float | None = None,
    ) -> None:
        self._session, self._options = session, dict(options)
        self._temp_dir, self._timeout_seconds = temp_dir, timeout_seconds
        if not hasattr(function, "__name__") or inspect.ismethod(function):
            kind = "a method" if inspect.ismethod(function) else f"a {type(function).__name__}"
            words = f"{kind} cannot be run in a sandbox: write a function, with def, that calls it"
            raise ValidationError(words, argument="function")
        self.function = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        self._parts = _Parts(function)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it here, in this process."""
        return self.function(*args, **kwargs)

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Operation[R]:
        """Call it in a new sandbox, which ends with the call.

        Raises ValidationError for arguments that are not JSON. What the function raises there is a
        SandboxExecutionError with its traceback in ``result.stderr``.
        """
        return self._start(self._given(args, kwargs))

    def map(self, items: Iterable[tuple[Any, ...]]) -> list[Operation[R]]:
        """`remote` for each tuple of arguments, all at once; none where one is refused."""
        calls = list(items)
        for item in calls:
            if not isinstance(item, tuple | list):
                raise ValidationError(
                    f"map() takes a tuple of arguments for each call, not a {type(item).__name__}: ({item!r},)",
                    argument="items",
                )
        return [self._start(given) for given in [self._given(tuple(item), {}) for item in calls]]

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """All that the call needs there."""
        _check_json("an argument", args)
        _check_json("an argument", kwargs)
        return json.dumps({**self._parts.as_json(), "args": args, "kwargs": kwargs})

    def _start(self, given: str) -> Operation[R]:
        return Operation.start(self._run(self._session.sandbox(**self._options), given))

    async def _run(self, sandbox: Sandbox, given: str) -> R:
        path = f"{self._temp_dir.rstrip('/')}/lowtide-result-{secrets.token_hex(8)}"
        try:
            await sandbox.exec(
                ["python3", "-c", _RUNNER, path],
                stdin=given,
                check=True,
                timeout_seconds=self._timeout_seconds,
            )
            answer = await self._answer(sandbox, path)
        finally:
            await self._end(sandbox)
        try:
            result: R = sandbox_json.parse(answer)
        except sandbox_json.TooLargeError as error:
            raise SandboxError(f"{self.__name__}: its result is too large: {error}") from error
        except (ValueError, RecursionError) as error:
            raise SandboxError(f"{self.__name__}: what came back is not its result") from error
        return result

    async def _answer(self, sandbox: Sandbox, path: str) -> bytes:
        try:
            return await sandbox.read_file(path, max_bytes=_LARGEST_RESULT)
        except SandboxFileError as error:  # of a file that the caller knows nothing of
            words = f"{self.__name__} ended without a result (by sys.exit?), or with one over {_LARGEST_RESULT} bytes"
            raise SandboxError(words, provider=error.provider, sandbox_id=error.sandbox_id) from error

    async def _end(self, sandbox: Sandbox) -> None:
        """What cannot be ended now stays in the session and the ledger, and does not hide the call's own outcome."""
        try:
            await sandbox.stop(graceful_shutdown_seconds=0.0)
        except LowtideError as error:
            log.warning("%s: its sandbox is not ended yet: %s", self.__name__, error)
        else:
            self._session._forget(sandbox)

    def __repr__(self) -> str:
        return f"<RemoteFunction {self.__name__}>"


class _Parts:
    """The source of a function and of those it uses, and the values and modules that they use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.sources: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.modules: dict[str, tuple[str, str | None]] = {}
        self._meant: dict[str, tuple[Any, str]] = {self.name: (function, self.name)}
        """What each name stands for, and in which function: in the sandbox there is one scope for all."""
        self._add(self.name, function)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "sources": list(self.sources.values()),
            "values": self.values,
            "modules": self.modules,
        }

    def _add(self, name: str, function: Any) -> None:
        source = self.sources[name] = ast.unparse(_definition(name, function))
        scope = _scope(function)
        for used in sorted(_names_from_outside(source) & scope.keys() - {name}):
            self._use(used, scope[used], name)

    def _use(self, name: str, value: Any, by: str) -> None:
        if isinstance(value, RemoteFunction):
            value = value.function
        known, of = self._meant.setdefault(name, (value, by))
        if not _same(known, value):
            raise ValidationError(
                f"{name} is one thing in {of} and another in {by}, and both go to the same sandbox: rename one",
                argument="function",
            )
        if name in self.sources:
            return
        if isinstance(value, types.ModuleType):
            self.modules[name] = (value.__name__, None)
        elif (home := _imported_from(value)) is not None:
            self.modules[name] = home
        elif isinstance(value, types.FunctionType) and value.__name__ == name:
            self._add(name, value)
        elif getattr(builtins, name, None) is not value:
            _check_json(f"{name}, which {by} uses,", value)
            self.values[name] = value


def _imported_from(value: Any) -> tuple[str, str] | None:
    """The module of the standard library or of an installed package that has it, and its name there."""
    module, name = sys.modules.get(str(getattr(value, "__module__", None))), getattr(value, "__name__", None)
    if module is None or not isinstance(name, str):
        return None
    found = getattr(module, name, None)
    if found is not value and not (isinstance(value, types.MethodType) and found == value):  # random.choice
        return None
    path = (getattr(module, "__file__", None) or "").split("/")
    installed = "site-packages" in path or "dist-packages" in path
    standard = module.__name__.partition(".")[0] in sys.stdlib_module_names
    return (module.__name__, name) if standard or installed else None


def _scope(function: Any) -> dict[str, Any]:
    """What the names mean that are not the function's own. Of a decorated one: where it, not its wrapper, was written."""
    function = inspect.unwrap(function)
    scope = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # nothing yet: the function itself, or what is defined after it
            scope.pop(name, None)
    return scope


def _names_from_outside(source: str) -> set[str]:
    """Those that it reads and that are not its own: no parameter, nothing that it sets."""
    whole = symtable.symtable(source, "<function>", "exec")
    found = {one.get_name() for one in whole.get_symbols() if one.is_referenced()}  # defaults, decorators
    tables = whole.get_children()
    while tables:
        table = tables.pop()
        found |= {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
        tables += table.get_children()
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        # Not by identity: a notebook's cell that runs again defines it again.
        return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
    return one is other or (type(one) is type(other) and bool(one == other))


def _definition(name: str, function: Any) -> ast.FunctionDef:
    """Without annotations, which nothing needs there, and without the decorator that brought it here."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise ValidationError(
            f"the source of {name} cannot be read; write it in a file, with def", argument="function"
        ) from error
    if not isinstance(tree, ast.FunctionDef):
        kind = "async functions run here" if isinstance(tree, ast.AsyncFunctionDef) else "it is no def"
        raise ValidationError(f"{name} cannot be run in a sandbox: {kind}", argument="function")
    tree.returns = None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    tree.decorator_list = [one for one in tree.decorator_list if not _is_ours(one)]
    return tree


def _is_ours(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    return isinstance(called, ast.Attribute) and called.attr == "function"


def _check_json(what: str, value: Any) -> None:
    try:
        _check_parts(what, value)
        json.dumps(value)
    except ValidationError:
        raise
    except (RecursionError, ValueError) as error:
        why = "it holds itself, or is too deep" if isinstance(error, RecursionError) else error
        raise ValidationError(f"{what} is not JSON: {why}", argument="arguments") from error


def _check_parts(what: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValidationError(f"{what} has a key that is no string: {key!r}", argument="arguments")
            _check_parts(what, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_parts(what, inner)
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise ValidationError(
            f"{what} is not JSON but {type(value).__name__}: make it inside the function, or pass what it is made of",
            argument="arguments",
        )
