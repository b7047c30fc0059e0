"""Actions without an action server: the same core, over the provider's own terminals, files and code (E2B)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import posixpath
import secrets
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from lowtide.actionserver.edit import EditError, Editor, lines_of, with_lines
from lowtide.actionserver.files import MAX_TEXT_BYTES, media_type
from lowtide.actionserver.models import (
    DEFAULT_SESSION,
    Action,
    Download,
    DownloadObservation,
    Edit,
    EditObservation,
    ErrorObservation,
    IPythonObservation,
    ListFiles,
    ListObservation,
    Metadata,
    Observation,
    Read,
    ReadObservation,
    Run,
    RunIPython,
    RunObservation,
    Upload,
    UploadObservation,
    Write,
    WriteObservation,
)
from lowtide.actionserver.output import HeadTail
from lowtide.actionserver.shell import HARD_SECONDS, KEYS, SOFT_SECONDS, Outcome, quote
from lowtide.errors import CommandTimeoutError, SandboxFileError, UnsupportedError
from lowtide.providers.base import Url
from lowtide.providers.optional import FileKind
from lowtide.runtime.direct_shell import DirectShell
from lowtide.runtime.downloads import new_download
from lowtide.sandbox import Sandbox

_DIRECTORY = "/tmp/.lowtide-actions"  # noqa: S108 - inside the sandbox


class Direct:
    """One sandbox, as a runtime without a server holds it."""

    def __init__(self, sandbox: Sandbox, *, working_dir: str | None) -> None:
        self._sandbox = sandbox
        self._working_dir = working_dir or "/"
        self._asked_dir = working_dir
        self._sessions: dict[str, DirectShell] = {}
        self._opening = asyncio.Lock()
        self._editor = Editor()
        self._edits = asyncio.Lock()
        self._home: str | None = None

    async def open(self, *, attach: bool) -> None:
        if self._asked_dir is None:
            self._working_dir = (await self._sandbox.exec(["pwd"], check=True)).stdout.strip() or "/"
            return
        # Where only root may make it, whoever has sudo makes it and hands it over.
        make = 'mkdir -p "$0" 2>/dev/null || { sudo -n mkdir -p "$0" && sudo -n chown "$(id -u)" "$0"; }'
        await self._sandbox.exec(["sh", "-c", make, self._asked_dir], check=True)

    async def execute(self, action: Action, on_output: Callable[[str], None] | None) -> Observation:
        try:
            if isinstance(action, Run):
                return await self._run(action, on_output)
            if isinstance(action, RunIPython):
                return await self._run_ipython(action)
            if isinstance(action, Read):
                path = await self._resolve(action.path)
                media = media_type(path)
                if media is not None:
                    data = base64.b64encode(await self._read_bytes(path)).decode()
                    return ReadObservation(path=path, content=f"data:{media};base64,{data}")
                shown = await self._read(path)
                if action.view_range is not None:
                    view = Edit(command="view", path=path, view_range=action.view_range)
                    return ReadObservation(path=path, content=self._editor.apply(view, path, shown).message)
                return ReadObservation(path=path, content=lines_of(shown, action.start, action.end))
            if isinstance(action, Write):
                return await self._write(action)
            if isinstance(action, Edit):
                return await self._edit(action)
            if isinstance(action, ListFiles):
                path = await self._resolve(action.path)
                names = await self._names(path)
                return ListObservation(path=path, files=tuple(names), content="\n".join(names))
            if isinstance(action, Upload):
                return await self._upload(action)
            assert isinstance(action, Download)
            return await self._download(action)
        except EditError as error:
            return ErrorObservation(content=str(error), error_id="edit")
        except FileNotFoundError as error:
            if isinstance(action, Upload):
                raise
            return ErrorObservation(content=str(error), error_id="not-found")
        except SandboxFileError as error:
            return ErrorObservation(content=str(error), error_id="file")

    async def cancel(self, session: str, grace_seconds: float) -> bool:
        held = self._sessions.get(session)
        return held is not None and await held.interrupt(grace_seconds)

    async def url(self) -> Url:
        raise UnsupportedError(
            "this runtime has no action server: actions go through the provider's own calls",
            feature="server_url",
            alternative="Sandbox.url(port) for a server of your own",
            provider=self._sandbox.provider,
        )

    async def editor_url(self) -> str | None:
        return None

    async def stop_inside(self, seconds: float) -> None:
        await asyncio.gather(*(session.aclose() for session in self._sessions.values()))

    async def last_log(self) -> str:
        return ""

    async def aclose(self) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        await asyncio.gather(*(session.aclose() for session in sessions))

    # Commands and code.

    async def _session(self, name: str) -> DirectShell:
        async with self._opening:
            session = self._sessions.get(name)
            if session is None:
                place = f"{_DIRECTORY}/session-{secrets.token_hex(6)}"
                session = DirectShell(self._sandbox, place, self._working_dir)
                await session.start()
                self._sessions[name] = session
            return session

    async def _run(self, action: Run, on_output: Callable[[str], None] | None) -> Observation:
        hard = HARD_SECONDS if action.timeout is None else float(action.timeout)
        soft = SOFT_SECONDS if action.no_change_timeout is None else float(action.no_change_timeout)
        if action.is_static:
            return self._observed(action, await self._one_off(action, hard))
        session = await self._session(action.session)
        command = action.command
        waits = (None if action.blocking else soft, hard, on_output)
        if not command.strip():
            outcome = await session.read_on(*waits)
        elif action.is_input or (command.strip() in KEYS and session.shell.pending):
            outcome = await session.send(command.strip() if command.strip() in KEYS else command, *waits)
        else:
            if action.cwd:
                command = f"cd -- {quote(action.cwd)} && {{\n{command}\n}}"
            outcome = await session.run(command, *waits)
        return self._observed(action, outcome)

    async def _one_off(self, action: Run, hard: float) -> Outcome:
        loop = asyncio.get_running_loop()
        began, suffix = loop.time(), ""
        here = self._cwd(action.session)
        cwd = posixpath.join(here, action.cwd) if action.cwd else here
        script = 'exec bash -c "$0" 2>&1'
        try:
            process = self._sandbox.exec(["sh", "-c", script, action.command], cwd=cwd, timeout_seconds=hard)
            ran = await process
            code = ran.returncode
        except CommandTimeoutError as error:
            if error.result is None:
                raise
            ran, code, suffix = error.result, -1, f"\n[Ended after {hard:g} seconds.]"
        output = HeadTail()
        output.append(ran.stdout_bytes + ran.stderr_bytes)
        return Outcome(
            running=False,
            exit_code=code,
            taken=output.take(),
            cwd=cwd,
            seconds=loop.time() - began,
            suffix=suffix,
        )

    def _observed(self, action: Run, outcome: Outcome | None) -> Observation:
        if outcome is None:
            return ErrorObservation(
                content=f"ERROR: no command is running in session {action.session!r}.",
                error_id="nothing-running",
            )
        session = self._sessions.get(action.session)
        return RunObservation(
            content=outcome.text,
            command=action.command,
            hidden=action.hidden,
            metadata=Metadata(
                exit_code=outcome.exit_code,
                pid=session.shell.pid if session is not None else -1,
                working_dir=outcome.cwd,
                prefix=outcome.prefix,
                suffix=outcome.suffix,
                duration_seconds=round(outcome.seconds, 6),
                dropped_bytes=outcome.dropped,
                session=action.session,
            ),
        )

    async def _run_ipython(self, action: RunIPython) -> Observation:
        from lowtide.actionserver.interpreter import observation

        try:
            ran = await self._sandbox.run_code(action.code, timeout_seconds=action.timeout)
        except CommandTimeoutError as error:
            return IPythonObservation(
                content=str(error),
                code=action.code,
                error={"name": "TimeoutError", "value": str(error), "traceback": ""},
            )
        except UnsupportedError as error:
            return ErrorObservation(content=str(error), error_id="no-interpreter")
        return observation(
            action.code,
            {
                "stdout": ran.stdout,
                "stderr": ran.stderr,
                "results": [dict(bundle) for bundle in ran.results],
                "error": dict(ran.error) if ran.error is not None else None,
                "timed_out": False,
            },
        )

    # Files.

    def _cwd(self, name: str = DEFAULT_SESSION) -> str:
        session = self._sessions.get(name)
        return session.shell.cwd if session is not None else self._working_dir

    async def _resolve(self, path: str) -> str:
        if path == "~" or path.startswith("~/"):
            if self._home is None:
                told = await self._sandbox.exec(["sh", "-c", "echo ~"], check=True)
                self._home = told.stdout.removesuffix("\n") or "/"
            path = self._home + path[1:]
        return posixpath.normpath(posixpath.join(self._cwd(), path))

    async def _read_bytes(self, path: str) -> bytes:
        return bytes(await self._sandbox.read_file(path, max_bytes=MAX_TEXT_BYTES))

    async def _read(self, path: str) -> str:
        data = await self._read_bytes(path)
        if b"\0" in data[:8192]:
            raise EditError(f"{path} is a binary file; download it")
        return data.decode("utf-8", "surrogateescape")

    async def _put(self, path: str, content: str) -> None:
        await self._sandbox.write_file(path, content.encode("utf-8", "surrogateescape"))

    async def _write(self, action: Write) -> Observation:
        path = await self._resolve(action.path)
        async with self._edits:
            whole = action.start <= 0 and action.end == -1
            old = None if whole or not await self._sandbox.exists(path) else await self._read(path)
            await self._put(path, with_lines(old, action.content, action.start, action.end))
        return WriteObservation(path=path, content=f"{path} was written.")

    async def _edit(self, action: Edit) -> Observation:
        path = await self._resolve(action.path)
        async with self._edits:
            if action.command == "view":
                with contextlib.suppress(NotADirectoryError, FileNotFoundError):
                    names = await self._names(path)
                    return EditObservation(path=path, content="\n".join(names), prev_exist=True)
            old = await self._read(path) if await self._sandbox.exists(path) else None
            edited = self._editor.apply(action, path, old)
            if edited.remove:
                await self._sandbox.remove(path)
            elif edited.text is not None:
                await self._put(path, edited.text)
            if edited.remove or edited.text is not None:
                self._editor.done(action, path, old, edited)
        return EditObservation(
            path=path,
            content=edited.message,
            prev_exist=old is not None,
            old_content=old if edited.text is not None or edited.remove else None,
            new_content=edited.text,
        )

    async def _names(self, path: str) -> list[str]:
        entries = await self._sandbox.list_dir(path)
        found = [(entry.kind is not FileKind.DIRECTORY, entry.name) for entry in entries]
        found.sort(key=lambda item: (item[0], item[1].lower(), item[1]))
        return [name if is_file else f"{name}/" for is_file, name in found]

    async def _upload(self, action: Upload) -> Observation:
        source = Path(action.source)
        if not source.exists():  # noqa: ASYNC240
            raise FileNotFoundError(2, "there is no such file or directory here", action.source)
        if source.is_dir():  # noqa: ASYNC240
            await self._sandbox.upload(source, action.destination)
            size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())  # noqa: ASYNC240
        else:
            await self._sandbox.upload(source, posixpath.join(action.destination, source.name))
            size = source.stat().st_size  # noqa: ASYNC240
        return UploadObservation(
            content=f"{action.source} is in {action.destination}.", path=action.destination, size=size
        )

    async def _download(self, action: Download) -> Observation:
        from lowtide.actionserver.files import write_zip

        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / (posixpath.basename(action.path.rstrip("/")) or "files")
            await self._sandbox.download(action.path, copy)
            destination = Path(action.destination or new_download())
            with destination.open("wb") as file:  # noqa: ASYNC230
                await asyncio.to_thread(write_zip, str(copy), file)
        with zipfile.ZipFile(destination) as made:
            size = sum(entry.file_size for entry in made.infolist())
        return DownloadObservation(
            content=f"{action.path} is in {destination}.",
            path=action.path,
            destination=str(destination),
            size=size,
        )
