"""Templates that people build: their steps run in the ground's builder, their logs are asked for by offset."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from lowtide.emulators.build import BuildFailed, Built
from lowtide.emulators.dockerfile import CannotBuild, Step, Surroundings, directory
from lowtide.emulators.e2b.model import TEMPLATES, BadRequest, NotFound, new_id
from lowtide.emulators.fields import FLAG, LIST_OF_OBJECTS, LIST_OF_TEXT, OBJECT, TEXT, check_fields, whole
from lowtide.emulators.request_check import json_object, query_number
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.emulators.ground import Ground

UPLOADS = "/_uploads/"
_HASH = re.compile(r"[0-9a-f]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_LARGEST_UPLOAD = 1 << 30
_MOST_TEMPLATES = 500
_PAGE = 100
_NEW = {
    **dict.fromkeys(("name", "alias", "teamID"), TEXT),
    "tags": LIST_OF_TEXT,
    **dict.fromkeys(("cpuCount", "memoryMB", "minFreeDiskMb"), whole(0, 2**31 - 1)),
}
_START = {
    **dict.fromkeys(("fromImage", "fromTemplate", "startCmd", "readyCmd"), TEXT),
    "fromImageRegistry": OBJECT,
    "force": FLAG,
    "steps": LIST_OF_OBJECTS,
}
_STEP = {"type": TEXT, "args": LIST_OF_TEXT, "filesHash": TEXT, "force": FLAG}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(eq=False, slots=True, kw_only=True)
class Build:
    build_id: str
    status: str = "waiting"
    reason: str | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def tell(self, text: str, level: str = "info") -> None:
        moment = _now()
        for line in text.splitlines():
            self.log.append({"timestamp": moment, "level": level, "message": line})


@dataclass(eq=False, slots=True, kw_only=True)
class Template:
    template_id: str
    name: str
    builds: dict[str, Build] = field(default_factory=dict)
    built: Built | None = None
    """The newest that is ready, held until the template is deleted."""
    tags: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The build and the time of each."""
    interpreter: bool = False
    start_command: str | None = None


class Templates:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.table: dict[str, Template] = {}
        self._tokens: dict[str, str] = {}
        self._building: set[asyncio.Task[None]] = set()

    def find(self, name: str) -> Template | None:
        """By its id or name, with or without a tag."""
        word = name.partition(":")[0]
        return self.table.get(word) or next((one for one in self.table.values() if one.name == word), None)

    def add_routes(self, app: web.Application) -> None:
        add = app.router.add_route
        add("POST", "/v3/templates", self._request)
        add("GET", "/templates/{template}/files/{hash}", self._upload_link)
        add("PUT", UPLOADS + "{hash}", self._upload)
        add("POST", "/v2/templates/{template}/builds/{build}", self._start)
        add("GET", "/templates/{template}/builds/{build}/status", self._status)

        add("POST", "/templates/tags", self._assign_tags)
        add("DELETE", "/templates/tags", self._delete_tags)
        add("GET", "/templates/{template}/tags", self._list_tags)

    async def delete(self, template: Template) -> None:
        self.table.pop(template.template_id, None)
        for build in template.builds.values():
            if build.task is not None:  # others wait for its place
                build.task.cancel()
        if template.built is not None:
            self._ground.builder.release(template.built)
            template.built = None

    async def aclose(self) -> None:
        for task in list(self._building):
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)

    # ------------------------------------------------------------ the calls

    async def _request(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, _NEW)
        name, _, tag = str(body.get("name") or body.get("alias") or "").partition(":")
        if not _NAME.fullmatch(name):
            raise BadRequest("a template needs a name of letters, digits, '.', '_', '/' and '-'")
        template = self.find(name)
        if template is None:
            if len(self.table) >= _MOST_TEMPLATES:
                raise BadRequest(f"this emulator holds its limit of {_MOST_TEMPLATES} templates")
            template = Template(template_id=new_id("t"), name=name)
            self.table[template.template_id] = template
        build = Build(build_id=secrets.token_hex(16))
        template.builds[build.build_id] = build
        while len(template.builds) > _PAGE:
            del template.builds[next(iter(template.builds))]
        tags = list(dict.fromkeys([*([tag] if tag else []), *_tags(body.get("tags") or [])])) or ["default"]
        template.tags |= dict.fromkeys(tags, (build.build_id, _now()))
        described = {"templateID": template.template_id, "buildID": build.build_id, "public": False}
        described |= {"names": [template.name], "aliases": [template.name], "tags": tags}
        return web.json_response(described, status=202)

    async def _upload_link(self, request: web.Request) -> web.Response:
        self._template(request)
        digest = _digest(request.match_info["hash"])
        token = self._tokens.setdefault(digest, secrets.token_hex(16))
        url = f"{request.url.origin()}{UPLOADS}{digest}?token={token}"
        return web.json_response({"present": self._file(digest).exists(), "url": url}, status=201)

    async def _upload(self, request: web.Request) -> web.Response:
        """By the address that was given out, as at a store: the key is for nobody else."""
        digest = _digest(request.match_info["hash"])
        token = self._tokens.get(digest, "")
        if not token or not hmac.compare_digest(request.query.get("token", "").encode(), token.encode()):
            return web.json_response({"code": 401, "message": "the token is wrong"}, status=401)
        place = self._file(digest)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        draft = place.with_name(f"{digest}.{secrets.token_hex(4)}")
        size = 0
        try:
            with draft.open("wb") as file:
                async for piece in request.content.iter_chunked(1 << 20):
                    size += len(piece)
                    if size > _LARGEST_UPLOAD:
                        raise BadRequest(f"an upload has {_LARGEST_UPLOAD} bytes at most")
                    file.write(piece)
            draft.rename(place)
        except OSError as error:
            if isinstance(error, ConnectionError):  # the caller has left
                raise
            return web.json_response(
                {"code": 507, "message": f"it cannot be kept: {error.strerror}"}, status=507
            )
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
        return web.Response(status=200)

    async def _start(self, request: web.Request) -> web.Response:
        template, build = self._template(request), self._build(request)
        body = await json_object(request)
        check_fields(body, _START)
        for one in body.get("steps") or ():
            check_fields(one, _STEP, required=("type",))
        if build.status != "waiting":
            raise BadRequest(f"build {build.build_id} is {build.status}")
        build.status = "building"
        build.task = task = asyncio.get_running_loop().create_task(self._run(template, build, body))
        self._building.add(task)
        task.add_done_callback(self._building.discard)
        return web.Response(status=202)

    async def _status(self, request: web.Request) -> web.Response:
        template, build = self._template(request), self._build(request)
        offset = query_number(request, "logsOffset", 0, lowest=0, largest=2**31 - 1)
        limit = query_number(request, "limit", _PAGE, lowest=0, largest=_PAGE)
        described: dict[str, Any] = {
            "templateID": template.template_id,
            "buildID": build.build_id,
            "status": build.status,
            "logs": [],
            "logEntries": build.log[offset : offset + limit],
        }
        if build.reason is not None:
            described["reason"] = {"message": build.reason}
        return web.json_response(described)

    async def _assign_tags(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, {"target": TEXT, "tags": LIST_OF_TEXT}, required=("target", "tags"))
        template, tags = self._named(body["target"]), _tags(body["tags"])
        known = template.tags.get(body["target"].partition(":")[2] or "default")
        if known is None:
            raise NotFound(f"template '{body['target']}' not found")
        template.tags |= dict.fromkeys(tags, (known[0], _now()))
        while len(template.tags) > _MOST_TEMPLATES:
            del template.tags[next(iter(template.tags))]
        return web.json_response({"tags": tags, "buildID": known[0]}, status=201)

    async def _delete_tags(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        check_fields(body, {"name": TEXT, "tags": LIST_OF_TEXT}, required=("name", "tags"))
        template = self._named(body["name"])
        for tag in _tags(body["tags"]):
            template.tags.pop(tag, None)
        return web.Response(status=204)

    async def _list_tags(self, request: web.Request) -> web.Response:
        tags = self._named(request.match_info["template"]).tags
        return web.json_response(
            [{"tag": tag, "buildID": build, "createdAt": at} for tag, (build, at) in tags.items()]
        )

    # ------------------------------------------------------------ building

    async def _run(self, template: Template, build: Build, asked: dict[str, Any]) -> None:
        try:
            base, interpreter = self._base(asked.get("fromTemplate"))
            steps = list(_steps(asked.get("steps") or [], base.around, self._file))
            if asked.get("force"):
                steps = [replace(one, fresh=secrets.token_hex(8)) for one in steps]
            built = await self._ground.builder.build(steps, log=build.tell, below=base)
        except (BuildFailed, CannotBuild, LowtideError, NotFound) as error:
            build.reason, build.status = _reason(error), "error"
            build.tell(build.reason, "error")
            return
        if template.template_id not in self.table:
            self._ground.builder.release(built)
        else:
            if template.built is not None:
                self._ground.builder.release(template.built)
            template.built, template.interpreter = built, interpreter
            template.start_command = asked.get("startCmd") or None
        build.tell("Build finished")
        build.status = "ready"

    def _base(self, name: str | None) -> tuple[Built, bool]:
        """What it starts from. Every image is this machine's own files."""
        found = self.find(name) if name else None
        if found is not None and found.built is not None:
            return found.built, found.interpreter
        if name and name.partition(":")[0] not in (*TEMPLATES, *TEMPLATES.values()):
            raise NotFound(f"template '{name}' not found")
        around = Surroundings(user="user", workdir="/home/user")
        kernel = bool(name) and TEMPLATES["code-interpreter-v1"] in (name, TEMPLATES.get(str(name)))
        return Built(around=around), kernel

    def _file(self, digest: str) -> Path:
        return self._ground.state.directory / "uploads" / digest

    def _named(self, name: str) -> Template:
        found = self.find(name)
        if found is None:
            raise NotFound(f"template '{name}' not found")
        return found

    def _template(self, request: web.Request) -> Template:
        found = self.table.get(request.match_info["template"])
        if found is None:
            raise NotFound(f"template '{request.match_info['template']}' not found")
        return found

    def _build(self, request: web.Request) -> Build:
        found = self._template(request).builds.get(request.match_info["build"])
        if found is None:
            raise NotFound(f"build '{request.match_info['build']}' not found")
        return found


def _reason(error: Exception) -> str:
    if isinstance(error, BuildFailed) and error.unknown_user and error.step is not None:
        refused = f"unauthenticated: invalid username: '{error.unknown_user}'"
        return f"failed to run command '{error.step.argv[-1]}': command failed: {refused}"
    return str(error)


def _tags(given: list[str]) -> list[str]:
    """The tags alone, of names with one."""
    found = []
    for text in given:
        name, colon, tag = text.partition(":")
        if not name or (colon and not tag):
            raise BadRequest(f"'{text}' is no tag, nor a name with one")
        found.append(tag or name)
    return found


def _digest(given: str) -> str:
    if not _HASH.fullmatch(given):
        raise BadRequest("a hash is lowercase hexadecimal")
    return given


def _steps(asked: list[dict[str, Any]], around: Surroundings, file: Any) -> Iterator[Step]:
    for one in asked:
        # Forced (`skip_cache()`): neither it nor what stands on it is taken from a build before.
        fresh = secrets.token_hex(8) if one.get("force") else ""
        for step in _followed(one, around, file):
            around = step.around
            yield replace(step, fresh=fresh)


def _followed(one: dict[str, Any], around: Surroundings, file: Any) -> Iterator[Step]:
    """One instruction. The surroundings of the last are those of the next instruction."""
    kind, words = one["type"].upper(), list(one.get("args") or ())
    shown = f"{kind} {' '.join(words)}"
    match kind:
        case "ENV":
            pairs = dict(zip(words[::2], words[1::2], strict=False))
            around = replace(around, environment={**around.environment, **pairs})
            step = Step(shown=shown, around=around)
        case "WORKDIR" if words:
            around = replace(around, workdir=around.at(words[0]))
            step = directory(shown, around)
        case "USER" if words:
            around = replace(around, user=words[0])
            step = Step(shown=shown, around=around)
        case "RUN" if words:
            user = words[1] if len(words) > 1 and words[1] else around.user
            as_user = replace(around, user=user)
            argv = ("/bin/bash", "-c", words[0])
            yield Step(shown=shown, argv=argv, around=as_user)
            step = Step(shown="", around=around)  # the next one is the template's user again
        case "COPY" if len(words) > 1:
            digest = one.get("filesHash") or ""
            if not _HASH.fullmatch(digest) or not file(digest).exists():
                raise CannotBuild(f"{shown}: its files were not uploaded")
            target = around.at(words[1]) + ("/" if words[1].endswith("/") else "")
            # Nobody in a local sandbox can give a file away: in a home its user copies, elsewhere root.
            owner = "user" if target.startswith("/home/user") else "root"
            copying = replace(around, user=owner, workdir="/")
            yield Step(shown=shown, sources=(words[0],), target=target, around=copying, context=file(digest))
            step = Step(shown="", around=around)
        case _:
            raise CannotBuild(f"{shown}: no step of a template")
    yield step
