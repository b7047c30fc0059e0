"""What `lowtide config` shows: the keywords of a sandbox, and what only the environment decides."""

from __future__ import annotations

import os
from typing import Any

from lowtide.defaults import Setting, config_path, settings
from lowtide.machine import home

# Not keywords of a sandbox, so that only the environment can set them.
_ENVIRONMENT_ONLY: dict[str, Any] = {
    "LOWTIDE_SIGNALS": "on",
    "LOWTIDE_LEASE_SECONDS": 300,
    "LOWTIDE_EXIT_SECONDS": 30,
    "LOWTIDE_END_SECONDS": 60,
    "LOWTIDE_BWRAP": None,
    "LOWTIDE_RUNSC": None,
    "LOWTIDE_DEBUG": None,
}


def collect() -> list[Setting]:
    source = next((name for name in ("LOWTIDE_HOME", "XDG_STATE_HOME") if os.environ.get(name)), "default")
    found = [Setting("home", str(home()), source), Setting("config file", config_path(), "default")]
    found += [_shown(one) for one in settings()]
    found += _bounds()
    for name, default in _ENVIRONMENT_ONLY.items():
        value = os.environ.get(name)
        found.append(Setting(name, value, name) if value else Setting(name, default, "default"))
    return found


def _bounds() -> list[Setting]:
    """What all local sandboxes together may use."""
    from lowtide.providers.local.bound import Bound

    bound = Bound.resolve(os.environ, home())
    return [Setting(f"local.{key}", getattr(bound, key), source) for key, source in bound.sources.items()]


def _shown(setting: Setting) -> Setting:
    if setting.key == "environment_variables" and setting.value:
        return setting._replace(value={name: "(set)" for name in setting.value})
    if isinstance(setting.value, str | int | float | dict | list | tuple | None):
        return setting
    return setting._replace(value=str(setting.value))
