"""A compose file as the spec of a sandbox: one service, with an image that can be pulled."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

import yaml
from cwsandbox._proto import sandbox_pb2 as pb

from lowtide.emulators.coreweave.refusal import Code, Refused, invalid, not_there

_LARGEST = 256 << 10


def spec(request: Any) -> Any:
    """Raises `Refused`, by name, for what only a container engine could do."""
    if request.type == pb.SANDBOX_FILE_TYPE_UNSPECIFIED:
        raise invalid("type", "is required")
    if request.type != pb.SANDBOX_FILE_TYPE_COMPOSE:
        raise Refused(
            Code.UNIMPLEMENTED, "type: not implemented", "CWSANDBOX_NOT_IMPLEMENTED", fields=("type",)
        )
    if request.control == pb.CONTROL_CONTAINER_ENGINE:
        raise not_there("a container engine in the sandbox (control)")
    name, service = _service(request)
    made = pb.SandboxSpec(
        max_lifetime_seconds=request.max_lifetime_seconds,
        tags=request.tags,
        runner_ids=request.runner_ids,
        mode=request.mode,
        annotations=dict(request.annotations),
        network_ids=request.network_ids,
    )
    if request.HasField("network"):
        made.network.CopyFrom(request.network)
    image = request.image_overrides.get(name) or _text(service.get("image") or "", f"services.{name}.image")
    if not image:
        raise not_there(f"services.{name}.build: building images")
    words = [*_words(service, name, "entrypoint"), *_words(service, name, "command")]
    container = made.containers.add(name=name, image=image, primary=True)
    if words:
        container.command = words[0]
        container.args.extend(words[1:])
    container.environment_variables.update(_environment(service, name))
    container.working_dir = _text(service.get("working_dir", ""), f"services.{name}.working_dir")
    container.resource_requirements.CopyFrom(request.default_resources)
    return made


def _service(request: Any) -> tuple[str, dict[str, Any]]:
    if len(request.contents) > _LARGEST:
        raise invalid("contents", f"is larger than {_LARGEST} bytes")
    try:
        parsed = yaml.safe_load(request.contents.decode())
    except (ValueError, yaml.YAMLError, RecursionError):
        raise invalid("contents", "is not YAML") from None
    services = parsed.get("services") if isinstance(parsed, dict) else None
    if not isinstance(services, dict) or not services:
        raise invalid("contents", "has no services")
    if request.primary_service and request.primary_service not in services:
        raise invalid("primary_service", f"no service {request.primary_service!r}")
    if len(services) > 1:
        raise not_there("more than one container in a sandbox")
    (name, service), *_ = services.items()
    if not isinstance(service, dict):
        raise invalid("contents", "a service is a name and a mapping")
    return _text(name, "contents"), service


def _words(service: dict[str, Any], name: str, key: str) -> list[str]:
    given = service.get(key)
    if given is None:
        return []
    if isinstance(given, str):
        try:
            return shlex.split(_text(given, f"services.{name}.{key}"))
        except ValueError:
            raise invalid(f"services.{name}.{key}", "cannot be split into words") from None
    if isinstance(given, list):
        _check_size(given)
        return [_text(one, f"services.{name}.{key}") for one in given]
    raise invalid(f"services.{name}.{key}", "must be a text or a list of texts")


def _environment(service: dict[str, Any], name: str) -> dict[str, str]:
    given = service.get("environment") or {}
    where = f"services.{name}.environment"
    if isinstance(given, list):
        _check_size(given)
        pairs = [_text(one, where).partition("=")[::2] for one in given]
        return dict(pairs)
    if not isinstance(given, dict):
        raise invalid(where, "must be a mapping or a list")
    _check_size(given.values())
    return {_text(key, where): _text(_scalar(value, where), where) for key, value in given.items()}


def _check_size(values: Iterable[Any]) -> None:
    """Before anybody looks at them: one text of a file may stand in many places of it."""
    if sum(len(one) for one in values if isinstance(one, str)) > _LARGEST:
        raise invalid("contents", f"comes to more than {_LARGEST} characters")


def _scalar(given: Any, where: str) -> str:
    if given is None:
        return ""
    if not isinstance(given, str | int | float):
        raise invalid(where, "a value is a text or a number")
    try:
        return str(given)
    except ValueError:  # of too many digits
        raise invalid(where, "a number is too long") from None


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str) or re.search(
        "[\0\ud800-\udfff]", given
    ):  # half a character, as YAML can write it
        raise invalid(where, "must be a text that can be sent")
    return given
