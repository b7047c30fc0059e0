"""The Modal emulator for tests that need one."""

from __future__ import annotations

from functools import partial

from tests import hosted_emulator

needs_emulator = hosted_emulator.needed("modal", "modal", "aiohttp", "trustme")
serving = partial(hosted_emulator.serving, "modal")
