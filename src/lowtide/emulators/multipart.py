"""The parts of a multipart body. What is none is refused as `Malformed`, whatever aiohttp raises for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from lowtide.emulators.request_check import Malformed

T = TypeVar("T")
_PIECE = 256 << 10


async def parts_of(request: web.Request) -> AsyncIterator[BodyPartReader]:
    """Each is to be read before the next. Whoever goes on to the last knows that all of the body came."""
    if not request.content_type.startswith("multipart/"):
        raise Malformed("multipart/form-data is required")
    try:
        reader = await request.multipart()
    except ValueError as error:  # a boundary of over 70 characters
        raise Malformed(f"the body is not multipart: {str(error)[-40:]}") from error
    while (part := await _read(reader.next())) is not None:
        if isinstance(part, BodyPartReader):
            yield part


async def pieces_of(part: BodyPartReader) -> AsyncIterator[bytes]:
    while piece := await _read(part.read_chunk(_PIECE)):
        yield piece


async def bytes_of(part: BodyPartReader) -> bytes:
    return bytes(await _read(part.read(decode=True)))


async def _read(work: Awaitable[T]) -> T:
    try:
        return await work
    except (ValueError, RuntimeError, AssertionError, HttpProcessingError) as error:
        raise Malformed("the body is not multipart, or not all of it") from error
