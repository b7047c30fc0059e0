"""Validation: each argument checked, and refused by name, before anything is created."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from lowtide.arguments import absolute_path as absolute_path
from lowtide.arguments import argv as argv
from lowtide.arguments import command as command
from lowtide.arguments import content as content
from lowtide.arguments import environment as environment
from lowtide.arguments import path as path
from lowtide.arguments import refuse
from lowtide.arguments import sandbox_environment as sandbox_environment
from lowtide.arguments import strings as strings
from lowtide.arguments import text as text
from lowtide.arguments import wrong as wrong
from lowtide.errors import UnsupportedError

if TYPE_CHECKING:
    from lowtide.lifecycle.lease import Keep
    from lowtide.providers.base import Isolation, Limits, Network, Provider

_TAG = re.compile(r"[A-Za-z0-9._-]*[A-Za-z0-9]")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")
_BYTES = {"": 1, **{unit: 1000**n for n, unit in enumerate("kMGTP", 1)}, "K": 1000}
_BYTES.update({f"{unit}i": 1024**n for n, unit in enumerate("KMGTP", 1)})


def tags(argument: str, value: Any) -> tuple[str, ...]:
    found = strings(argument, value)
    for tag in found:
        if len(tag) > 59 or not _TAG.fullmatch(tag):
            refuse(
                argument,
                f"has a bad tag {tag!r}: at most 59 letters, digits, '.', '_' and '-', ending in a letter or digit",
            )
    if len(set(found)) != len(found):
        refuse(argument, "must be unique")
    return found


_MOST_SECONDS = 10 * 365 * 86_400.0  # ten years: more is a mistake, and more than the kernel's timers take
_MOST_CELLS = 0xFFFF  # what a terminal's size can say


def seconds(argument: str, value: Any) -> float:
    found = _seconds(argument, value)
    if found <= 0:
        refuse(argument, f"must be positive, not {value}")
    return found


def seconds_or_none(argument: str, value: Any) -> float | None:
    return None if value is None else seconds(argument, value)


def grace(argument: str, value: Any) -> float:
    """Seconds, or 0 for at once."""
    return _seconds(argument, value)


def timeout(argument: str, value: Any) -> float | None:
    """How long somebody waits: 0 is a look, None is for ever. What is longer than ten years is for ever, too."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 0:
        refuse(argument, f"must be a number of seconds from 0 on, or None, not {value!r}")
    return None if value > _MOST_SECONDS else float(value)


def _seconds(argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(argument, f"must be a number of seconds, not {type(value).__name__}")
    if not 0 <= value <= _MOST_SECONDS:  # also for what is no number at all
        refuse(argument, "must be a number of seconds between 0 and ten years")
    return float(value)


def positive(argument: str, value: Any) -> int:
    return whole(argument, value, 1)


def whole(argument: str, value: Any, least: int, most: int = 1 << 62) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(argument, f"must be a whole number, not {type(value).__name__}")
    if not least <= value <= most:
        shown = f"{value}" if abs(value) < 1 << 64 else "that"
        bounds = f"at least {least}" if most == 1 << 62 else f"between {least} and {most}"
        refuse(argument, f"must be {bounds}, not {shown}")
    return int(value)


def cells(argument: str, value: Any) -> int:
    """Width or height of a terminal."""
    return whole(argument, value, 1, _MOST_CELLS)


def mode(argument: str, value: Any) -> int | None:
    """Permissions of a file, or None."""
    return None if value is None else whole(argument, value, 0, 0o7777)


def signal_number(argument: str, value: Any) -> int:
    return whole(argument, value, 1, 64)


def flag(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        refuse(argument, f"must be True or False, not {value!r}")
    return value


def port(argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65_536:
        refuse(argument, f"must be between 1 and 65535, not {value!r}")
    return value


def ports(argument: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        refuse(argument, f"must be a list of port numbers, not {type(value).__name__}")
    found = tuple(port(argument, item) for item in value)
    if len(set(found)) != len(found):
        refuse(argument, "must be unique")
    return found


def keep(argument: str, value: Any) -> Keep:
    from lowtide.lifecycle.lease import Keep

    try:
        return Keep(value)
    except ValueError:
        refuse(argument, f"must be one of {', '.join(repr(k.value) for k in Keep)}, not {value!r}")


def provider(argument: str, value: Any) -> str | Provider:
    """A known name, or something that is a provider already."""
    if isinstance(value, str):
        from lowtide.providers import registry

        registry.entry(value)
        return value
    if not callable(getattr(value, "start_process", None)):
        refuse(argument, f"must be a provider's name, not {type(value).__name__}")
    found: Provider = value
    return found


def resources(argument: str, value: Any) -> Limits:
    from lowtide.providers.base import Limits

    if isinstance(value, Limits):
        return value
    if not isinstance(value, Mapping):
        refuse(
            argument,
            f"must be a mapping such as {{'limits': {{'memory': '256Mi'}}}}, not {type(value).__name__}",
        )
    limits = dict(value)
    if limits.keys() & {"limits", "requests", "gpu"}:
        for refused in ("requests", "gpu"):
            if limits.pop(refused, None):
                raise UnsupportedError(
                    f"{argument}[{refused!r}] is not supported by any provider here; say 'limits'",
                    argument=argument,
                    feature=refused,
                    alternative="limits",
                )
        nested = limits.pop("limits", None) or {}
        if limits or not isinstance(nested, Mapping):
            refuse(argument, f"must have only 'limits' at the top, not {sorted(limits)}")
        limits = dict(nested)
    known = {"cpu": cpus, "memory": size, "pids": positive, "disk": size}
    for key in limits:
        if key not in known:
            refuse(argument, f"has an unknown limit {key!r}; known are {', '.join(known)}")
    found = {key: known[key](argument, limit) for key, limit in limits.items() if limit is not None}
    return Limits(
        cpu=found.get("cpu"),
        memory_bytes=_whole(found.get("memory")),
        pids=_whole(found.get("pids")),
        disk_bytes=_whole(found.get("disk")),
    )


def cpus(argument: str, value: Any) -> float:
    """``"500m"``, ``"2"``, ``1.5`` → processors."""
    number, unit = _quantity(argument, value)
    if unit not in ("", "m"):
        refuse(argument, f"has a bad number of processors {value!r}; write '500m' or '2'")
    return number / 1000 if unit == "m" else number


def size(argument: str, value: Any) -> int:
    """``"256Mi"``, ``"1Gi"``, ``"10M"``, ``4096`` → bytes."""
    number, unit = _quantity(argument, value)
    if unit not in _BYTES:
        refuse(argument, f"has a bad size {value!r}; write '256Mi', '1Gi' or a number of bytes")
    return int(number * _BYTES[unit])


def _quantity(argument: str, value: Any) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        refuse(argument, f"has a bad quantity {value!r}")
    match = _QUANTITY.fullmatch(value.strip() if isinstance(value, str) else f"{value}")
    if match is None or not float(match[1]) > 0:
        refuse(argument, f"has a bad quantity {value!r}; it must be a positive number with a unit")
    return float(match[1]), match[2]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def isolation(argument: str, value: Any) -> Isolation:
    """The word for a stronger wall than the provider's own."""
    from lowtide.providers.base import Isolation

    try:
        return Isolation(value)
    except ValueError:
        known = ", ".join(repr(word.value) for word in Isolation)
        refuse(argument, f"must be {known}, or left out for the provider's own, not {value!r}")


def network(argument: str, value: Any) -> Network:
    """``"none"``, ``"internet"``, ``"host"``, an allow-list, or the words of cwsandbox.

    Those are ``"full"``, which means ``"internet"``, and the mappings ``deny_egress`` and ``egress``.
    """
    from lowtide.providers.base import Network, NetworkMode

    if isinstance(value, Network):
        return _allowed(argument, value.allow) if value.mode is NetworkMode.ALLOW else value
    if value == "full":
        return Network(mode=NetworkMode.INTERNET)
    if value in ("none", "internet", "host"):
        return Network(mode=NetworkMode(value))
    if isinstance(value, list | tuple):
        return _allowed(argument, strings(argument, value))
    if not isinstance(value, Mapping):
        refuse(argument, f"must be 'none', 'internet', 'host' or a list of hosts and ranges, not {value!r}")
    if value.keys() == {"allow"}:
        return _allowed(argument, strings(argument, value["allow"]))
    if value.keys() == {"deny_egress"} and isinstance(value["deny_egress"], bool):
        return Network(mode=NetworkMode.NONE if value["deny_egress"] else NetworkMode.INTERNET)
    if value.keys() == {"egress"} and isinstance(value["egress"], Sequence):
        return _egress(argument, value["egress"])
    refuse(argument, f"must be 'none', 'internet', 'host' or {{'allow': [...]}}, not {dict(value)!r}")


def _allowed(argument: str, entries: Sequence[str]) -> Network:
    """An empty list allows nothing."""
    from lowtide.providers.base import Network, NetworkMode
    from lowtide.providers.network import policy

    try:
        allow = tuple(dict.fromkeys(policy.entry(text).text for text in entries))
    except ValueError as error:
        refuse(argument, f"has a bad entry: {error}")
    return Network(mode=NetworkMode.ALLOW, allow=allow) if allow else Network(mode=NetworkMode.NONE)


def _egress(argument: str, rules: Sequence[Any]) -> Network:
    from lowtide.providers.base import Network, NetworkMode

    allowed = []
    for rule in rules:
        if rule == {"any": True}:
            return Network(mode=NetworkMode.INTERNET)
        if not isinstance(rule, Mapping) or len(rule) != 1 or not rule.keys() <= {"dns_name", "cidr"}:
            refuse(
                argument, f"has a rule that cannot be kept: {rule!r}; write dns_name or cidr, nothing else"
            )
        allowed.append(text(argument, next(iter(rule.values()))))
    return _allowed(argument, allowed)


def provider_options(provider: type[Provider], value: Any) -> Any:
    """The provider's own options object, made from a mapping where one was given."""
    if value is None:
        return None
    wanted = provider.options_type
    if wanted is None:
        refuse("provider_options", f"are not taken by provider {provider.name!r}: it has none")
    if isinstance(value, wanted):
        return _typed(value)
    if not isinstance(value, Mapping):
        refuse("provider_options", f"must be a {wanted.__name__} or a mapping, not {type(value).__name__}")
    known = getattr(wanted, "__dataclass_fields__", {})
    for key in value:
        if key not in known:
            refuse(
                "provider_options",
                f"has no {key!r} for provider {provider.name!r}; known are {', '.join(known)}",
            )
    return _typed(wanted(**value))


def _typed(options: Any) -> Any:
    """The options, each of its declared type: an SDK would fail at another one in the midst of a create."""
    for name, kind in get_type_hints(type(options)).items():
        if not _fits(getattr(options, name), kind):
            said = kind.__name__ if kind in (int, float, str, bool) else str(kind)
            refuse("provider_options", f"has {name!r}, which must be {said.replace('collections.abc.', '')}")
    return options


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin in (int, float):
        return isinstance(value, int | origin) and not isinstance(value, bool)
    if origin in (tuple, Sequence):
        return isinstance(value, tuple | list) and all(_fits(one, inner[0]) for one in value)
    return isinstance(value, origin) if origin in (str, bool, NoneType, Mapping) else True
