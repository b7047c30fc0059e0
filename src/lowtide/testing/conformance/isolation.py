"""Conformance of isolation: what every provider keeps apart, tried through the public API."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowtide import Sandbox
from lowtide.errors import SandboxFileError, SandboxGone, UnsupportedError
from lowtide.providers.base import Capability
from lowtide.testing.conformance.base import (
    ANSWER_SECONDS,
    Conformance,
    commands_inside,
    duration_token,
    requires,
    sh,
)


class IsolationConformance(Conformance):
    def test_this_machines_files_are_not_there(self, box: Sandbox, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("this machine's")
        for path in (secret, Path.home() / ".ssh", Path(__file__)):
            assert box.exec(["cat", str(path)]).result(ANSWER_SECONDS).returncode != 0
        with pytest.raises(SandboxFileError):
            box.read_file(str(secret)).result(ANSWER_SECONDS)

    def test_what_is_written_inside_stays_inside(self, box: Sandbox) -> None:
        name = f"/tmp/{secrets.token_hex(8)}"
        sh(box, f"echo x > {name}; echo x > /usr/mark || true; echo x > /etc/mark || true")
        assert not os.path.exists(name)
        assert not os.path.exists("/usr/mark")
        assert not os.path.exists("/etc/mark")

    def test_this_processes_environment_is_not_there(
        self, make_sandbox: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        secret = secrets.token_hex(8)
        monkeypatch.setenv("HOST_SECRET", secret)
        box = make_sandbox()
        script = "env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; cat /proc/[0-9]*/cmdline 2>/dev/null || true"
        assert secret not in sh(box, script)

    def test_two_sandboxes_share_neither_files_nor_processes(
        self, make_sandbox: Callable[..., Sandbox]
    ) -> None:
        one, two = make_sandbox(), make_sandbox()
        token = duration_token()
        running = one.exec(["sh", "-c", f"echo up; exec sleep {token}"])
        next(iter(running.stdout))
        for path in ("/tmp/mine", "/root/mine", "/dev/shm/mine", "/var/tmp/mine"):
            one.exec(["sh", "-c", f"echo secret > {path}"]).result(ANSWER_SECONDS)
            assert not two.exists(path).result(ANSWER_SECONDS), path
        assert token in commands_inside(one)
        assert token not in commands_inside(two)
        two.exec(["sh", "-c", "kill -9 -1"]).exception(ANSWER_SECONDS)  # may well end `two` itself
        assert running.poll() is None
        after = two.exec(["true"]).exception(ANSWER_SECONDS)
        if after is None:
            assert two.get_status() == "running"
        else:  # then it says so, and so does the service
            assert isinstance(after, SandboxGone), after
            assert two.get_status() in ("completed", "failed", "terminated")

    def test_dot_dot_and_links_stay_inside_for_the_file_api(
        self, box: Sandbox, place: str, tmp_path: Path
    ) -> None:
        secret = tmp_path / "secret"
        secret.write_text("this machine's")
        inside = sh(box, "cat /etc/passwd").encode()
        up = "../" * 40
        assert box.read_file(f"{place}/{up}etc/passwd").result(ANSWER_SECONDS) == inside
        sh(
            box,
            f"ln -s {secret} {place}/absolute; ln -s {up}etc/passwd {place}/relative; ln -s / {place}/root",
        )
        assert box.read_file(f"{place}/relative").result(ANSWER_SECONDS) == inside
        assert box.read_file(f"{place}/root/etc/passwd").result(ANSWER_SECONDS) == inside
        with pytest.raises(SandboxFileError):
            box.read_file(f"{place}/absolute").result(ANSWER_SECONDS)
        with pytest.raises(SandboxFileError):
            box.download(f"{place}/absolute", tmp_path / "out").result(ANSWER_SECONDS)
        # Writing through such a link makes a file inside, or is refused; outside nothing changes.
        box.write_file(f"{place}/absolute", b"overwritten").exception(ANSWER_SECONDS)
        box.write_file(f"{place}/{up}{secret}", b"overwritten").exception(ANSWER_SECONDS)
        assert secret.read_text() == "this machine's"

    @requires(Capability.NETWORK_NONE)
    def test_with_network_none_this_machine_is_not_reached(
        self, make_sandbox: Callable[..., Sandbox], listener: Listener
    ) -> None:
        box = make_sandbox(network="none")
        box.exec(["sh", "-c", _CONNECT, "sh", str(listener.port)], timeout_seconds=60).result(ANSWER_SECONDS)
        assert listener.visitors == 0

    @requires(Capability.NETWORK_ALLOW)
    def test_with_an_allow_list_neither_this_machine_nor_metadata_is_reached(
        self, make_sandbox: Callable[..., Sandbox], listener: Listener
    ) -> None:
        try:
            box = make_sandbox(network=["192.0.2.1", "allowed.invalid", "*.below.invalid"])
        except UnsupportedError as error:
            pytest.skip(str(error))  # the provider can, this machine or user cannot; nothing was made
        box.exec(["sh", "-c", _CONNECT, "sh", str(listener.port)], timeout_seconds=60).result(ANSWER_SECONDS)
        assert listener.visitors == 0
        if box.exec(["sh", "-c", "command -v python3"]).result(ANSWER_SECONDS).returncode != 0:
            pytest.skip("no Python in this sandbox to try with")
        code = (
            "import socket\nfor host in ('169.254.169.254', '10.255.255.1', 'localhost.invalid'):\n"
            "  try: socket.create_connection((host, 80), 5).recv(1) and print('in')\n"
            "  except OSError: pass"
        )
        assert "in\n" not in box.exec(["python3", "-c", code]).result(ANSWER_SECONDS).stdout

    @requires(Capability.NETWORK_NONE)
    def test_an_abstract_socket_of_this_machine_is_not_reached(
        self, make_sandbox: Callable[..., Sandbox]
    ) -> None:
        name = secrets.token_hex(8)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"\0{name}")
            server.listen()
            box = make_sandbox(network="none")
            if box.exec(["sh", "-c", "command -v python3"]).result(ANSWER_SECONDS).returncode != 0:
                pytest.skip("no Python in this sandbox to try with")
            code = (
                f"import socket; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + {name!r}); print('in')"
            )
            assert "in\n" not in box.exec(["python3", "-c", code]).result(ANSWER_SECONDS).stdout

    @pytest.fixture
    def listener(self) -> Iterator[Listener]:
        listener = Listener()
        try:
            yield listener
        finally:
            listener.close()


_CONNECT = """
for host in 127.0.0.1 localhost; do
  (command -v nc >/dev/null && echo hi | nc -w 3 $host $1) || true
  (command -v bash >/dev/null && bash -c "exec 3<>/dev/tcp/$host/$1 && echo hi >&3") || true
  (command -v python3 >/dev/null && python3 -c "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)" $host $1) || true
done 2>/dev/null
"""


class Listener:
    """A server on this machine's loopback that counts who comes."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.visitors = 0
        threading.Thread(target=self._serve, daemon=True).start()
        # A check that cannot see a visitor proves nothing, so the first visitor is this test itself.
        socket.create_connection(("127.0.0.1", self.port), 10).close()
        while self.visitors == 0:
            threading.Event().wait(0.01)
        self.visitors = 0

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.visitors += 1
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
