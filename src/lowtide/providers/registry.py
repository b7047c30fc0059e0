"""The registry: which providers there are, how each is loaded, and one connected instance of each.

Nothing is imported until it is asked for. A third party adds a provider through the entry-point group
``lowtide.providers`` (``name = "package.module:Class"``); it cannot take the name of a built-in one.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lowtide import threads
from lowtide.errors import MissingDependencyError, ValidationError

if TYPE_CHECKING:
    from lowtide.providers.base import Provider

ENTRY_POINT_GROUP = "lowtide.providers"


class Entry(NamedTuple):
    """Where a provider lives and what it needs."""

    module: str
    cls: str
    extra: str | None
    summary: str
    environment: tuple[str, ...] = ()
    """Prefixes of the variables that decide what `connect` connects to."""
    packages: tuple[str, ...] = ()
    """What it imports when it is used, and the extra installs."""

    @property
    def installed(self) -> bool:
        """Whether what it imports when it is used is there. Imports nothing."""
        from importlib.util import find_spec

        return all(find_spec(package) is not None for package in self.packages)

    @property
    def install(self) -> str | None:
        """The command that installs what this provider needs, or None when nothing is needed."""
        return f'pip install "lowtide[{self.extra}]"' if self.extra else None


_BUILT_IN: dict[str, Entry] = {
    "local": Entry("lowtide.providers.local", "LocalProvider", None, "Linux namespaces on this machine"),
    "docker": Entry(
        "lowtide.providers.docker",
        "DockerProvider",
        "docker",
        "containers of a Docker engine",
        ("DOCKER_",),
        ("aiodocker", "aiohttp"),
    ),
    "kubernetes": Entry(
        "lowtide.providers.kubernetes",
        "KubernetesProvider",
        "kubernetes",
        "pods of a Kubernetes cluster",
        ("KUBE",),
        ("aiohttp", "yaml"),
    ),
    "e2b": Entry("lowtide.providers.e2b", "E2BProvider", "e2b", "E2B's hosted microVMs", ("E2B_",), ("e2b",)),
    "daytona": Entry(
        "lowtide.providers.daytona",
        "DaytonaProvider",
        "daytona",
        "Daytona's hosted sandboxes",
        ("DAYTONA_",),
        ("daytona",),
    ),
    "modal": Entry(
        "lowtide.providers.modal",
        "ModalProvider",
        "modal",
        "Modal's hosted sandboxes",
        ("MODAL_", "LOWTIDE_MODAL_"),
        ("modal",),
    ),
    "runloop": Entry(
        "lowtide.providers.runloop",
        "RunloopProvider",
        "runloop",
        "Runloop's hosted devboxes",
        ("RUNLOOP_",),
        ("runloop_api_client",),
    ),
    "coreweave": Entry(
        "lowtide.providers.coreweave",
        "CoreWeaveProvider",
        "coreweave",
        "CoreWeave's hosted sandboxes",
        ("CWSANDBOX_",),
        ("cwsandbox", "grpc"),
    ),
}

_FOR_TESTS = {"faulty": Entry("lowtide.testing.faulty", "FaultyProvider", None, "misbehaves on demand")}
"""Can be named, but is not offered."""

_Key = tuple[str, tuple[tuple[str, Any], ...], tuple[tuple[str, str], ...]]
_instances: dict[_Key, Provider] = {}
_lock = threads.RLock()


def provider(name: str | None = None, **options: Any) -> Provider:
    """The connected provider of that name; the same instance for the same options and environment.

    Raises ValidationError for an unknown name, MissingDependencyError (what to install) and whatever
    the provider's `connect` raises (AuthenticationError).
    """
    name = name or default_name()
    place = entry(name)
    try:
        key = (name, tuple(sorted(options.items())), _relevant_environment(name, place))
        hash(key)
    except TypeError:  # an option that cannot be compared is never the same as another
        return _connect(name, place, options)
    with _lock:
        found = _instances.get(key)
        if found is None:
            found = _instances[key] = _connect(name, place, options)
        return found


def provider_class(name: str) -> type[Provider]:
    """The provider's class, imported but not connected: enough to ask for its capabilities."""
    return _load(name, entry(name))


def default_name() -> str:
    """LOWTIDE_PROVIDER, else local on Linux, else docker."""
    return os.environ.get("LOWTIDE_PROVIDER") or ("local" if sys.platform == "linux" else "docker")


def known() -> dict[str, Entry]:
    """Every provider that can be named, built in or installed."""
    offered = {**_installed(), **_BUILT_IN}
    return {name: found for name, found in offered.items() if name not in _FOR_TESTS}


def connected() -> list[Provider]:
    """The instances this process has connected so far."""
    with _lock:
        return list(_instances.values())


async def aclose() -> None:
    """Let go of every connected instance. Touches no sandbox."""
    with _lock:
        closing = list(_instances.values())
        _instances.clear()
    for instance in closing:
        await instance.aclose()


def entry(name: str) -> Entry:
    """Raises ValidationError, with the known names, for any other."""
    if not isinstance(name, str):
        raise ValidationError(f"provider must be a name, not {type(name).__name__}", argument="provider")
    found = _BUILT_IN.get(name) or _FOR_TESTS.get(name) or _installed().get(name)
    if found is None:
        raise ValidationError(
            f"unknown provider {name!r}; known are {', '.join(sorted(known()))}", argument="provider"
        )
    return found


def _installed() -> dict[str, Entry]:
    # Costs more to import than all of lowtide, and a built-in name never needs it.
    from importlib.metadata import entry_points

    found = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        distribution = point.dist.name if point.dist else point.module
        found[point.name] = Entry(point.module, point.attr, None, f"from {distribution}")
    return found


def _load(name: str, entry: Entry) -> type[Provider]:
    try:
        return cast("type[Provider]", getattr(importlib.import_module(entry.module), entry.cls))
    except ImportError as error:
        hint = f"; run: {entry.install}" if entry.install else ""
        raise MissingDependencyError(
            f"provider {name!r} cannot be loaded: {error}{hint}", install=entry.install, provider=name
        ) from error


def _connect(name: str, entry: Entry, options: Mapping[str, Any]) -> Provider:
    return _load(name, entry).connect(os.environ, options or None)


def _relevant_environment(name: str, entry: Entry) -> tuple[tuple[str, str], ...]:
    # Without it a process that changes its credentials or LOWTIDE_HOME would keep the old account.
    prefixes = (f"{name.upper()}_", "LOWTIDE_", "XDG_STATE_HOME", *entry.environment)
    return tuple(sorted((key, os.environ[key]) for key in os.environ if key.startswith(prefixes)))


def _forget_after_fork() -> None:
    # The parent's connections and loops are not the child's.
    global _lock
    _lock = threads.RLock()
    _instances.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
