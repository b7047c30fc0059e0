"""The CoreWeave provider: sandboxes of CoreWeave's service, through the messages and stubs of its SDK."""

from __future__ import annotations

from lowtide.providers.coreweave.options import CoreWeaveOptions
from lowtide.providers.coreweave.provider import CoreWeaveProvider

__all__ = ["CoreWeaveOptions", "CoreWeaveProvider"]
