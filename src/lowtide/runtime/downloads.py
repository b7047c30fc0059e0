"""Where a download goes that nobody has named a place for."""

from __future__ import annotations

import tempfile
from pathlib import Path


def new_download() -> Path:
    """A file in a directory of its own. Made once there is something to put there: a download that fails leaves none."""
    return Path(tempfile.mkdtemp(prefix="lowtide-download-")) / "files.zip"
