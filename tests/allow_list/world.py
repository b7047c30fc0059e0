"""A small internet in two network namespaces: a machine that runs lowtide, and everything it could reach.

Nothing leaves this computer: the namespaces are joined to each other and to nothing else, and end with their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINE, GATEWAY, NAMESERVER = "45.77.1.2", "45.77.1.1", "9.9.9.9"
GOOD, OTHER, PRIVATE, METADATA = "93.184.216.34", "93.184.216.35", "10.1.2.3", "169.254.169.254"
SHARED = "100.100.100.200"  # a cloud's metadata service that is not link-local
SECOND, ROUTED, ROUTED6 = "45.77.1.3", "45.90.0.7", "2a01:4f8:9::7"  # of the machine as well
MACHINE6, GATEWAY6, GOOD6 = "2a01:4f8:1::2", "2a01:4f8:1::1", "2606:2800:220:1::1"
NOT_PUBLIC = {
    "private_10": PRIVATE,
    "private_172": "172.16.0.9",
    "private_192": "192.168.7.7",
    "carrier_grade_nat": "100.64.0.1",
    "metadata": METADATA,
    "shared_metadata": SHARED,
    "azure_metadata": "168.63.129.16",
    "benchmarking": "198.18.77.77",
    "unique_local": "fd00:ec2::254",
    "unique_local_of_a_home": "fd12:3456::1",
    "site_local": "fec0::1",
    "nat64": "64:ff9b::a9fe:a9fe",
    "local_nat64": "64:ff9b:1::a9fe:a9fe",
    "six_to_four": "2002:a9fe:a9fe::1",
    "teredo": "2001:0:a9fe:a9fe::1",
    "documentation_6": "2001:db8::1",
    "ipv4_compatible": "::a9fe:a9fe",
    "outside_global_unicast": "4000::1",
}
"""The world has all of these addresses, and answers on them: only a refusal keeps them from a sandbox."""
PORTS = (22, 80, 443, 5432, 8443)
NAMES = {
    "good.example": [GOOD],
    "evil.example": [OTHER],
    "private.example": [PRIVATE],
    "meta.example": [METADATA],
    "shared.example": [SHARED],
    "loop.example": ["127.0.0.1"],
    "zero.example": ["0.0.0.0"],
    "mixed.example": ["127.0.0.1", METADATA, GOOD],
    "self.example": [MACHINE],
    "second.example": [SECOND],
    "many.example": ["10.1.2.3", "192.168.7.7", "172.16.0.9", "100.64.0.1"],
}
ALIASES = {"alias.example": "meta.example", "alias-of-self.example": "self.example"}
"""Answered as other servers do: with a CNAME, and with the addresses of the name it leads to."""
NAMES6 = {
    "mapped.example": "::ffff:127.0.0.1",
    "nat64.example": "64:ff9b::a9fe:a9fe",
    "local6.example": "fd00:ec2::254",
    "six.example": GOOD6,
}


def run_on_the_machine(
    command: Sequence[str], seconds: float, files: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it on the machine of a world that is made for it. "{log}" in the command is where the world writes.

    The world serves `files`, a folder, below ``http://good.example/files/``.
    """
    with tempfile.TemporaryDirectory(prefix="ltw-") as folder:
        os.chmod(folder, 0o755)
        log = Path(folder, "log")
        log.touch(0o644)
        Path(folder, "resolv.conf").write_text(f"nameserver {NAMESERVER}\noptions timeout:1 attempts:2\n")
        with _inhabited(log, files) as world:
            inside = [
                f"ip link add m0 type veth peer name w0 netns {world}",
                f"ip addr add {MACHINE}/24 dev m0",
                f"ip addr add {SECOND}/24 dev m0",
                f"ip addr add {MACHINE6}/64 dev m0 nodad",
                "ip link set lo up",
                "ip link set m0 up",
                f"ip route add local {ROUTED}/24 dev lo src {MACHINE}".replace(".7/", ".0/"),
                f"ip -6 route add local {ROUTED6}/64 dev lo".replace("::7/", "::/"),
                f"nsenter -t {world} -n ip addr add {GATEWAY}/24 dev w0",
                f"nsenter -t {world} -n ip addr add {GATEWAY6}/64 dev w0 nodad",
                f"nsenter -t {world} -n ip link set w0 up",
                f"ip route add default via {GATEWAY}",
                f"ip -6 route add default via {GATEWAY6}",
                f"mount --bind {folder}/resolv.conf /etc/resolv.conf",
                'exec "$@"',
            ]
            return subprocess.run(
                [
                    "unshare",
                    "-n",
                    "-m",
                    "sh",
                    "-ec",
                    "\n".join(inside),
                    "sh",
                    *(part.replace("{log}", str(log)) for part in command),
                ],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )


@contextlib.contextmanager
def _inhabited(log: Path, files: Path | None) -> Iterator[int]:
    command = ["unshare", "-n", sys.executable, "-m", "tests.allow_list.world", str(log), str(files or "")]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------- the world itself


async def main(log: str, files: str = "") -> None:
    for command in (
        "ip link set lo up",
        *(f"ip addr add {a} dev lo" for a in (NAMESERVER, GOOD, OTHER, GOOD6, *NOT_PUBLIC.values())),
    ):
        subprocess.run(command.split(), check=True)
    loop = asyncio.get_running_loop()

    def write(**details: object) -> None:
        with open(log, "a") as file:
            file.write(json.dumps(details) + "\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("sockname")[:2]
        with contextlib.suppress(ConnectionError):
            if port == 22:
                writer.write(b"SSH-2.0-world\r\n")
            while data := await reader.read(1 << 16):
                write(address=address, port=port, data=data.decode("latin-1"))
                if port in (22, 5432):
                    writer.write(data)
                elif b"/big" in data:
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + bytes(30_000_000))
                    await writer.drain()
                    break
                elif files and data.startswith(b"GET /files/"):
                    path = data.split()[1].decode().removeprefix("/files/")
                    file = Path(files, path, "index.html" if path.endswith("/") else "")
                    if not file.is_file():
                        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                        continue
                    kind = "text/html" if path.endswith("/") else "application/octet-stream"
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {file.stat().st_size}\r\n\r\n"
                    writer.write(head.encode())
                    await writer.drain()
                    with file.open("rb") as opened:
                        await loop.sendfile(writer.transport, opened)
                elif port == 80:
                    body = f"world {address}".encode()
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n"
                    if b"/redirect" in data:
                        head = (
                            "HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n"
                        )
                        body = b""
                    writer.write(head.encode() + b"\r\n" + body)
                    if b"connection: close" in data.lower():
                        break
                else:
                    writer.write(b"world")
                await writer.drain()
            # As servers do: ended with bytes unread, the connection would be reset and the answer lost with it.
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
        writer.close()

    class Names(asyncio.DatagramProtocol):
        changes = 0.0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            labels, at = [], 12
            while data[at]:
                labels.append(data[at + 1 : at + 1 + data[at]].decode())
                at += 1 + data[at]
            (kind,) = struct.unpack_from(">H", data, at + 1)
            name = ".".join(labels).lower()
            write(query=name)
            alias = ALIASES.get(name)
            found = NAMES.get(alias or name, [GOOD] if name.endswith(".wild.example") else [])
            if (
                name == "rebind.example"
            ):  # public for whoever looks first, inside for whoever looks again later
                self.changes = self.changes or time.monotonic() + 5
                found = [GOOD] if time.monotonic() < self.changes else [METADATA]
            packed = [socket.inet_aton(a) for a in found] if kind == 1 else []
            if kind == 28 and name in NAMES6:
                packed = [socket.inet_pton(socket.AF_INET6, NAMES6[name])]
            code = 0 if found or name in NAMES6 else 3
            answers = [struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(a)) + a for a in packed]
            if alias is not None:
                to = b"".join(bytes([len(part)]) + part.encode() for part in alias.split(".")) + b"\0"
                cname = struct.pack(">HHHIH", 0xC00C, 5, 1, 0, len(to)) + to
                answers = [cname, *(to + one[2:] for one in answers)]
            head = data[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(answers), 0, 0) + data[12 : at + 5]
            self.transport.sendto(head + b"".join(answers), addr)  # type: ignore[attr-defined]

    class Echo(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            self.transport.sendto(b"world " + data, addr)  # type: ignore[attr-defined]

    for port in PORTS:
        await asyncio.start_server(serve, ["0.0.0.0", "::"], port)
    await loop.create_datagram_endpoint(Names, local_addr=(NAMESERVER, 53))
    await loop.create_datagram_endpoint(Echo, local_addr=(GOOD, 4433))
    print("ready", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
