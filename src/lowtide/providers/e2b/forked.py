"""After a fork: the SDK's HTTP in plain Python, because its own does not survive one.

The SDK sends with pyqwest, whose threads belong to the process that started them. In a forked child
they do not exist, and every request would wait for them for ever. So a child whose parent has used
the SDK gets a transport of the same shape that stands on httpx, which the SDK brings along.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyqwest import Request, Response

_broken = False


def repair() -> None:
    """Make the SDK usable here. Costs nothing in a process that was not forked."""
    global _broken
    if not _broken:
        return
    from e2b.api import client_async

    from lowtide.providers.e2b import pool

    vars(client_async)["HTTPTransport"] = PlainTransport
    pool.forget()
    _broken = False


class PlainTransport:
    """`pyqwest.HTTPTransport`, as far as the SDK uses it."""

    def __init__(self, *, proxy: Any = None, read_timeout: float | None = None, **_: Any) -> None:
        import httpx

        self._client = httpx.AsyncClient(
            proxy=None if proxy is None else str(proxy.url),
            timeout=httpx.Timeout(None, connect=30.0, read=read_timeout),
            limits=httpx.Limits(max_connections=200, max_keepalive_connections=20),
            follow_redirects=False,
        )

    async def execute(self, request: Request) -> Response:
        import httpx
        import pyqwest

        content = request.content
        asked = self._client.build_request(
            request.method,
            request.url,
            headers=list(request.headers.items()),
            content=content if isinstance(content, bytes) else _all(content),
        )
        for name in ("accept", "accept-encoding", "user-agent"):  # httpx adds its own
            if name not in request.headers:
                asked.headers.pop(name, None)
        try:
            answer = await self._client.send(asked, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ConnectionError(str(error)) from error
        except httpx.TimeoutException as error:
            raise TimeoutError(str(error)) from error
        except httpx.TransportError as error:
            raise pyqwest.ReadError(str(error)) from error
        headers = pyqwest.Headers(answer.headers.multi_items())
        return pyqwest.Response(status=answer.status_code, headers=headers, content=_body(answer))

    async def aclose(self) -> None:
        await self._client.aclose()


async def _all(content: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for chunk in content:
        yield bytes(chunk)


async def _body(answer: Any) -> AsyncIterator[bytes]:
    import httpx
    import pyqwest

    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx.TimeoutException as error:
        raise TimeoutError(str(error)) from error
    except httpx.TransportError as error:
        raise pyqwest.ReadError(str(error)) from error
    finally:
        with contextlib.suppress(Exception):
            await answer.aclose()


def _notice() -> None:
    global _broken
    _broken = "e2b.api.client_async" in sys.modules


os.register_at_fork(after_in_child=_notice)
