"""Where a download goes that nobody has named a place for."""

from __future__ import annotations

import tempfile
from pathlib import Path


def new_download() -> Path:
    """A file in a new directory of its own, which whoever fails to fill it removes."""
    return Path(tempfile.mkdtemp(prefix="lowtide-download-")) / "files.zip"
