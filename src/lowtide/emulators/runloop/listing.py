"""Pages of a list, as every list of the service is cut: newest first, after the one that is named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from lowtide.emulators.request_check import query_number
from lowtide.emulators.runloop.model import Refused

_LARGEST_PAGE = 5000


def page(request: web.Request, found: Sequence[tuple[str, Any]]) -> tuple[list[Any], bool]:
    """The page the query asks for, of pairs of id and thing; and whether more follow."""
    limit = query_number(request, "limit", 20, lowest=1, largest=_LARGEST_PAGE)
    after = request.query.get("starting_after")
    if after:
        if after not in {key for key, _ in found}:
            raise Refused(400, f"starting_after: {after} is not in the list")
        found = list(itertools.dropwhile(lambda pair: pair[0] != after, found))[1:]
    return [one for _, one in found[:limit]], len(found) > limit
