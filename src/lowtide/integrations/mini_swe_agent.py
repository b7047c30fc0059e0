"""mini-swe-agent: ``environment_class: lowtide.integrations.mini_swe_agent.LowtideEnvironment``. Extra ``lowtide[mini-swe-agent]``."""

from __future__ import annotations

import platform
from typing import Any, Self

from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

from lowtide import errors
from lowtide.integrations.blocking import finished
from lowtide.sandbox import Sandbox

_SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class LowtideEnvironmentConfig(BaseModel):
    """`sandbox` has any other keyword of `lowtide.Sandbox`."""

    provider: str | None = None
    image: str | None = None
    cwd: str = ""
    env: dict[str, str] = {}
    timeout: int = 30
    interpreter: list[str] = ["bash", "-c"]
    sandbox: dict[str, Any] = {}


class LowtideEnvironment:
    """One sandbox, made by its first command. It ends with this process, with `cleanup()`, or with its ``with`` block."""

    def __init__(
        self, *, config_class: type[LowtideEnvironmentConfig] = LowtideEnvironmentConfig, **kwargs: Any
    ) -> None:
        self.config = config_class(**kwargs)
        said = {
            "provider": self.config.provider,
            "container_image": self.config.image,
            "environment_variables": self.config.env or None,
            **self.config.sandbox,
        }
        self.sandbox = Sandbox(**{key: value for key, value in said.items() if value is not None})

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run the action's command; both streams in one. An error of the sandbox is told to the model, as others' are."""
        argv = [*self.config.interpreter, f"exec 2>&1\n{action.get('command', '')}"]
        try:
            done = finished(
                self.sandbox.exec(
                    argv, cwd=cwd or self.config.cwd or None, timeout_seconds=timeout or self.config.timeout
                )
            )
            output = {
                "output": done.stdout + done.stderr,
                "returncode": done.returncode,
                "exception_info": "",
            }
        except errors.LowtideError as error:
            result = getattr(error, "result", None)
            output = {
                "output": result.stdout if result is not None else "",
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {error}",
                "extra": {"exception_type": type(error).__name__, "exception": str(error)},
            }
        _raise_if_submitted(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What prompts may speak of."""
        merged: dict[str, Any] = recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)
        return merged

    def serialize(self) -> dict[str, Any]:
        """For the trajectory."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        shown = self.config.model_dump(mode="json")
        return {"info": {"config": {"environment": shown, "environment_type": kind}}}

    def cleanup(self) -> None:
        """End the sandbox. A failure is raised; any number of times."""
        self.sandbox.stop().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.sandbox.__exit__(*failure)


def _raise_if_submitted(output: dict[str, Any]) -> None:
    lines = output["output"].lstrip().splitlines(keepends=True)
    if lines and lines[0].strip() == _SUBMITTED and output["returncode"] == 0:
        submission = "".join(lines[1:])
        extra = {"exit_status": "Submitted", "submission": submission}
        raise Submitted({"role": "exit", "content": submission, "extra": extra})
