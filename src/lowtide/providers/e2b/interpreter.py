"""Code in the sandbox's stateful interpreter, through E2B's code-interpreter SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide import errors
from lowtide.providers.e2b.errors import SERVICE
from lowtide.providers.optional import CodeResult

if TYPE_CHECKING:
    from e2b import AsyncSandbox

DEFAULT_SECONDS = 300.0
TEMPLATE = "code-interpreter-v1"

_MIME = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "latex": "text/latex",
    "json": "application/json",
    "javascript": "application/javascript",
}


async def run(
    box: AsyncSandbox, code: str, *, language: str, context: str | None, timeout_seconds: float | None
) -> CodeResult:
    from e2b_code_interpreter import AsyncSandbox as Interpreter
    from e2b_code_interpreter.models import Context

    interpreter = Interpreter(
        sandbox_id=box.sandbox_id,
        sandbox_domain=box.sandbox_domain,
        envd_version=box._envd_version,
        envd_access_token=box._envd_access_token,
        traffic_access_token=box.traffic_access_token,
        connection_config=box.connection_config,
    )
    seconds = timeout_seconds or DEFAULT_SECONDS
    chosen: dict[str, Any] = {}
    if context is not None:
        chosen["context"] = Context(context_id=context, language=language, cwd="")
    elif language != "python":
        chosen["language"] = language
    try:
        ran = await SERVICE.within(
            seconds + 30.0, interpreter.run_code(code, timeout=seconds, **chosen), "code", box.sandbox_id
        )
    except Exception as error:
        said = str(error)
        if "Execution timed out" in said:
            words = f"the code was given up after {seconds:g} seconds"
            raise SERVICE.error(errors.CommandTimeoutError, words, box.sandbox_id) from error
        if "port is not open" in said:
            raise SERVICE.error(
                errors.UnsupportedError,
                "this sandbox's template has no code interpreter",
                box.sandbox_id,
                feature="code",
                alternative=f'provider_options={{"template": "{TEMPLATE}"}}',
            ) from error
        raise
    return CodeResult(
        stdout="".join(ran.logs.stdout),
        stderr="".join(ran.logs.stderr),
        results=tuple(_bundle(result) for result in ran.results),
        error=(
            {"name": ran.error.name, "value": ran.error.value, "traceback": ran.error.traceback}
            if ran.error is not None
            else None
        ),
        execution_count=ran.execution_count,
    )


def _bundle(result: Any) -> dict[str, Any]:
    found = {
        mime: value for name, mime in _MIME.items() if (value := getattr(result, name, None)) is not None
    }
    if result.data is not None:
        found["application/vnd.e2b.data+json"] = result.data
    if result.chart is not None:
        found["application/vnd.e2b.chart+json"] = result.chart.to_dict()
    return {**found, **(result.extra or {})}
