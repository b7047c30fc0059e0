"""The action server's key: random for each sandbox, and known again after a restart of this process.

It follows from a secret of this lowtide home and the sandbox's own id, so that nothing secret stands in
the ledger, in a label or in the sandbox, and whoever has the home can attach.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets

from lowtide.machine import home

_FILE = "runtime-secret"


def key_for(identity: str) -> str:
    """`identity` is the sandbox's lease id, or its provider id where it has no lease."""
    return hmac.new(_secret(), identity.encode(), hashlib.sha256).hexdigest()


def _secret() -> bytes:
    path = home() / _FILE
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{_FILE}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
    try:
        os.link(temporary, path)  # the first one to do so wins; the others read it
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)
    return path.read_bytes()
