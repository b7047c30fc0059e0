"""The E2B emulator for tests that need one."""

from __future__ import annotations

from functools import partial

from tests import hosted_emulator

needs_emulator = hosted_emulator.needed("e2b", "e2b", "e2b_code_interpreter", "aiohttp", "trustme")
serving = partial(hosted_emulator.serving, "e2b")
