"""A channel to the server over standard input and output, where its port has no address outside.

Each line is ``NUMBER BASE64``: bytes for one connection; the first line of a number opens it, a line
without bytes ends that direction. Text, because not every way into a sandbox carries all bytes.
"""

from __future__ import annotations

import binascii
import os
import socket
import sys
import threading

_CHUNK = 48 << 10


def main(port: int) -> int:
    connections: dict[bytes, socket.socket] = {}
    lock = threading.Lock()

    def send(number: bytes, data: bytes) -> None:
        line = number + b" " + binascii.b2a_base64(data, newline=False) + b"\n"
        with lock:
            while line:
                line = line[os.write(1, line) :]

    def pump(number: bytes, connection: socket.socket) -> None:
        try:
            while data := connection.recv(_CHUNK):
                send(number, data)
        except OSError:
            pass
        send(number, b"")
        connections.pop(number, None)
        connection.close()

    send(b"0", b"ready")
    for line in sys.stdin.buffer:
        number, _, text = line.strip().partition(b" ")
        data = binascii.a2b_base64(text)
        connection = connections.get(number)
        try:
            if connection is None:
                if not data:
                    continue
                connection = connections[number] = socket.create_connection(("127.0.0.1", port), 10)
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=pump, args=(number, connection), daemon=True).start()
            if data:
                connection.sendall(data)
            else:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            if connections.pop(number, None) is None:
                send(number, b"")
    return 0
