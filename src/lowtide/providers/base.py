"""The seam: what a provider has to implement, and the plain data that crosses it.

A provider is the adapter to one kind of place. It is asynchronous, holds no policy and keeps no
record: leases, retries of clean-up, keep and sweep live one layer up. It must

* carry the lease id inside the create call (as name, idempotency key or label),
* arm the hard lifetime inside the same call where the service has one,
* answer `destroy` with True (ended now) or False (was already gone), and only when that is confirmed,
* map its SDK's exceptions to `lowtide.errors` in one place and keep the original as ``__cause__``.

What can be derived from these primitives (listing, mkdir, remove, directory transfer, a shell
wrapper for cwd and environment) is derived once, in `derived`; a provider that does one of those
natively implements the matching optional protocol below and declares nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Protocol, Self

from lowtide.errors import LowtideError


class Capability(enum.StrEnum):
    """Something a provider may or may not do. Checked before create; the docs matrix is made from it."""

    IMAGE = "image"  # container_image names what the sandbox runs on
    COMMAND = "command"  # a main process of the caller's choice
    LOGS = "logs"  # what that prints is kept, and read with stream_logs()
    STDIN = "stdin"
    TTY = "tty"
    USER = "user"  # exec as another user
    SIGNALS = "signals"
    CPU_LIMIT = "cpu-limit"
    MEMORY_LIMIT = "memory-limit"
    PIDS_LIMIT = "pids-limit"
    DISK_LIMIT = "disk-limit"
    NETWORK_NONE = "network-none"
    NETWORK_INTERNET = "network-internet"  # the public internet
    NETWORK_HOST = "network-host"  # this machine's own network
    NETWORK_ALLOW = "network-allow"  # an allow-list of hosts or CIDRs
    NETWORK_PORTS = "network-ports"  # its entries may name a port
    DENIED_CONNECTIONS = "denied-connections"  # refused connections are listed
    GVISOR = "gvisor"  # isolation="gvisor": a kernel of the sandbox's own, in front of the machine's
    PORTS = "ports"  # url(port)
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    LIFETIME = "lifetime"  # a hard lifetime that holds when every lowtide process is gone
    RENEW = "renew"  # that lifetime can be moved while the sandbox runs
    CODE = "code"  # a stateful interpreter of its own; run_code works without it too


class Recovery(enum.Enum):
    """How a create whose answer was lost is found again, and what proves that it made nothing."""

    REPLAY = (
        "replay"  # by label; else take its idempotency key with another create, and destroy what that returns
    )
    BY_NAME = "by-name"  # get by the name we chose
    BY_LABEL = "by-label"  # list by label until the create window has surely passed

    @property
    def looks_lag(self) -> bool:
        """Whether an empty look is no proof, even after a refused create: lists lag behind what was committed.

        A name that we chose is taken when the service commits, so one look by name is proof then.
        """
        return self is not Recovery.BY_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the lifecycle protocol needs to know about a provider."""

    recovery: Recovery
    create_window_seconds: float = 60.0
    """How long after a lost answer a sandbox may still appear. An empty look-up before is no proof."""
    outlives_machine: bool = True
    """False where a power cut on this machine ends the sandbox too (local)."""
    light: bool = False
    """True where the adapter imports no SDK, so that the guardian may load it itself."""
    max_lifetime_seconds: float | None = None
    """The longest lifetime the service accepts in one create or renew call."""
    default_lifetime_seconds: float | None = None
    """What a create gets that asks for none, where a lifetime cannot be renewed, or has a fixed end as well.
    Always finite on a hosted service."""
    recovery_options: tuple[str, ...] = ()
    """The fields of `SandboxSpec.options` without which `find` does not see what a create made. Plain values."""
    gvisor_lacks: frozenset[Capability] = frozenset()
    """Of the capabilities: what goes not together with isolation="gvisor"."""
    own_threads: bool = False
    """True where the SDK runs threads of its own, which a process that gevent has patched does not have."""
    offline: bool = False
    """True where a sandbox has no network unless it asks for one."""


class SandboxState(enum.StrEnum):
    """What a sandbox is now."""

    PENDING = "pending"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"  # exists, holds resources, runs nothing
    ENDING = "terminating"
    COMPLETED = "completed"  # its main process ended by itself with 0
    FAILED = "failed"
    GONE = "terminated"

    @property
    def terminal(self) -> bool:
        """Whether it is over: nothing will run in it again."""
        return self in (SandboxState.COMPLETED, SandboxState.FAILED, SandboxState.GONE)


class Isolation(enum.StrEnum):
    """A stronger wall than the provider's own."""

    GVISOR = "gvisor"


class NetworkMode(enum.StrEnum):
    NONE = "none"
    INTERNET = "internet"
    HOST = "host"
    ALLOW = "allow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a sandbox may reach: nothing, the public internet, the host's network, or what `allow` lists.

    An entry is a host, ``*.`` and a host (all below it), an address or a CIDR, each with ``:port`` where only
    that port is meant. A host alone means ports 80 and 443; an address or CIDR alone means every TCP port.
    """

    mode: NetworkMode = NetworkMode.NONE
    allow: tuple[str, ...] = ()

    @property
    def proxied(self) -> bool:
        """Whether lowtide's own proxy can enforce it: the public internet or an allow-list."""
        return self.mode in (NetworkMode.INTERNET, NetworkMode.ALLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedConnection:
    """A connection, datagram or name lookup of a sandbox that its network setting refused."""

    at: datetime
    host: str
    """The name that was connected to or looked up, or the address where no name is known."""
    port: int | None
    """None for a name lookup."""
    protocol: str
    """``tcp``, ``udp`` or ``dns``."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds; None leaves it to the provider."""

    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None


LABEL_PREFIX = "lowtide-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What marks a sandbox as ours, inside the create call. All of it fits Kubernetes label values.

    A sandbox counts as ours only with the full set: `lease_id`, `ledger_id` and `owner`.
    """

    lease_id: str
    ledger_id: str
    owner: str
    tags: tuple[str, ...] = ()
    session: str | None = None

    def as_dict(self) -> dict[str, str]:
        marks = {"lease": self.lease_id, "ledger": self.ledger_id, "owner": self.owner}
        if self.session is not None:
            marks["session"] = self.session
        marks.update({f"tag-{tag}": "1" for tag in self.tags})
        return {LABEL_PREFIX + key: value for key, value in marks.items()}

    @classmethod
    def from_dict(cls, labels: Mapping[str, str]) -> Labels | None:
        """The labels of one of our sandboxes, or None when the set is not complete."""
        lease, ledger, owner = (labels.get(LABEL_PREFIX + k) for k in ("lease", "ledger", "owner"))
        if not (lease and ledger and owner):
            return None
        tag = LABEL_PREFIX + "tag-"
        tags = tuple(sorted(k.removeprefix(tag) for k in labels if k.startswith(tag)))
        session = labels.get(LABEL_PREFIX + "session")
        return cls(lease_id=lease, ledger_id=ledger, owner=owner, tags=tags, session=session)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One create call. `labels.lease_id` is also the provider-side name and idempotency key."""

    labels: Labels
    image: str | None = None
    snapshot: str | None = None
    command: tuple[str, ...] | None = None  # None: the provider's own idle main process
    working_dir: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    limits: Limits = Limits()
    network: Network | None = None  # None: the provider's default
    isolation: Isolation | None = None  # None: the provider's own
    ports: tuple[int, ...] = ()
    lifetime_seconds: float | None = None
    fixed_lifetime_seconds: float | None = None
    """Beside a lifetime that is renewed: the end that no renewal moves. None: the caller set none."""
    options: Any = None
    """The provider's own frozen dataclass (e.g. `DockerOptions`), or None. Its type is `Provider.options_type`."""

    @property
    def lease_id(self) -> str:
        return self.labels.lease_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """What the provider says about one sandbox."""

    sandbox_id: str
    state: SandboxState
    labels: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    expires_at: datetime | None = None
    exit_code: int | None = None
    reason: str | None = None
    unheld: tuple[str, ...] = ()
    """Bounds that protect the machine by default and cannot be held there, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalSize:
    columns: int = 80
    rows: int = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One command. `argv` goes to no shell. `environment` comes on top of the sandbox's own."""

    argv: tuple[str, ...]
    cwd: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    user: str | None = None
    stdin: bool = False
    """False: standard input is empty. True: `write_stdin` and `close_stdin` feed it."""
    tty: TerminalSize | None = None
    drain_seconds: float = 1.0
    """How long its streams are still read after its own process has ended, while others hold them."""


STDOUT, STDERR = 1, 2


class ProcessHandle(Protocol):
    """A running command, as the provider sees it.

    A command that cannot be started counts as a shell counts it: exit code 127 (not found) or 126
    (not executable) and a line on stderr. A signal's exit code is 128 + n. A user that the sandbox does
    not know is no exit code: ValidationError, with the argument ``user``.
    """

    def output(self) -> AsyncIterator[tuple[int, bytes]]:
        """(STDOUT or STDERR, bytes) as they come. Called once.

        Ends when the command's own process has ended and its streams have, or `drain_seconds` later
        where a background job still holds them; then the attribute `streams_open` is true. What was
        written by then has been read. `exited` is true once its own process has ended. With a tty
        everything is STDOUT.
        """
        ...

    async def wait(self) -> int:
        """The exit code. Any number of callers, also after the end."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Raises BrokenPipeError once the command has closed its standard input or ended."""
        ...

    async def close_stdin(self) -> None: ...

    async def resize(self, size: TerminalSize) -> None: ...

    async def signal(self, number: int) -> None:
        """To the command's process group. Silent when it has already ended."""
        ...

    async def terminate(self, grace_seconds: float) -> None:
        """End the whole process tree, also what left the group or the session: TERM, grace, KILL. Returns when it is gone."""
        ...

    async def aclose(self) -> None:
        """Let go of what this end holds (descriptors, sockets). The command goes on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Url:
    """An address that works from here, and the headers it needs."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Around what `create` does before its first request: an error from here has made nothing."""
    try:
        yield
    except LowtideError as error:
        error.nothing_sent = True
        raise


class Provider(Protocol):
    """The primitives every provider has. Raises only `lowtide.errors`."""

    name: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
    traits: ClassVar[Traits]
    options_type: ClassVar[type | None]

    @classmethod
    def connect(cls, environ: Mapping[str, str], options: Mapping[str, Any] | None = None) -> Self:
        """Make one from environment variables and arguments. No network, no SDK import where it can wait.

        Raises AuthenticationError (what to set) or MissingDependencyError (what to install).
        """
        ...

    @property
    def account(self) -> str:
        """A short stable fingerprint of endpoint and account. Never a key, nor anything a key follows from."""
        ...

    def credentials(self) -> dict[str, str]:
        """The environment with which `connect` makes the same provider in another process. Kept in memory only.

        A variable that is empty here is taken out there.
        """
        ...

    async def create(self, spec: SandboxSpec) -> SandboxInfo:
        """Returns when the provider has accepted and the id is known; with the same lease id twice, at most one exists.

        Whatever it raises, lowtide looks for what it may have made. Only what is raised inside
        `nothing_sent` settles the lease without a look: there a provider prepares its request.
        """
        ...

    async def find(self, spec: SandboxSpec) -> SandboxInfo | None:
        """What a create with this spec made, if it can be seen now (see `Traits.recovery`)."""
        ...

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """Raises SandboxNotFoundError. Never changes the sandbox, nor its lifetime."""
        ...

    async def wait_ready(self, sandbox_id: str) -> SandboxInfo:
        """Wait until commands can run. SandboxFailedError at once, with the reason, when they never will; SandboxGone."""
        ...

    def list(self, labels: Mapping[str, str]) -> AsyncIterator[SandboxInfo]:
        """All pages, all states that still hold anything, with at least these labels. May lag; `get` is the truth."""
        ...

    async def destroy(self, sandbox_id: str, *, grace_seconds: float = 0.0) -> bool:
        """End it and everything it holds. True: ended now, confirmed. False: was already gone. Never raises for missing."""
        ...

    async def start_process(self, sandbox_id: str, spec: ProcessSpec) -> ProcessHandle:
        """Raises SandboxGone when there is nothing to run in."""
        ...

    def read_file(self, sandbox_id: str, path: str) -> AsyncIterator[bytes]:
        """Chunks of any size, memory bounded. The SandboxFileError family."""
        ...

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        size: int | None = None,
        mode: int | None = None,
    ) -> int:
        """Create parents, replace what is there, return the bytes written. Follows the sandbox's own links only."""
        ...

    async def aclose(self) -> None:
        """Let go of connections, descriptors and helper processes of this end. Touches no sandbox."""
        ...
