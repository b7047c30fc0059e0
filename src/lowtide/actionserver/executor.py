"""What each action does: in the sessions' shells, in files, in interpreters."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import threading

from lowtide.actionserver import files
from lowtide.actionserver.edit import EditError, Editor, lines_of, with_lines
from lowtide.actionserver.models import (
    DEFAULT_SESSION,
    Action,
    Edit,
    EditObservation,
    ErrorObservation,
    InvalidAction,
    ListFiles,
    ListObservation,
    Metadata,
    Observation,
    Read,
    ReadObservation,
    Run,
    RunIPython,
    RunObservation,
    Write,
    WriteObservation,
)
from lowtide.actionserver.shell import HARD_SECONDS, KEYS, SOFT_SECONDS, Outcome, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from lowtide.actionserver.interpreter import Interpreters
    from lowtide.actionserver.terminal import Terminal

MAX_SESSIONS = 64


class Conflict(RuntimeError):
    """It makes sense, but not now. Status 409."""


class Executor:
    """All sessions of one server. `directory` is private to it."""

    def __init__(self, directory: str, working_dir: str) -> None:
        self.directory, self.working_dir = directory, working_dir
        self.environment = dict(os.environ)
        self.sessions: dict[str, Terminal] = {}
        self._opening = threading.Lock()
        self._interpreters: Interpreters | None = None
        self._edits = threading.Lock()
        self._editor = Editor()
        self._constants = {
            "username": _username(),
            "hostname": socket.gethostname(),
            "py_interpreter_path": shutil.which("python3"),
        }

    def execute(self, action: Action, listener: Callable[[bytes], None] | None = None) -> Observation:
        """What came of it. An action that cannot be done is an ErrorObservation; one that makes no sense raises."""
        try:
            if isinstance(action, Run):
                return self._run(action, listener)
            if isinstance(action, RunIPython):
                return self._run_ipython(action)
            if isinstance(action, Read):
                return self._read(action)
            if isinstance(action, Write):
                return self._write(action)
            if isinstance(action, Edit):
                return self._edit(action)
            if isinstance(action, ListFiles):
                path = files.resolve(action.path, self.cwd())
                found = tuple(files.names(path))
                return ListObservation(path=path, files=found, content="\n".join(found))
        except EditError as error:
            return ErrorObservation(content=str(error), error_id="edit")
        except files.BinaryFile as error:
            return ErrorObservation(content=str(error), error_id="binary-file")
        except FileNotFoundError as error:
            return ErrorObservation(content=f"there is no {error.filename}", error_id="not-found")
        except OSError as error:
            return ErrorObservation(content=f"{error.filename}: {error.strerror}", error_id="file")
        raise InvalidAction(f"{action.kind} has a request of its own: /upload_file, /download_files")

    def _run(self, action: Run, listener: Callable[[bytes], None] | None) -> Observation:
        from lowtide.actionserver.terminal import InputFull, NoShell

        hard = HARD_SECONDS if action.timeout is None else float(action.timeout)
        soft = SOFT_SECONDS if action.no_change_timeout is None else float(action.no_change_timeout)
        waits: dict[str, Any] = {
            "soft": None if action.blocking else soft,
            "hard": hard,
            "listener": listener,
        }
        try:
            if action.is_static:
                from lowtide.actionserver import oneoff

                here = self.cwd(action.session)
                cwd = files.resolve(action.cwd, here) if action.cwd else here
                if not os.path.isdir(cwd):
                    return ErrorObservation(content=f"there is no directory {cwd}", error_id="not-found")
                outcome: Outcome | None = oneoff.run(
                    action.command, cwd=cwd, environment=self.environment, hard=hard, listener=listener
                )
                return self._observed(action, outcome)
            session = self.session(action.session)
            if action.command.strip() == "":
                outcome = session.read_on(**waits)
            elif action.is_input:
                outcome = session.send(action.command, **waits)
            elif action.command.strip() in KEYS and session.shell.pending:
                outcome = session.send(action.command.strip(), **waits)
            else:
                command = action.command
                if action.cwd:
                    command = f"cd -- {quote(action.cwd)} && {{\n{command}\n}}"
                outcome = session.run(command, **waits)
        except NoShell as error:
            return ErrorObservation(content=str(error), error_id="no-shell")
        except InputFull as error:
            raise Conflict(str(error)) from None
        return self._observed(action, outcome)

    def _observed(self, action: Run, outcome: Outcome | None) -> Observation:
        if outcome is None:
            what = "to send input to" if action.is_input else "to read more from"
            return ErrorObservation(
                content=f"ERROR: no command is running in session {action.session!r}, so there is nothing {what}.",
                error_id="nothing-running",
            )
        session = self.sessions.get(action.session)
        metadata = Metadata(
            exit_code=outcome.exit_code,
            pid=session.shell.pid if session is not None else -1,
            working_dir=outcome.cwd,
            prefix=outcome.prefix,
            suffix=outcome.suffix,
            duration_seconds=round(outcome.seconds, 6),
            dropped_bytes=outcome.dropped,
            session=action.session,
            **self._constants,
        )
        return RunObservation(
            content=outcome.text, command=action.command, metadata=metadata, hidden=action.hidden
        )

    def _run_ipython(self, action: RunIPython) -> Observation:
        from lowtide.actionserver.interpreter import Missing, observation

        try:
            result = self.interpreters().run(
                action.code,
                language="ipython",
                context=action.session,
                cwd=self.cwd(action.session),
                seconds=HARD_SECONDS if action.timeout is None else float(action.timeout),
            )
        except Missing as error:
            return ErrorObservation(content=str(error), error_id="no-interpreter")
        return observation(action.code, result)

    def _read(self, action: Read) -> Observation:
        path = files.resolve(action.path, self.cwd())
        media = files.media_type(path)
        if media is not None and os.path.isfile(path):
            import base64

            data = base64.b64encode(files.read_bytes(path)).decode()
            return ReadObservation(path=path, content=f"data:{media};base64,{data}")
        text = files.read_text(path)
        start, end = action.start, action.end
        if action.view_range is not None:
            edited = self._editor.apply(
                Edit(command="view", path=path, view_range=action.view_range), path, text
            )
            return ReadObservation(path=path, content=edited.message)
        return ReadObservation(path=path, content=lines_of(text, start, end))

    def _write(self, action: Write) -> Observation:
        path = files.resolve(action.path, self.cwd())
        with self._edits:
            whole = action.start <= 0 and action.end == -1
            old = None if whole or not os.path.exists(path) else files.read_text(path)
            files.write_text(path, with_lines(old, action.content, action.start, action.end))
        return WriteObservation(path=path, content=f"{path} was written.")

    def _edit(self, action: Edit) -> Observation:
        path = files.resolve(action.path, self.cwd())
        with self._edits:
            if action.command == "view" and os.path.isdir(path):
                return EditObservation(path=path, content="\n".join(files.names(path)), prev_exist=True)
            old = files.read_text(path) if os.path.lexists(path) else None
            edited = self._editor.apply(action, path, old)
            if edited.remove:
                os.unlink(path)
            elif edited.text is not None:
                files.write_text(path, edited.text)
            if edited.remove or edited.text is not None:
                self._editor.done(action, path, old, edited)
        return EditObservation(
            path=path,
            content=edited.message,
            prev_exist=old is not None,
            old_content=old if edited.text is not None or edited.remove else None,
            new_content=edited.text,
        )

    # Sessions.

    def session(self, name: str) -> Terminal:
        from lowtide.actionserver.terminal import Terminal

        with self._opening:
            session = self.sessions.get(name)
            if session is None or session.closed:
                if len(self.sessions) >= MAX_SESSIONS:
                    raise Conflict(
                        f"there are {MAX_SESSIONS} sessions already; close one with /close_session"
                    )
                place = os.path.join(self.directory, f"session-{os.urandom(6).hex()}")
                session = self.sessions[name] = Terminal(place, self.working_dir, self.environment)
            return session

    def interpreters(self) -> Interpreters:
        from lowtide.actionserver.interpreter import Interpreters

        with self._opening:
            if self._interpreters is None:
                self._interpreters = Interpreters(self.directory, self.environment)
            return self._interpreters

    def close_session(self, name: str) -> bool:
        """False when there is none of that name."""
        with self._opening:
            session = self.sessions.pop(name, None)
        if session is not None:
            session.close(2.0)
        return session is not None

    def close(self, grace_seconds: float) -> None:
        """End everything that was started here."""
        with self._opening:
            sessions, self.sessions = list(self.sessions.values()), {}
            interpreters, self._interpreters = self._interpreters, None
        threads = [threading.Thread(target=one.close, args=(grace_seconds,)) for one in sessions]
        for thread in threads:
            thread.start()
        if interpreters is not None:
            interpreters.close()
        for thread in threads:
            thread.join()

    def cwd(self, name: str = DEFAULT_SESSION) -> str:
        session = self.sessions.get(name)
        return session.shell.cwd if session is not None else self.working_dir


def _username() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
