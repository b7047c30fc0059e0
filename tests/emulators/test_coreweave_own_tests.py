"""CoreWeave's own integration tests against our emulator, as its SDK's source distribution has them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cwsandbox")

SCRIPT = Path(__file__).parents[2] / "scripts" / "cwsandbox_tests"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sdks_own_tests_pass_but_those_that_fail_for_reasons_of_their_own() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=580, check=False)
    if done.returncode == 75:
        pytest.skip(f"cwsandbox's source distribution cannot be downloaded: {done.stderr[-300:]}")
    told = done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode == 0, told
    found = re.search(r"(\d+) passed, (\d+) skipped", done.stdout)
    assert found is not None, told
    # Of 86: 3 are left out (see the script); a direct connection and TLS passthrough are not there.
    assert (int(found[1]), int(found[2])) == (81, 2), told
