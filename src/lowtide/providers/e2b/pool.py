"""The SDK's connections: one bounded pool for all providers here, and none left when the last has gone.

The SDK keeps its pools in the module, for as long as the process lives. They are shared by everybody
in the process who uses the SDK, so they are not closed from here: they are taken out of the SDK's
tables, and their sockets close when nobody holds them any more.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

_TABLES = ("_transports", "_pools", "_httpx_transports")

_lock = threading.Lock()
_users: set[int] = set()


def join(user: object) -> None:
    """Somebody uses the SDK from now on."""
    with _lock:
        _users.add(id(user))


def leave(user: object) -> None:
    """Nobody is left after the last one: then the SDK starts with new connections, and the old ones close."""
    with _lock:
        if id(user) not in _users:
            return
        _users.discard(id(user))
        if _users:
            return
    forget()


def forget() -> None:
    from e2b.api import client_async

    lock: Any = getattr(client_async, "_transport_lock", _lock)
    with lock:
        for name in _TABLES:
            table = getattr(client_async, name, None)
            if isinstance(table, dict):
                table.clear()
    gc.collect()  # the SDK's clients are cycles, and hold on to their pool until somebody looks


def _forget_users() -> None:
    global _lock
    _lock = threading.Lock()
    _users.clear()


os.register_at_fork(after_in_child=_forget_users)
