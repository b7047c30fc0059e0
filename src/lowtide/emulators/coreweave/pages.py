"""Pages of a list: where the last one ended, as a token that means something only here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lowtide.emulators.coreweave.refusal import invalid

_DEFAULT, _LARGEST = 100, 1000
_TOKEN = re.compile(r"after:([a-z0-9-]{1,64})")


def page(
    request: Any, found: Sequence[tuple[str, Any]], *, descending: bool = False
) -> tuple[list[Any], str]:
    """The page that is asked for, of pairs of id and thing in the order of the ids; and the token of the next one."""
    if not 0 <= request.page_size <= 2**31 - 1:
        raise invalid("page_size", "must not be negative")
    size = min(request.page_size or _DEFAULT, _LARGEST)
    start = 0
    if request.page_token:
        token = _TOKEN.fullmatch(request.page_token)
        if token is None:
            raise invalid("page_token", "is not a token of this list")
        # The one it names may have gone meanwhile; then the page begins where it would stand.
        after = token[1]
        start = sum(key >= after if descending else key <= after for key, _ in found)
    rows = found[start : start + size]
    more = start + size < len(found)
    return [one for _, one in rows], f"after:{rows[-1][0]}" if more and rows else ""
