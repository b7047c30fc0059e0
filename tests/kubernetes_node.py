"""The real Kubernetes node of the tests: where it is, and the one reason for which its tests are skipped."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlsplit

import pytest

IMAGE = os.environ.get("LOWTIDE_TEST_IMAGE", "lowtide-test:latest")


@cache
def missing() -> str | None:
    """Why there is no node to test on, None when there is one."""
    if not os.environ.get("KUBECONFIG"):
        return "no Kubernetes node: KUBECONFIG is not set (scripts/engines up kube)"
    from lowtide.errors import LowtideError
    from lowtide.providers.kubernetes.access import Access

    try:
        server = urlsplit(Access.resolve(os.environ, {}).server)
        socket.create_connection((server.hostname or "", server.port or 443), 5).close()
    except (LowtideError, OSError) as error:
        return f"no Kubernetes node: what KUBECONFIG names does not answer ({type(error).__name__})"
    return None


needs_node = [pytest.mark.engine, pytest.mark.skipif(missing() is not None, reason=missing() or "")]
