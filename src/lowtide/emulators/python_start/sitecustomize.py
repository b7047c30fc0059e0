"""Runs at the start of a Python program that an emulator's environment leads here: it shows it whom to trust.

Daytona's SDK makes its upload client with an emptied `os.environ`, so that no variable of it says which certificates to
trust. What is in the environment and not in `os.environ` is seen by that client alone. Any Python 3 runs this.
"""

import os
import sys


def _trust() -> None:
    found = os.environ.get("LOWTIDE_EMULATOR_AUTHORITY", "")
    # With SSL_CERT_FILE, which every other client reads, and which holds what this machine trusts, too.
    if os.path.isdir(found) and os.environ.get("SSL_CERT_FILE"):
        os.environ.pop("SSL_CERT_DIR", None)
        os.putenv("SSL_CERT_DIR", found)


def _go_on() -> None:
    """The program's own `sitecustomize`, which this one stands before."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    paths = list(map(os.path.abspath, sys.path))
    # After this one alone: that of another lowtide may stand before it, and each would go on with the other.
    paths = paths[paths.index(here) + 1 :] if here in paths else []
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if found is not None and found.loader is not None:
        module = importlib.util.module_from_spec(found)
        sys.modules["sitecustomize"] = module
        found.loader.exec_module(module)


_trust()
_go_on()
