"""`--network`: what the sandboxes of every emulator may reach where their SDK asks for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import lowtide.emulators
from lowtide.emulators.backing import network_of
from lowtide.errors import ValidationError
from lowtide.providers.base import Network, NetworkMode

for _package in ("daytona", "e2b", "runloop_api_client", "modal", "cwsandbox"):
    pytest.importorskip(_package)

EVERY = ("e2b", "daytona", "runloop", "modal", "coreweave")
SHUT = {
    "e2b": "import e2b; b = e2b.Sandbox.create(allow_internet_access=False); run = lambda c: b.commands.run(c).stdout",
    "daytona": (
        "import daytona; d = daytona.Daytona()\n"
        "b = d.create(daytona.CreateSandboxFromSnapshotParams(network_block_all=True))\n"
        "run = lambda c: b.process.exec(c).result"
    ),
    "coreweave": (
        "import cwsandbox; b = cwsandbox.Sandbox.run(network={'deny_egress': True})\n"
        "run = lambda c: b.exec(['sh', '-c', c]).result().stdout"
    ),
}
REACH = """
import sys
from lowtide import Sandbox
with Sandbox.run(provider=sys.argv[1]) as sandbox:
    done = sandbox.exec(["python3", "-c", sys.argv[2]]).result()
    print(done.stdout.strip())
"""
FETCH = """
import urllib.request
try: print(urllib.request.urlopen("http://127.0.0.1:%d/", timeout=10).read().decode())
except OSError: print("unreachable")
"""


@pytest.fixture
def outside() -> Iterator[int]:
    """A server on this machine, which a sandbox reaches with the machine's own network and not otherwise."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"outside")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("network", "seen"), [("none", "unreachable"), ("internet", "unreachable"), ("host", "outside")]
)
def test_the_network_the_user_chose_holds_on_every_emulator(
    tmp_path: Path, outside: int, network: str, seen: str
) -> None:
    with lowtide.emulators.start(*EVERY, plain=True, network=network, home=tmp_path) as handle:
        environment = {**os.environ, **handle.environment, "LOWTIDE_HOME": str(tmp_path / "home")}
        started = {
            name: subprocess.Popen(
                [sys.executable, "-c", REACH, name, FETCH % outside],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in EVERY
        }
        assert {
            name: one.communicate(timeout=200)[0].strip() for name, one in started.items()
        } == dict.fromkeys(EVERY, seen)


TWO = """
from lowtide import Sandbox
with Sandbox.run(provider="coreweave") as one, Sandbox.run(provider="modal") as other:
    for sandbox, word in ((one, b"one"), (other, b"other"), (one, b"one"), (other, b"other")):
        sandbox.write_file("/tmp/word", word).result()
    print(*[sandbox.exec(["cat", "/tmp/word"]).result().stdout for sandbox in (one, other)])
"""


def test_sandboxes_that_share_the_machines_network_are_not_mixed_up(tmp_path: Path) -> None:
    """The program inside listens on an abstract name, and those belong to the network."""
    with lowtide.emulators.start("coreweave", "modal", plain=True, network="host", home=tmp_path) as handle:
        environment = {**os.environ, **handle.environment, "LOWTIDE_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", TWO], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.split() == ["one", "other"], done.stderr


@pytest.mark.parametrize("name", SHUT)
def test_a_sandbox_that_asks_to_be_shut_off_is(tmp_path: Path, outside: int, name: str) -> None:
    with lowtide.emulators.start(name, plain=True, network="host", home=tmp_path) as handle:
        code = f"import shlex\n{SHUT[name]}\nprint(run('python3 -c ' + shlex.quote({FETCH % outside!r})))"
        environment = {**os.environ, **handle.environment}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.strip() == "unreachable", done.stderr


def test_what_is_said_is_understood_or_refused_before_anything_starts() -> None:
    assert network_of("none") == Network()
    assert network_of("full") == network_of("internet") == Network(mode=NetworkMode.INTERNET)
    assert network_of("host") == Network(mode=NetworkMode.HOST)
    assert network_of("allow=pypi.org,*.pythonhosted.org") == Network(
        mode=NetworkMode.ALLOW, allow=("pypi.org", "*.pythonhosted.org")
    )
    for wrong in ("", "some", "allow", "allow=127.0.0.1", "allow=*", "none=x"):
        with pytest.raises(ValidationError, match="network"):
            network_of(wrong)
    with pytest.raises(ValidationError, match="network"):
        lowtide.emulators.start("e2b", network="everything")
