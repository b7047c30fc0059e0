"""Blueprints: what a devbox can be made from. Built on this machine's own `/usr`, whatever they start from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lowtide.emulators import dockerfile
from lowtide.emulators.build import BuildFailed, Built
from lowtide.emulators.dockerfile import CannotBuild, Step
from lowtide.emulators.fields import LIST_OF_TEXT, OBJECT, TEXT, TEXTS, check_fields
from lowtide.emulators.runloop.model import Refused, milliseconds, new_id
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground
    from lowtide.emulators.runloop.account import Account

_PUBLIC = "runloop/"
_FIELDS = {
    **dict.fromkeys(("name", "dockerfile", "base_blueprint_id", "base_blueprint_name"), TEXT),
    **dict.fromkeys(("file_mounts", "metadata", "build_args", "secrets"), TEXTS),
    "system_setup_commands": LIST_OF_TEXT,
    "launch_parameters": OBJECT,
    "build_context": OBJECT,
}


@dataclass(eq=False, slots=True, kw_only=True)
class Blueprint:
    blueprint_id: str
    name: str
    created_at: float
    parameters: dict[str, Any]
    metadata: dict[str, str]
    built: Built | None = None
    """Held until it is deleted."""
    status: str = "build_complete"
    finished_at: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)
    deleted: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        return self.built.around.environment if self.built is not None else {}

    def view(self) -> dict[str, Any]:
        return {
            "id": self.blueprint_id,
            "name": self.name,
            "create_time_ms": milliseconds(self.created_at),
            "build_finish_time_ms": milliseconds(self.finished_at) if self.finished_at else None,
            "parameters": self.parameters,
            "state": "deleted" if self.deleted else "created",
            "status": self.status,
            "failure_reason": "build_failed" if self.status == "failed" else None,
            "is_public": self.name.startswith(_PUBLIC),
            "metadata": self.metadata,
        }


class Blueprints:
    def __init__(self, ground: Ground, account: Account) -> None:
        self.ground = ground
        self.account = account
        self.table: dict[str, Blueprint] = {}
        self._building: set[asyncio.Task[None]] = set()

    def create(self, asked: dict[str, Any]) -> Blueprint:
        """From the body of a create call. Answered at once; it is built by itself."""
        check_fields(asked, _FIELDS, required=("name",))
        below = self.usable(asked.get("base_blueprint_id"), asked.get("base_blueprint_name"))
        context = asked.get("build_context") or {}
        check_fields(context, {"object_id": TEXT, "type": TEXT})
        content = self.account.object_content(context["object_id"]) if context.get("object_id") else b""
        now = self.ground.clock.now()
        made = Blueprint(
            blueprint_id=new_id("bpt"),
            name=asked["name"],
            created_at=now,
            parameters={key: value for key, value in asked.items() if value is not None},
            metadata=dict(asked.get("metadata") or {}),
        )
        base = (below.built if below is not None else None) or Built()
        try:
            steps = list(_steps(asked, base, self.account.known_secrets(asked.get("secrets") or {})))
        except CannotBuild as error:
            self._tell(made, f"{error}\n", "error")
            made.status, made.finished_at = "failed", now
            steps = []
        if any(step.argv or step.sources for step in steps):
            made.status = "building"
            made.task = task = asyncio.get_running_loop().create_task(self._build(made, steps, base, content))
            self._building.add(task)
            task.add_done_callback(self._building.discard)
        elif made.status != "failed":
            made.finished_at = now
            made.built = replace(base, around=steps[-1].around) if steps else base
            for step in steps:
                self._tell(made, step.shown)
        self.table[made.blueprint_id] = made
        return made

    async def _build(self, made: Blueprint, steps: list[Step], base: Built, content: bytes) -> None:
        try:
            built = await self.ground.builder.build(
                steps, log=lambda text: self._tell(made, text), below=base, context=content
            )
        except (BuildFailed, LowtideError) as error:
            self._tell(made, str(error), "error")
            made.status = "failed"
        else:
            if made.deleted:
                self.ground.builder.release(built)
            made.built, made.status = built, "build_complete"
        made.finished_at = self.ground.clock.now()

    def _tell(self, blueprint: Blueprint, text: str, level: str = "info") -> None:
        moment = milliseconds(self.ground.clock.now())
        for line in text.splitlines():
            blueprint.log.append({"level": level, "timestamp_ms": moment, "message": line})

    def delete(self, blueprint: Blueprint) -> None:
        if not blueprint.deleted and blueprint.built is not None:
            self.ground.builder.release(blueprint.built)
        if blueprint.task is not None and not blueprint.task.done():  # others wait for its place
            blueprint.task.cancel()
            blueprint.status = "failed"
        blueprint.deleted = True

    async def aclose(self) -> None:
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)

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
            if found.status != "build_complete":
                raise Refused(400, f"blueprint {blueprint_id} is {found.status}")
            return found
        if not name:
            return None
        named = [
            one
            for one in self.table.values()
            if one.name == name and not one.deleted and one.status == "build_complete"
        ]
        if named:
            return named[-1]
        if name.startswith(_PUBLIC):  # the prebuilt ones of the service
            return self.create({"name": name})
        raise Refused(404, f"blueprint {name} not found")


def _steps(asked: dict[str, Any], base: Built, secrets: dict[str, str]) -> Iterator[Step]:
    """Its files, its Dockerfile, its commands. Secrets are seen by what runs, and by nothing later."""
    around = base.around
    write = 'mkdir -p "$(dirname "$1")" && printf %s "$2" > "$1"'
    for path, content in (asked.get("file_mounts") or {}).items():
        argv = ("/bin/sh", "-c", write, "sh", path, content)
        yield Step(shown=f"FILE {path}", argv=argv, around=around, apart=True)
    given = asked.get("build_args") or {}
    for step in dockerfile.steps(asked.get("dockerfile") or "", given=given, around=around):
        around = step.around
        seen = replace(step, arguments={**step.arguments, **secrets}, secret=bool(secrets))
        yield seen if step.argv else step
    for command in asked.get("system_setup_commands") or ():
        run = ("/bin/sh", "-c", command)
        yield Step(shown=f"RUN {command}", argv=run, around=around, arguments=secrets, secret=bool(secrets))
