"""The routes: what each request does with sessions, files and interpreters."""

from __future__ import annotations

import errno
import os
import threading
import time
from _operator import _compare_digest as compare_digest  # hmac would load OpenSSL for it

from lowtide.actionserver import files
from lowtide.actionserver.checks import is_seconds
from lowtide.actionserver.executor import Conflict, Executor
from lowtide.actionserver.http import HttpError, Request, Response, multipart_file
from lowtide.actionserver.models import DEFAULT_SESSION, Action, InvalidAction
from lowtide.actionserver.output import Pieces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OPEN = ("/alive", "/server_info")


class App:
    """One server. `directory` is its private place; `key` is held here and nowhere else."""

    def __init__(self, key: str, directory: str, working_dir: str, editor_port: int) -> None:
        self._key = key.encode()
        self._editor_port = editor_port
        self.executor = Executor(directory, working_dir)
        self._token: str | None = None
        self._starting_editor = threading.Lock()
        self._started = self._used = time.monotonic()
        self._busy = 0
        self._routes: dict[tuple[str, str], Callable[[Request, Response], None]] = {
            ("GET", "/alive"): self._alive,
            ("GET", "/server_info"): self._server_info,
            ("POST", "/execute_action"): self._execute_action,
            ("POST", "/cancel"): self._cancel,
            ("POST", "/upload_file"): self._upload,
            ("GET", "/download_files"): self._download,
            ("POST", "/list_files"): self._list,
            ("GET", "/vscode/connection_token"): self._connection_token,
            ("GET", "/sessions"): self._list_sessions,
            ("POST", "/close_session"): self._close_session,
            ("POST", "/shutdown"): self._shutdown,
        }

    def handle(self, request: Request, response: Response) -> None:
        route = self._routes.get((request.method, request.path))
        if request.path not in OPEN:
            given = request.headers.get("x-session-api-key", "")
            if not compare_digest(given.encode("latin-1", "replace"), self._key):
                raise HttpError(403, "the header X-Session-API-Key is missing or wrong")
            request.trust()
            self._used = time.monotonic()
        if route is None:
            if any(path == request.path for _, path in self._routes):
                raise HttpError(405, f"{request.path} does not take {request.method}")
            raise HttpError(404, f"there is no {request.path}")
        self._busy += 1
        try:
            route(request, response)
        except (InvalidAction, files.BadPath) as error:
            raise HttpError(400, str(error)) from None
        except UnicodeEncodeError as error:
            raise HttpError(400, f"half a character where text was expected, at {error.start}") from None
        except files.TooLarge as error:
            raise HttpError(413, str(error)) from None
        except FileNotFoundError as error:
            raise HttpError(404, f"there is no {error.filename}") from None
        except PermissionError as error:
            raise HttpError(403, f"the sandbox's user may not open {error.filename}") from None
        except Conflict as error:
            raise HttpError(409, str(error)) from None
        except (HttpError, ConnectionError):
            raise
        except OSError as error:  # a directory in the way, a name too long, a full disk: it is the sandbox's
            if error.errno is None or error.strerror is None:
                raise
            status = {errno.ENAMETOOLONG: 400, errno.ENOSPC: 507, errno.EDQUOT: 507}.get(error.errno, 409)
            raise HttpError(status, f"{error.filename or request.path}: {error.strerror}") from None
        except Exception as error:
            import traceback

            traceback.print_exc()  # into the server's log
            raise HttpError(500, f"{type(error).__name__}: {error}") from None
        finally:
            self._busy -= 1
            if request.path not in OPEN:
                self._used = time.monotonic()

    # What people ask about the server.

    def _alive(self, request: Request, response: Response) -> None:
        response.reply(200, {"status": "ok"})

    def _server_info(self, request: Request, response: Response) -> None:
        from lowtide.actionserver.resources import resources

        now = time.monotonic()
        response.reply(
            200,
            {
                "uptime": now - self._started,
                "idle_time": 0.0 if self._busy > 1 else now - self._used,
                "resources": resources(self.executor.working_dir),
            },
        )

    # Actions.

    def _execute_action(self, request: Request, response: Response) -> None:
        body = request.json()
        action = Action.from_json(body.get("action") if isinstance(body, dict) else body)
        if "text/event-stream" in request.headers.get("accept", ""):
            self._stream(action, response)
        else:
            response.reply(200, self.executor.execute(action).to_json())

    def _stream(self, action: Action, response: Response) -> None:
        """Output as it appears, as events of an SSE stream; the last event is the observation."""
        import codecs

        pieces = Pieces()

        def work() -> None:
            try:
                pieces.end(self.executor.execute(action, pieces.put))
            except Exception as error:
                pieces.end(error)

        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        threading.Thread(target=work, name="action", daemon=True).start()
        item = pieces.get()
        if isinstance(item, Exception):
            raise item
        response.begin("text/event-stream")
        try:
            while isinstance(item, bytes):
                self._event(response, "output", {"text": decoder.decode(item)})
                item = pieces.get()
        finally:
            pieces.stop()  # whoever listened has left: nothing more is kept for it
        if isinstance(item, Exception):
            self._event(response, "error", {"detail": str(item)})
        else:
            self._event(response, "observation", item.to_json())
        response.end()

    @staticmethod
    def _event(response: Response, name: str, data: Any) -> None:
        import json

        response.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

    def _cancel(self, request: Request, response: Response) -> None:
        body = request.json()
        if not isinstance(body, dict):
            raise HttpError(400, "what to cancel is a JSON object")
        name, grace = body.get("session", DEFAULT_SESSION), body.get("grace_seconds", 2.0)
        if not isinstance(name, str):
            raise HttpError(400, "session must be a string")
        if not is_seconds(grace):
            raise HttpError(400, f"grace_seconds may not be {grace!r}")
        session = self.executor.sessions.get(name)
        if session is None or session.running is None:
            raise HttpError(409, f"no command is running in session {name!r}")
        session.interrupt(float(grace))
        response.reply(200, {"cancelled": True})

    def _list_sessions(self, request: Request, response: Response) -> None:
        shown = {
            name: {"running": one.running, "working_dir": one.shell.cwd, "pid": one.shell.pid}
            for name, one in list(self.executor.sessions.items())
        }
        response.reply(200, {"sessions": shown})

    def _close_session(self, request: Request, response: Response) -> None:
        body = request.json()
        name = body.get("session") if isinstance(body, dict) else None
        if not isinstance(name, str) or not self.executor.close_session(name):
            raise HttpError(404, f"there is no session {name!r}")
        response.reply(200, {"closed": name})

    def _shutdown(self, request: Request, response: Response) -> None:
        self.executor.close(1.0)
        response.keep = False
        response.reply(200, {"status": "ended"})
        os._exit(0)

    # Files.

    def _list(self, request: Request, response: Response) -> None:
        body = request.json()
        path = body.get("path") if isinstance(body, dict) else None
        if path is not None and not isinstance(path, str):
            raise HttpError(400, "path must be a string")
        try:
            response.reply(200, files.names(files.resolve(path or self.executor.cwd(), self.executor.cwd())))
        except OSError:
            response.reply(200, [])  # what clients of this contract expect

    def _upload(self, request: Request, response: Response) -> None:
        destination = files.absolute(request.query.get("destination", ""))
        recursive = request.query.get("recursive", "false").lower() == "true"
        parts = multipart_file(request)
        name = str(next(parts))
        if name in (".", "..") or "\0" in name:
            raise HttpError(400, f"{name!r} is no file name")
        os.makedirs(destination, exist_ok=True)
        temporary = os.path.join(destination, f".{os.urandom(8).hex()}.upload")
        size = 0
        try:
            with open(temporary, "wb") as file:
                for piece in parts:
                    assert isinstance(piece, bytes)
                    size += len(piece)
                    if size > files.MAX_UPLOAD_BYTES:
                        raise files.TooLarge(f"an upload may have {files.MAX_UPLOAD_BYTES >> 30} GiB at most")
                    file.write(piece)
            if recursive:
                files.extract_zip(temporary, destination)
            else:
                os.replace(temporary, os.path.join(destination, name))
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
        response.reply(200, {"filename": name, "size": size, "destination": destination})

    def _download(self, request: Request, response: Response) -> None:
        path = files.absolute(request.query.get("path", ""))
        raw = request.query.get("raw", "") in ("1", "true")
        if not raw and os.path.isdir(path):
            os.scandir(path).close()  # 403 before the answer begins
            response.begin("application/zip")
            files.write_zip(path, response)  # type: ignore[arg-type]
        else:
            try:
                file = files.open_plain(path)
            except IsADirectoryError:
                raise HttpError(409, f"{path} is no plain file; without raw it comes as a zip") from None
            with file:
                response.begin("application/octet-stream" if raw else "application/zip")
                if not raw:
                    files.write_zip(path, response)  # type: ignore[arg-type]
                while raw and (piece := file.read(1 << 18)):
                    response.write(piece)
        response.end()

    def _connection_token(self, request: Request, response: Response) -> None:
        from lowtide.actionserver.editor import start

        with self._starting_editor:
            if self._token is None:
                self._token = start(
                    self.executor.directory,
                    self._editor_port,
                    self.executor.working_dir,
                    self.executor.environment,
                )
        response.reply(200, {"token": self._token})
