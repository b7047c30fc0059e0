"""The Daytona emulator for tests that need one."""

from __future__ import annotations

from functools import partial

from tests import hosted_emulator

needs_emulator = hosted_emulator.needed("daytona", "daytona", "aiohttp", "trustme")
serving = partial(hosted_emulator.serving, "daytona")
