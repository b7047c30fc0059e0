"""A compose file as the spec of a sandbox: one service, with an image that can be pulled."""

from __future__ import annotations

import shlex
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
    image = request.image_overrides.get(name) or service.get("image")
    if not image:
        raise not_there(f"services.{name}.build: building images")
    words = [*_words(service, name, "entrypoint"), *_words(service, name, "command")]
    container = made.containers.add(name=name, image=str(image), primary=True)
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
    if not isinstance(name, str) or not isinstance(service, dict):
        raise invalid("contents", "a service is a name and a mapping")
    return name, service


def _words(service: dict[str, Any], name: str, key: str) -> list[str]:
    given = service.get(key)
    if given is None:
        return []
    if isinstance(given, str):
        try:
            return shlex.split(given)
        except ValueError:
            raise invalid(f"services.{name}.{key}", "cannot be split into words") from None
    if isinstance(given, list) and all(isinstance(one, str) and "\0" not in one for one in given):
        return list(given)
    raise invalid(f"services.{name}.{key}", "must be a text or a list of texts")


def _environment(service: dict[str, Any], name: str) -> dict[str, str]:
    given = service.get("environment") or {}
    where = f"services.{name}.environment"
    if isinstance(given, list):
        pairs = [_text(one, where).partition("=")[::2] for one in given]
        return dict(pairs)
    if not isinstance(given, dict):
        raise invalid(where, "must be a mapping or a list")
    return {_text(key, where): _text(str(value), where) for key, value in given.items()}


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str) or "\0" in given:
        raise invalid(where, "must be a text without null bytes")
    return given
