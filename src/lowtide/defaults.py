"""SandboxDefaults: every keyword a sandbox can be made with, checked, and where each value came from.

One way to configure: the argument, then the environment variable, then ``config.toml`` in lowtide's
home, then the default. The keywords are written down here once; `Sandbox`, `Session` and the command
line take them from here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypedDict, TypeVar

from lowtide import config_file, validate
from lowtide.errors import ValidationError

if TYPE_CHECKING:
    from typing import Unpack

    from lowtide.lifecycle.lease import Keep
    from lowtide.providers.base import Isolation, Limits, Network, Provider


class SandboxOptions(TypedDict, total=False):
    """The keywords of `Sandbox`, `Sandbox.run` and `Session.sandbox`; `SandboxDefaults` says what each means."""

    provider: str | Provider | None
    container_image: str | PathLike[str] | None
    command: str | Sequence[str] | None
    args: Sequence[str] | None
    working_dir: str | PathLike[str] | None
    environment_variables: Mapping[str, str] | None
    tags: Sequence[str] | None
    resources: Mapping[str, Any] | Limits | None
    network: (
        Literal["none", "internet", "host", "full"]
        | list[str]
        | tuple[str, ...]
        | Mapping[str, Any]
        | Network
        | None
    )
    isolation: Literal["gvisor"] | Isolation | None
    ports: Sequence[int] | None
    max_lifetime_seconds: float | None
    keep: Literal["never", "on-failure", "always"] | Keep | None
    keep_for_seconds: float | None
    snapshot: str | None
    provider_options: Mapping[str, Any] | Any | None
    defaults: SandboxDefaults | Mapping[str, Any] | None


F = TypeVar("F", bound=Callable[..., Any])


def shows_options(function: F) -> F:
    """Let `help`, and whoever else asks for its signature, see each keyword of `SandboxOptions`."""
    import inspect

    shown = inspect.signature(function)
    kept = [each for each in shown.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_source_text(kind))
        for name, kind in SandboxOptions.__annotations__.items()
        if name not in shown.parameters
    ]
    function.__signature__ = shown.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return function


def _source_text(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SandboxDefaults:
    """What sandboxes are made with. None means: not said here."""

    provider: str | Provider | None = None
    """A provider's name, or a connected one. Else LOWTIDE_PROVIDER, else local on Linux, else docker."""
    container_image: str | PathLike[str] | None = None
    """What the sandbox runs on; None is the provider's own."""
    command: str | Sequence[str] | None = None
    """The main process, or None for one that idles until it is told to end."""
    args: Sequence[str] | None = None
    """What follows `command`."""
    working_dir: str | PathLike[str] | None = None
    """Absolute. Commands start in it, and relative paths of files are relative to it."""
    environment_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Sequence[str] = ()
    """To find sandboxes again: letters, digits, ``. _ -``, at most 59 characters, ending in a letter or digit."""
    resources: Mapping[str, Any] | Limits | None = None
    """``{"limits": {"cpu": "1", "memory": "256Mi", "pids": 64, "disk": "1Gi"}}``; the inner part alone will do."""
    network: (
        Literal["none", "internet", "host", "full"]
        | list[str]
        | tuple[str, ...]
        | Mapping[str, Any]
        | Network
        | None
    ) = None
    """``"none"``, ``"internet"`` (or ``"full"``), ``"host"`` or ``["example.org", "10.0.0.0/8"]``; None is the
    provider's default."""
    isolation: Literal["gvisor"] | Isolation | None = None
    """``"gvisor"``: a kernel of the sandbox's own in front of the machine's; None is the provider's own wall."""
    ports: Sequence[int] | None = None
    """Ports that `Sandbox.url` will be asked for."""
    max_lifetime_seconds: float | None = None
    """A hard end, whatever happens."""
    keep: Literal["never", "on-failure", "always"] | Keep | None = None
    """``"never"`` (default), ``"on-failure"`` or ``"always"``; also LOWTIDE_KEEP."""
    keep_for_seconds: float | None = None
    """How long a kept sandbox is kept: 24 hours unless said."""
    snapshot: str | None = None
    """The id of the snapshot to start from."""
    provider_options: Mapping[str, Any] | Any | None = None
    """What only this provider has: its own options object, or a dict of that object's fields."""

    def __post_init__(self) -> None:
        for key, check in _CHECKS.items():
            value = getattr(self, key)
            if value is not None:
                object.__setattr__(self, key, check(key, value))
        if self.args is not None and self.command is None:
            raise ValidationError("args needs a command to follow", argument="args")

    def __repr__(self) -> str:
        """What is said here. Of the environment and of options only the names: values may be secrets."""
        said = explicit(self)
        for key in ("environment_variables", "provider_options"):
            if key in said:
                value = said[key]
                names = value if isinstance(value, Mapping) else getattr(value, "__dataclass_fields__", ())
                said[key] = f"<{', '.join(map(str, names))}>"
        words = (
            f"{key}={value if isinstance(value, str) and value[:1] == '<' else repr(value)}"
            for key, value in said.items()
        )
        return f"SandboxDefaults({', '.join(words)})"

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """The same as keywords, for what was read from a file. Unknown keys are an error."""
        _refuse_unknown(options)
        return cls(**{key: value for key, value in options.items() if value is not None})

    @shows_options
    def with_overrides(self, **options: Unpack[SandboxOptions]) -> Self:
        """A copy with these replaced. None counts as not given."""
        _refuse_unknown(options)
        given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        return dataclasses.replace(self, **given)

    def merge_tags(self, extra: Sequence[str] | None) -> tuple[str, ...]:
        """These tags, then `extra`; each once."""
        return tuple(dict.fromkeys((*self.tags, *validate.tags("tags", extra or ()))))

    def merge_environment_variables(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        """These variables with `extra` on top."""
        more = validate.sandbox_environment("environment_variables", extra or {})
        return {**self.environment_variables, **more}

    def merged(self, options: Mapping[str, Any]) -> Self:
        """A copy with `options` on top: tags and environment are added to, the rest is replaced."""
        _refuse_unknown(options)
        given = {key: value for key, value in options.items() if value is not None}
        if not given:
            return self
        if "tags" in given:
            given["tags"] = self.merge_tags(given["tags"])
        if "environment_variables" in given:
            given["environment_variables"] = self.merge_environment_variables(given["environment_variables"])
        if "command" in given:
            given.setdefault("args", None)  # another command's arguments would make no sense
        return dataclasses.replace(self, **given)

    @property
    def argv(self) -> tuple[str, ...] | None:
        """The main process, as one list."""
        if self.command is None:
            return None
        first = (self.command,) if isinstance(self.command, str) else tuple(self.command)
        return (*first, *(self.args or ()))


_CHECKS = {
    "provider": validate.provider,
    "container_image": validate.path,
    "command": validate.command,
    "args": validate.strings,
    "working_dir": validate.absolute_path,
    "environment_variables": validate.sandbox_environment,
    "tags": validate.tags,
    "resources": validate.resources,
    "network": validate.network,
    "isolation": validate.isolation,
    "ports": validate.ports,
    "max_lifetime_seconds": validate.seconds,
    "keep": validate.keep,
    "keep_for_seconds": validate.seconds,
    "snapshot": validate.text,
}

_ENVIRONMENT = {"provider": "LOWTIDE_PROVIDER", "keep": "LOWTIDE_KEEP", "container_image": "LOWTIDE_IMAGE"}


class Setting(NamedTuple):
    """One value and where it came from: ``argument``, a variable's name, a file's path or ``default``."""

    key: str
    value: Any
    source: str


def resolve(
    defaults: SandboxDefaults | Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None
) -> SandboxDefaults:
    """What holds for one sandbox: arguments over defaults over the environment over the file."""
    given = dict(options or {})
    own = given.pop("defaults", None)
    base = SandboxDefaults().merged(_from_file()[0]).merged(_from_environment())
    for layer in (defaults, own):
        if layer is not None:
            base = base.merged(explicit(layer))
    return base.merged(given)


def default_provider() -> str:
    """The name of the provider where nobody says one: the environment's, the file's, or this machine's."""
    from lowtide.providers import registry

    chosen = resolve().provider or registry.default_name()
    return chosen if isinstance(chosen, str) else chosen.name


def settings(defaults: SandboxDefaults | Mapping[str, Any] | None = None) -> list[Setting]:
    """Every keyword with its value and where that came from; what ``lowtide config`` shows."""
    from lowtide.providers import registry

    file, path = _from_file()
    layers = [(explicit(defaults), "argument")] if defaults is not None else []
    layers += [({key: value}, _ENVIRONMENT[key]) for key, value in _from_environment().items()]
    layers.append((file, path))
    layers.append(
        ({"provider": registry.default_name(), "keep": "never", "keep_for_seconds": 86_400.0}, "default")
    )
    held = resolve(defaults)
    found = []
    for field in dataclasses.fields(SandboxDefaults):
        sources = [source for values, source in layers if values.get(field.name) is not None]
        value = getattr(held, field.name)
        if value is None and sources == ["default"]:
            value = layers[-1][0][field.name]
        found.append(Setting(field.name, value, sources[0] if sources else "default"))
    return found


def explicit(defaults: SandboxDefaults | Mapping[str, Any]) -> dict[str, Any]:
    """What these defaults say, without what they leave open."""
    if isinstance(defaults, Mapping):
        defaults = SandboxDefaults.from_dict(defaults)
    if not isinstance(defaults, SandboxDefaults):
        raise ValidationError(
            f"defaults must be a SandboxDefaults or a mapping, not {type(defaults).__name__}",
            argument="defaults",
        )
    values = {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}
    return {key: value for key, value in values.items() if value not in (None, (), {})}


def config_path() -> str:
    from lowtide.machine import home

    return str(config_file.path(home()))


def _from_environment() -> dict[str, str]:
    return {key: os.environ[name] for key, name in _ENVIRONMENT.items() if os.environ.get(name)}


def _from_file() -> tuple[dict[str, Any], str]:
    path = config_path()
    options = config_file.read(Path(path))
    for table in config_file.TABLES:
        options.pop(table, None)
    if not options:
        return {}, path
    try:
        return explicit(options), path
    except ValidationError as error:
        raise ValidationError(f"{path}: {error}", argument=error.argument) from error


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    if not isinstance(options, Mapping):
        raise ValidationError(f"options must be a mapping, not {type(options).__name__}", argument="defaults")
    known = SandboxDefaults.__dataclass_fields__
    for key in options:
        if key not in known:
            from difflib import get_close_matches

            close = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(known))}"
            raise ValidationError(f"unknown keyword {key!r}{hint}", argument=str(key))
