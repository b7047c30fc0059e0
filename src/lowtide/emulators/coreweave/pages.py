"""Pages of a list: where the last one ended, as a token that means something only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.emulators.coreweave.refusal import invalid

_DEFAULT, _LARGEST = 100, 1000


def page(request: Any, found: Sequence[tuple[str, Any]]) -> tuple[list[Any], str]:
    """The page that is asked for, of pairs of id and thing; and the token of the next one."""
    if not 0 <= request.page_size <= 2**31 - 1:
        raise invalid("page_size", "must not be negative")
    size = min(request.page_size or _DEFAULT, _LARGEST)
    start = 0
    if request.page_token:
        ids = [key for key, _ in found]
        # The one it names may have gone meanwhile; then the page begins where it would stand.
        if not request.page_token.startswith("after:"):
            raise invalid("page_token", "is not a token of this list")
        after = request.page_token.removeprefix("after:")
        if after not in ids:
            raise invalid("page_token", "is not a token of this list")
        start = ids.index(after) + 1
    rows = found[start : start + size]
    more = start + size < len(found)
    return [one for _, one in rows], f"after:{rows[-1][0]}" if more and rows else ""
