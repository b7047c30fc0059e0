"""Python where there is no ipykernel: a namespace that is kept, and the last expression's value."""

from __future__ import annotations

import ast
import base64
import json
import linecache
import os
import sys
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__, "__doc__": None}
FORMS = (("_repr_html_", "text/html"), ("_repr_markdown_", "text/markdown"), ("_repr_svg_", "image/svg+xml"))


def shown(value: Any) -> dict[str, Any]:
    bundle = {"text/plain": repr(value)}
    for method, mime in FORMS:
        if hasattr(value, method) and not isinstance(value, type):
            bundle[mime] = getattr(value, method)()
    if hasattr(value, "_repr_png_") and not isinstance(value, type):
        bundle["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return {mime: str(data) for mime, data in bundle.items() if data is not None}


def run(code: str, count: int) -> list[dict[str, Any]]:
    name = f"<code {count}>"
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    exec(compile(tree, name, "exec"), namespace)  # noqa: S102 - what it is for
    if not isinstance(last, ast.Expr):
        return []
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)  # noqa: S307
    if value is None:
        return []
    namespace["_"] = value
    return [shown(value)]


def main(requests: int, answers: int, mark: str) -> None:
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    sys.argv = [""]
    own = os.getpid()
    for count, line in enumerate(os.fdopen(requests, "r", encoding="utf-8"), 1):
        request = json.loads(line)
        answer: dict[str, Any] = {"execution_count": count, "results": [], "error": None}
        try:
            if request.get("cwd"):
                os.chdir(request["cwd"])
            answer["results"] = run(request["code"], count)
        except BaseException as error:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
                frames = frames.tb_next
            told = "".join(traceback.format_exception(type(error), error, frames))
            answer["error"] = {"name": type(error).__name__, "value": str(error), "traceback": told}
        if os.getpid() != own:  # a child that the code forked and did not end: it has no answer to give
            os._exit(0)
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
            _write(number, f"\036{mark}\037".encode())
        _write(answers, (json.dumps(answer) + "\n").encode())


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
