"""smolagents: code agents whose code runs in a lowtide sandbox. Needs the extra ``lowtide[smolagents]``.

with LowtideExecutor(provider="e2b") as executor:
    CodeAgent(tools=[], model=model, executor=executor).run("…")
"""

from __future__ import annotations

import base64
import re
from io import BytesIO
from typing import TYPE_CHECKING, Any, Self

from smolagents.local_python_executor import CodeOutput
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.tools import get_tools_definition_code
from smolagents.utils import AgentError

from lowtide import errors
from lowtide.integrations.blocking import finished
from lowtide.sandbox import Sandbox

if TYPE_CHECKING:
    from typing import Unpack

    from lowtide.defaults import SandboxOptions

_OPTIONAL_IMPORT = re.compile(r"^(import (?:numpy|PIL)\b.*)$", re.MULTILINE)
_IMAGES = ("image/png", "image/jpeg")


def _with_interpreter(options: SandboxOptions) -> SandboxOptions:
    """E2B's default template has no interpreter: unless told what to start from, take the one its own SDK takes for code."""
    told = options.keys() & {"provider_options", "snapshot", "defaults"}
    named = isinstance(options.get("provider"), str | None) and Sandbox(**options).provider == "e2b"
    return (
        {**options, "provider_options": {"template": "code-interpreter-v1"}}
        if named and not told
        else options
    )


class LowtideExecutor(RemotePythonExecutor):
    """Runs an agent's code in an interpreter that keeps its state, on any provider.

    `options` are the keywords of `lowtide.Sandbox`. It ends with this process, with `cleanup()`, or with its ``with``
    block: never in ``__del__``, which may not be called.
    """

    def __init__(
        self,
        additional_imports: list[str] | None = None,
        logger: Any = None,
        allow_pickle: bool = False,
        timeout_seconds: float | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        super().__init__(additional_imports or [], logger or AgentLogger(LogLevel.ERROR), allow_pickle)
        self.sandbox = Sandbox(**_with_interpreter(options))
        self._timeout_seconds = timeout_seconds
        try:
            self.installed_packages = self.install_packages(self.additional_imports)
        except BaseException:
            self.sandbox.stop().exception()  # nobody holds an executor that was not made
            raise

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        """Run it; what the code raised is an `AgentError` that the model is told of."""
        try:
            ran = finished(self.sandbox.run_code(code, timeout_seconds=self._timeout_seconds))
        except errors.CommandTimeoutError as error:
            raise AgentError(str(error), self.logger) from error
        if ran.error:
            if ran.error.get("name") == self.FINAL_ANSWER_EXCEPTION:
                answer = self._deserialize_final_answer(str(ran.error.get("value")), self.allow_pickle)
                return CodeOutput(output=answer, logs=ran.stdout, is_final_answer=True)
            told = ran.error.get("traceback") or f"{ran.error.get('name')}: {ran.error.get('value')}"
            text = "\n".join(map(str, told)) if isinstance(told, list | tuple) else str(told)
            raise AgentError(f"{ran.stdout}\nExecuting code yielded an error:\n{text}", self.logger)
        output = _value(ran.results[-1]) if ran.results else None
        return CodeOutput(output=output, logs=ran.stdout, is_final_answer=False)

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Define them in the sandbox. `final_answer` alone installs nothing: it uses numpy and pillow where they are."""
        if "final_answer" in tools:
            self._patch_final_answer_with_exception(tools["final_answer"])
        others = [tool for name, tool in tools.items() if name != "final_answer"]
        needed = {package for tool in others for package in tool.to_dict()["requirements"]}
        missing = sorted(needed - {"smolagents", *self.installed_packages})
        self.installed_packages += self.install_packages(missing)
        code = _OPTIONAL_IMPORT.sub(
            r"try:\n    \1\nexcept ImportError:\n    pass", get_tools_definition_code(tools)
        )
        self.logger.log(self.run_code_raise_errors(code).logs)

    def install_packages(self, additional_imports: list[str]) -> list[str]:
        """With pip, in the sandbox: it needs a network that reaches an index."""
        if additional_imports:
            names = ["pillow" if name == "PIL" else name for name in additional_imports]
            done = finished(self.sandbox.exec(["python3", "-m", "pip", "install", "-q", *names]))
            if done.returncode != 0:
                raise AgentError(
                    f"pip could not install {', '.join(additional_imports)}: {done.stderr}", self.logger
                )
        return additional_imports

    def cleanup(self) -> None:
        """End the sandbox. A failure is raised; any number of times."""
        self.sandbox.stop().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.sandbox.__exit__(*failure)


def _value(bundle: Any) -> Any:
    for kind in _IMAGES:
        if kind in bundle:
            import PIL.Image

            return PIL.Image.open(BytesIO(base64.b64decode(bundle[kind])))
    text = bundle.get("text/plain")
    return text if text is not None else next(iter(bundle.values()), None)
