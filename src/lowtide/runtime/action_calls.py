"""A method for each action of a runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowtide import validate
from lowtide.actionserver.models import (
    DEFAULT_SESSION,
    Action,
    Download,
    Edit,
    ErrorObservation,
    ListFiles,
    Observation,
    Read,
    Run,
    RunIPython,
    RunObservation,
    Upload,
    Write,
)
from lowtide.actionserver.shell import quote
from lowtide.operation import Operation


class ActionCalls:
    """Over `_run`, which takes any action."""

    async def _run(self, action: Action, on_output: Callable[[str], None] | None) -> Observation:
        raise NotImplementedError

    def run(
        self, action: Action, *, on_output: Callable[[str], None] | None = None
    ) -> Operation[Observation]:
        """Any action. `on_output` gets a command's output as it appears, on lowtide's own thread."""
        return Operation.start(self._run(action, on_output))

    def run_command(
        self,
        command: str,
        *,
        timeout: float | None = None,
        session: str = DEFAULT_SESSION,
        is_input: bool = False,
        is_static: bool = False,
        blocking: bool = False,
        cwd: str | None = None,
        no_change_timeout: float | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> Operation[RunObservation | ErrorObservation]:
        """A command in the session's shell: `.content`, `.exit_code`, `.metadata`. See `Run`."""
        action = Run(
            command=command,
            timeout=timeout,
            session=session,
            is_input=is_input,
            is_static=is_static,
            blocking=blocking,
            cwd=cwd,
            no_change_timeout=no_change_timeout,
        )
        return self.run(action, on_output=on_output)  # type: ignore[return-value]

    def run_ipython(
        self, code: str, *, timeout: float | None = None, session: str = DEFAULT_SESSION
    ) -> Operation[Observation]:
        return self.run(RunIPython(code=code, timeout=timeout, session=session))

    def read(
        self, path: str, *, start: int = 0, end: int = -1, view_range: Sequence[int] | None = None
    ) -> Operation[Observation]:
        shown = list(view_range) if view_range is not None else None
        return self.run(Read(path=path, start=start, end=end, view_range=shown))

    def write(self, path: str, content: str, *, start: int = 0, end: int = -1) -> Operation[Observation]:
        return self.run(Write(path=path, content=content, start=start, end=end))

    def edit(self, command: str, path: str, **arguments: Any) -> Operation[Observation]:
        """view, create, str_replace, insert or undo_edit; see `Edit` for the arguments."""
        return self.run(Edit(command=command, path=path, **arguments))

    def list_files(self, path: str = ".") -> Operation[Observation]:
        return self.run(ListFiles(path=path))

    def upload(self, source: str | os.PathLike[str], destination: str) -> Operation[Observation]:
        """A file or directory of this machine into that directory of the sandbox."""
        return self.run(Upload(source=os.fspath(source), destination=destination))

    def download(
        self, path: str, destination: str | os.PathLike[str] | None = None
    ) -> Operation[Observation]:
        """A file or directory of the sandbox as a zip; its place is `.destination`."""
        where = os.fspath(destination) if destination is not None else None
        return self.run(Download(path=path, destination=where))

    def add_env_vars(
        self, variables: Mapping[str, str], *, session: str = DEFAULT_SESSION
    ) -> Operation[RunObservation | ErrorObservation]:
        """Set for all later commands of the session."""
        checked = validate.environment("variables", variables)
        exports = "\n".join(f"export {name}={quote(value)}" for name, value in checked.items())
        return self.run_command(exports or ":", session=session)
