"""Code in the sandbox's stateful interpreter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.daytona.errors import SERVICE
from lowtide.providers.optional import CodeResult

if TYPE_CHECKING:
    from daytona import AsyncSandbox

DEFAULT_SECONDS = 300.0
_CALL_SECONDS = 30.0


async def run(
    box: AsyncSandbox, code: str, *, language: str, context: str | None, timeout_seconds: float | None
) -> CodeResult:
    if language != "python":
        raise errors.UnsupportedError(
            f"Daytona's stateful interpreter runs Python, not {language}",
            feature=f"code in {language}",
            alternative="exec() of the language's own program",
            provider="daytona",
            sandbox_id=box.id,
        )
    seconds = timeout_seconds or DEFAULT_SECONDS
    chosen: dict[str, Any] = {}
    if context is not None:
        chosen["context"] = await _context(box, context)
    running = box.code_interpreter.run_code(code, timeout=max(1, math.ceil(seconds)), **chosen)
    try:
        ran = await SERVICE.within(seconds + _CALL_SECONDS, running, "code", box.id)
    except Exception as error:
        if "timed out" in str(error) and "Execution" in str(error):
            raise errors.CommandTimeoutError(
                f"the code was given up after {seconds:g} seconds", provider="daytona", sandbox_id=box.id
            ) from error
        raise
    return CodeResult(
        stdout=ran.stdout,
        stderr=ran.stderr,
        error=(
            {"name": ran.error.name, "value": ran.error.value, "traceback": ran.error.traceback}
            if ran.error is not None
            else None
        ),
    )


async def _context(box: AsyncSandbox, context_id: str) -> Any:
    listing = box.code_interpreter.list_contexts(request_timeout=_CALL_SECONDS)
    for known in await SERVICE.within(_CALL_SECONDS, listing, "list contexts", box.id):
        if known.id == context_id:
            return known
    raise errors.ValidationError(
        f"there is no interpreter context {context_id!r}", argument="context", provider="daytona"
    )
