"""The ground all emulators stand on: one process, one set of real local sandboxes, one clock, one end.

An emulator is a protocol in front of `Ground`: it asks for backing sandboxes, the clock, the armed
faults and generated keys, and gives back a connection factory. An aiohttp server and a gRPC server
are both such a factory, so the ground does not care what is spoken.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lowtide.emulators import package_managers, registry
from lowtide.emulators.backing import Backing, network_of
from lowtide.emulators.build import Builder
from lowtide.emulators.clock import Clock
from lowtide.emulators.faults import Faults
from lowtide.emulators.layer_cache import LayerCache
from lowtide.emulators.state import State
from lowtide.errors import ValidationError

if TYPE_CHECKING:
    from lowtide.emulators.authority import Authority

log = logging.getLogger("lowtide.emulators")

DEFAULT_LIMIT = 500
_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


class Emulator(Protocol):
    """One provider's wire protocol."""

    name: ClassVar[str]
    domains: ClassVar[tuple[str, ...]]
    """Hosts the CONNECT proxy terminates for this emulator: each, and one label below."""

    def __init__(self, ground: Ground) -> None: ...

    async def start(self, address: Address) -> None:
        """Called once, before the first connection, with the address it will be reached at."""
        ...

    def connection(self) -> asyncio.BaseProtocol:
        """A protocol for one new connection: plain on its own port, or decrypted by the proxy."""
        ...

    def environment(self, *, plain: bool) -> dict[str, str]:
        """What the provider's SDK has to find in its environment. `plain`: by URLs, without the proxy."""
        ...

    def sandboxes(self) -> list[dict[str, Any]]:
        """What exists now, as JSON, for the admin endpoint."""
        ...

    async def aclose(self) -> None:
        """Stop serving. The backing sandboxes are ended by the ground."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """One call as it was answered; no header, no body, no query: nothing secret."""

    provider: str
    operation: str
    status: int
    seconds: float
    alive: int
    """How many sandboxes the service has after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the emulators are served."""

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port_base: int | None = None
    """The first port; emulators take one each, in order, and the gate (proxy, admin) the next. None: any free ports."""
    allow_remote: bool = False
    """Must be True to bind anything but loopback: whoever reaches the port and has the key runs code here."""
    limit: int = DEFAULT_LIMIT
    plain: bool = False
    """Point SDKs at plain URLs instead of the CONNECT proxy."""
    on_call: Callable[[AnsweredCall], None] | None = None
    """Told of every call that was answered: for `--log`."""
    network: str = "none"
    """What a sandbox may reach that asks for nothing else: `none`, `internet`, `host` or `allow=HOST,…`."""
    packages: str = package_managers.CHECK
    """In builds: `check` fails where this machine has not what a package manager is to install, `skip` goes on without."""
    home: Path | None = None
    """Where state goes; None: lowtide's own state directory."""

    def checked(self) -> Settings:
        registry.check(self.names)
        if not _is_loopback(self.host) and not self.allow_remote:
            raise ValidationError(
                f"{self.host} is not a loopback address; emulators run code for whoever reaches them: "
                "say --allow-remote if that is what you want",
                argument="host",
            )
        network_of(self.network)
        package_managers.checked(self.packages)
        if self.limit < 1:
            raise ValidationError("limit is at least 1", argument="limit")
        if self.port_base is not None and not 1 <= self.port_base <= 65535 - len(self.names):
            raise ValidationError("port_base leaves no room for the ports", argument="port_base")
        return self


class Ground:
    """Serves a set of emulators until it is closed. Use as an async context manager."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings.checked()
        self.clock = Clock()
        self.faults = Faults()
        self.admin_token = secrets.token_hex(24)
        self.proxy_token = secrets.token_hex(16)
        self.emulators: dict[str, Emulator] = {}
        self.addresses: dict[str, Address] = {}
        self.requests = RequestLog()
        self._servers: list[asyncio.Server] = []
        self._gate: Any = None

    async def __aenter__(self) -> Ground:
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _open(self) -> None:
        from lowtide.emulators.gate import Gate

        settings = self.settings
        self.state = State.open(settings.home)
        self.backing = Backing(
            self.state.directory, limit=settings.limit, network=network_of(settings.network)
        )
        home = self.state.root.parent
        self.builder = Builder(self.backing, packages=settings.packages, cache=LayerCache.of(home), home=home)
        names = registry.check(settings.names)
        for index, name in enumerate(names):
            emulator = registry.load(name)(self)
            self.addresses[name] = await self._listen(emulator.connection, index)
            await emulator.start(self.addresses[name])
            self.emulators[name] = emulator
        gate = Gate(self)
        self._gate = gate
        self.gate_address = await self._listen(gate.connection, len(names))
        await gate.start()
        for server in self._servers:
            await server.start_serving()
        self.state.sweep_stale_soon()

    async def _listen(self, factory: Any, index: int) -> Address:
        base = self.settings.port_base
        loop = asyncio.get_running_loop()
        port = 0 if base is None else base + index
        server = await loop.create_server(
            factory, self.settings.host, port, backlog=1024, start_serving=False
        )
        self._servers.append(server)
        host, bound = server.sockets[0].getsockname()[:2]
        return Address(host=host, port=bound)

    @property
    def authority(self) -> Authority:
        """Signs what the proxy shows, and what an emulator serves with TLS itself. There once it serves."""
        found: Authority = self._gate.authority
        return found

    @property
    def certificate_bundle(self) -> str:
        return str(self.authority.bundle_file)

    @property
    def proxy_url(self) -> str:
        """The CONNECT proxy, with its own token: without it anyone on this machine could relay through it."""
        address = self.gate_address
        return f"http://lowtide:{self.proxy_token}@{address.host}:{address.port}"

    def answered(self, provider: str, operation: str, status: int, seconds: float) -> None:
        """An emulator's server says what it answered, and how long that took."""
        if self.settings.on_call is not None:
            emulator = self.emulators.get(provider)
            self.settings.on_call(
                AnsweredCall(
                    provider=provider,
                    operation=operation,
                    status=status,
                    seconds=seconds,
                    alive=len(emulator.sandboxes()) if emulator is not None else 0,
                )
            )

    def alive(self) -> dict[str, int]:
        """How many sandboxes each service has."""
        return {name: len(emulator.sandboxes()) for name, emulator in self.emulators.items()}

    def claimed_by(self, host: str) -> tuple[Emulator, str] | None:
        """The emulator that stands for `host`, and the domain it claims."""
        for emulator in self.emulators.values():
            for domain in emulator.domains:
                if host == domain or (
                    host.removesuffix("." + domain).count(".") == 0 and host.endswith("." + domain)
                ):
                    return emulator, domain
        return None

    def environment(self) -> dict[str, str]:
        """The environment under which the providers' SDKs, unmodified, find the emulators."""
        # Where this machine has a proxy, SDKs would send it what is meant for here, with the key.
        found = _directly() if any(os.environ.get(name) for name in _PROXIES) else {}
        for emulator in self.emulators.values():
            found.update(emulator.environment(plain=self.settings.plain))
        return found

    def proxy_environment(self) -> dict[str, str]:
        """What an emulator adds for SDKs that are reached through the CONNECT proxy."""
        urls = {"HTTPS_PROXY": self.proxy_url, "https_proxy": self.proxy_url}
        return {**urls, **_directly(), **self.trust_environment()}

    def trust_environment(self) -> dict[str, str]:
        """What leads SDKs to trust what the emulators show."""
        names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
        return dict.fromkeys(names, self.certificate_bundle)

    def python_environment(self) -> dict[str, str]:
        """The same for clients that a Python SDK makes without its environment: see `python_start`."""
        before = os.environ.get("PYTHONPATH")
        start = str(Path(__file__).parent / "python_start")
        return {
            "LOWTIDE_EMULATOR_AUTHORITY": str(self.authority.alone),
            "PYTHONPATH": f"{start}{os.pathsep}{before}" if before else start,
        }

    def description(self) -> dict[str, Any]:
        """What `--json` prints and `Handle` reads."""
        return {
            "providers": {name: address.url for name, address in self.addresses.items()},
            "environment": self.environment(),
            "admin": {"url": f"{self.gate_address.url}/_lowtide", "token": self.admin_token},
            "certificate": self.certificate_bundle,
            "network": self.settings.network,
        }

    async def aclose(self) -> None:
        """Stop listening, end every sandbox, remove the state. Safe to call twice."""
        for server in self._servers:
            server.close()
        self.clock.close()
        closing = [emulator.aclose() for emulator in self.emulators.values()]
        if self._gate is not None:
            closing.append(self._gate.aclose())
        self.emulators, self._gate, self._servers = {}, None, []
        await asyncio.gather(*closing, return_exceptions=True)
        if hasattr(self, "builder"):
            await self.builder.aclose()
        nothing_left = not hasattr(self, "backing")
        try:
            if not nothing_left:
                nothing_left = await self.backing.aclose()
        finally:
            if hasattr(self, "state"):
                # What could not be ended stays written down, and the reaper tries it again.
                await asyncio.to_thread(self.state.close, remove=nothing_left)


@dataclass(slots=True)
class RequestLog:
    """The last calls, without headers or bodies: tests ask how often something was really called."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def note(self, provider: str, operation: str, facts: Mapping[str, Any]) -> None:
        self.calls.append({"at": time.time(), "provider": provider, "operation": operation, **facts})
        if len(self.calls) > 20_000:
            del self.calls[:10_000]


def _directly() -> dict[str, str]:
    """What keeps SDKs from asking a proxy for what is here."""
    before = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    local = ",".join(filter(None, (before, "127.0.0.1,localhost,::1")))
    return {"NO_PROXY": local, "no_proxy": local}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
