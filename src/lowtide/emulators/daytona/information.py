"""Small questions about the machine: directories, ports, load, environment; and what this daemon has not got."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from lowtide.emulators.daytona.answers import Refused, body_of, number_in, rfc3339, strings_of
from lowtide.emulators.daytona.sandbox import Sandbox

if TYPE_CHECKING:
    from lowtide.emulators.daytona.toolbox import Toolbox

_LISTENING = "0A"


class Information:
    def __init__(self, toolbox: Toolbox) -> None:
        self.toolbox = toolbox
        self.machine = toolbox.sandboxes.machine

    def add_calls(self, add: Callable[..., None]) -> None:
        add("GET", "/version", self.version)
        add("GET", "/work-dir", self.directory)
        add("GET", "/user-home-dir", self.home)
        add("GET", "/project-dir", self.directory)
        add("POST", "/env", self.set_environment)
        add("GET", "/port", self.ports)
        add("GET", "/port/{port}/in-use", self.port_in_use)
        add("GET", "/system/metrics", self.metrics)
        add("*", "/computeruse/{rest:.*}", self.not_here)

    async def version(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response({"version": "0.226.1"})

    async def directory(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response({"dir": self.machine.work(sandbox)})

    async def home(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response({"dir": self.machine.home(sandbox)})

    async def set_environment(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        body = await body_of(request)
        sandbox.environment = {**sandbox.environment, **strings_of(body.get("set"), "set")}
        prefix = body.get("unsetValuePrefix")
        gone = {str(name) for name in body.get("unset") or []}
        sandbox.environment = {
            name: value
            for name, value in sandbox.environment.items()
            if name not in gone and not (prefix and value.startswith(str(prefix)))
        }
        return web.json_response(sandbox.environment)

    async def _listening(self, sandbox: Sandbox) -> list[int]:
        _, table, _ = await self.machine.run(sandbox, ("/bin/sh", "-c", "cat /proc/net/tcp /proc/net/tcp6"))
        found = set()
        for line in table.decode("ascii", "replace").splitlines():
            fields = line.split()
            if len(fields) > 3 and fields[3] == _LISTENING:
                found.add(int(fields[1].rpartition(":")[2], 16))
        return sorted(found)

    async def ports(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        return web.json_response({"ports": [p for p in await self._listening(sandbox) if 3000 <= p <= 9999]})

    async def port_in_use(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        port = number_in(request.match_info["port"], "port", lowest=3000, largest=9999)
        return web.json_response({"isInUse": port in await self._listening(sandbox)})

    async def metrics(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        script = "cat /proc/meminfo; df -B1 --output=size,used,avail / | tail -1"
        _, printed, _ = await self.machine.run(sandbox, ("/bin/sh", "-c", script))
        lines = printed.decode("ascii", "replace").splitlines()
        memory = {
            name.strip(): int(rest.split()[0]) * 1024
            for name, colon, rest in (line.partition(":") for line in lines)
            if colon and rest.split() and rest.split()[0].isdigit()
        }
        disk = lines[-1].split() if lines else []
        size, used, free = (int(n) if n.isdigit() else 0 for n in [*disk, "0", "0", "0"][:3])
        now = time.time()
        return web.json_response(
            {
                "cpuCount": sandbox.cpu,
                "cpuUsedPct": 0.0,
                "memTotal": memory.get("MemTotal", 0),
                "memUsed": memory.get("MemTotal", 0) - memory.get("MemAvailable", 0),
                "memCache": memory.get("Cached", 0),
                "diskTotal": size,
                "diskUsed": used,
                "diskFree": free,
                "timestamp": rfc3339(now),
                "timestampUnix": int(now),
            }
        )

    async def not_here(self, request: web.Request, sandbox: Sandbox) -> web.Response:
        raise Refused(501, "computer use is not available in the emulator")
