"""The runtime on Modal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from lowtide import logger
from lowtide.runtime.base import PORTS, Runtime

log = logger.get("lowtide.runtime")

_TIMEOUT_SECONDS = 3600


class ModalRuntime(Runtime):
    """Actions through the action server in a Modal sandbox, which ends after an hour at the latest.

    At close it is always terminated, whatever `keep` says: Modal has no way to leave one for later.
    """

    provider: ClassVar[str] = "modal"

    def _sandbox_options(self) -> dict[str, Any]:
        options = super()._sandbox_options()
        if options.get("keep") not in (None, "never"):
            log.warning("the modal runtime keeps no sandbox: keep=%r is left out", options["keep"])
        options["keep"] = "never"
        options["provider_options"] = _with_defaults(options.get("provider_options"))
        return options


def _with_defaults(given: Any) -> Any:
    """Its own end after an hour, and addresses for the action server and the editor, unless something else is said."""
    if given is None or isinstance(given, Mapping):
        return {"timeout_seconds": _TIMEOUT_SECONDS, "encrypted_ports": PORTS, **(given or {})}
    from lowtide.providers.modal import ModalOptions

    if isinstance(given, ModalOptions):
        plain = ModalOptions()
        said = {
            "timeout_seconds": given.timeout_seconds != plain.timeout_seconds,
            "encrypted_ports": bool(given.encrypted_ports),
        }
        defaults: dict[str, Any] = {"timeout_seconds": _TIMEOUT_SECONDS, "encrypted_ports": PORTS}
        return dataclasses.replace(
            given, **{name: defaults[name] for name, is_said in said.items() if not is_said}
        )
    return given
