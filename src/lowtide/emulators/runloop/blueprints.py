"""Blueprints: what a devbox can be made from. Nothing is built here: every one is this machine's own `/usr`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowtide.emulators import dockerfile
from lowtide.emulators.fields import LIST_OF_TEXT, OBJECT, TEXT, TEXTS, check_fields
from lowtide.emulators.runloop.model import Refused, milliseconds, new_id

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

_PUBLIC = "runloop/"
_FIELDS = {
    **dict.fromkeys(("name", "dockerfile", "base_blueprint_id", "base_blueprint_name"), TEXT),
    **dict.fromkeys(("file_mounts", "metadata", "build_args", "secrets"), TEXTS),
    "system_setup_commands": LIST_OF_TEXT,
    "launch_parameters": OBJECT,
}


@dataclass(eq=False, slots=True, kw_only=True)
class Blueprint:
    blueprint_id: str
    name: str
    created_at: float
    parameters: dict[str, Any]
    metadata: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    deleted: bool = False

    def view(self) -> dict[str, Any]:
        return {
            "id": self.blueprint_id,
            "name": self.name,
            "create_time_ms": milliseconds(self.created_at),
            "build_finish_time_ms": milliseconds(self.created_at),
            "parameters": self.parameters,
            "state": "deleted" if self.deleted else "created",
            "status": "build_complete",
            "is_public": self.name.startswith(_PUBLIC),
            "metadata": self.metadata,
        }


class Blueprints:
    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.table: dict[str, Blueprint] = {}

    def create(self, asked: dict[str, Any]) -> Blueprint:
        check_fields(asked, _FIELDS, required=("name",))
        made = Blueprint(
            blueprint_id=new_id("bpt"),
            name=asked["name"],
            created_at=self.ground.clock.now(),
            parameters={key: value for key, value in asked.items() if value is not None},
            metadata=dict(asked.get("metadata") or {}),
            environment=dockerfile.variables(asked.get("dockerfile") or ""),
        )
        self.table[made.blueprint_id] = made
        return made

    def get(self, blueprint_id: str) -> Blueprint:
        try:
            return self.table[blueprint_id]
        except KeyError:
            raise Refused(404, f"blueprint {blueprint_id} not found") from None

    def usable(self, blueprint_id: str | None, name: str | None) -> Blueprint | None:
        """What a create call asks for; None where it asks for none. A name means the newest of it."""
        if blueprint_id:
            found = self.get(blueprint_id)
            if found.deleted:
                raise Refused(400, f"blueprint {blueprint_id} is deleted")
            return found
        if not name:
            return None
        named = [one for one in self.table.values() if one.name == name and not one.deleted]
        if named:
            return named[-1]
        if name.startswith(_PUBLIC):  # the prebuilt ones of the service
            return self.create({"name": name})
        raise Refused(404, f"blueprint {name} not found")

    def log(self, blueprint: Blueprint) -> list[dict[str, Any]]:
        lines = [
            line for line in str(blueprint.parameters.get("dockerfile") or "").splitlines() if line.strip()
        ]
        lines += blueprint.parameters.get("system_setup_commands") or []
        moment = milliseconds(blueprint.created_at)
        return [
            {"level": "info", "timestamp_ms": moment, "message": f"not run here: {line}"} for line in lines
        ]
