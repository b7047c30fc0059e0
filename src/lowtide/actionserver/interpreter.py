"""Interpreters that keep their state: one driver process for each language and context."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time

from lowtide.actionserver.descriptors import readable
from lowtide.actionserver.models import IPythonObservation
from lowtide.actionserver.output import HeadTail, text
from lowtide.actionserver.processes import end_session
from lowtide.actionserver.shell import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_INTERRUPT_SECONDS = 3.0
_MAX_ANSWER = 64 << 20
LANGUAGES = {
    "python": "python",
    "py": "python",
    "ipython": "ipython",
    "bash": "bash",
    "sh": "bash",
    "javascript": "javascript",
    "js": "javascript",
    "node": "javascript",
}


class Missing(RuntimeError):
    """The image has no interpreter for that language; the message says how to get one."""


_DRIVERS: dict[str, bytes] = {}


def load_drivers() -> None:
    """Into memory, once."""
    if _DRIVERS:
        return
    from lowtide.actionserver import drivers

    loader: Any = drivers.__loader__  # pkgutil takes ten times as long to load
    place = os.path.dirname(str(drivers.__file__))
    names = ("bash.sh", "javascript.js", "kernel.py", "plain.py")
    _DRIVERS.update({name: loader.get_data(os.path.join(place, name)) for name in names})


class Interpreters:
    """All contexts. Code of one context runs in turn; contexts run beside each other."""

    def __init__(self, directory: str, environment: dict[str, str]) -> None:
        self._directory, self._environment = directory, environment
        self._contexts: dict[tuple[str, str], Interpreter] = {}
        self._lock = threading.Lock()

    def run(
        self,
        code: str,
        *,
        language: str,
        context: str,
        cwd: str,
        seconds: float | None,
        given_up: int | None = None,
    ) -> dict[str, Any]:
        """`given_up` is a descriptor that becomes readable when nobody wants the answer any more. Raises Missing."""
        kind = LANGUAGES.get(language.strip().lower())
        if kind is None:
            known = ", ".join(sorted(set(LANGUAGES.values())))
            raise Missing(f"there is no interpreter for {language!r}; known are {known}")
        with self._lock:
            held = self._contexts.get((kind, context))
            if held is None:
                held = self._contexts[kind, context] = Interpreter(kind, self._directory, self._environment)
        return held.run(code, cwd, seconds, given_up)

    def close(self) -> None:
        with self._lock:
            contexts, self._contexts = list(self._contexts.values()), {}
        for context in contexts:
            context.close()


class Interpreter:
    """One context: a driver process, started at its first code and again after it has ended."""

    def __init__(self, kind: str, directory: str, environment: dict[str, str]) -> None:
        self._kind, self._directory, self._environment = kind, directory, environment
        self._turn = threading.Lock()
        self._process: Any = None
        self._mark = b""
        self._cwd = ""
        self._plain = False

    def run(self, code: str, cwd: str, seconds: float | None, given_up: int | None = None) -> dict[str, Any]:
        with self._turn:
            if given_up is not None and readable([given_up], 0.0):
                return {}  # before its turn came
            if self._process is None:
                self._start(cwd)
            changed = cwd if cwd != self._cwd else None
            self._cwd = cwd
            if self._kind == "bash":
                prefix = f"cd -- {quote(cwd)}\n" if changed else ""
                self._send(_bytes(prefix + code.replace("\0", "")) + b"\0")  # bash leaves a NUL out, too
            else:
                self._send(json.dumps({"code": code, "cwd": changed}).encode() + b"\n")
            answer = self._collect(seconds, given_up)
            if answer.get("missing") is not None:
                self.close()
                if self._kind == "ipython":
                    raise Missing(
                        f"IPython is not in this image ({answer['missing']}); install it with: "
                        "python3 -m pip install ipykernel"
                    )
                self._plain = True
            else:
                return answer
        return self.run(code, cwd, seconds, given_up)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for descriptor in (self._requests, self._answers, self._over):
            os.close(descriptor)
        if self._kind != "bash":  # a kernel is in a session of its own: its driver ends it
            try:
                process.terminate()
                process.wait(1.0)
            except Exception:  # it is ended below
                pass
        end_session(process.pid, 0.2)
        process.stdout.close()
        process.stderr.close()
        process.wait()

    def _start(self, cwd: str) -> None:
        import subprocess

        argv = self._command()
        self._mark = os.urandom(12).hex().encode()
        theirs, self._requests = os.pipe()
        self._answers, told = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*argv, str(theirs), str(told), self._mark.decode()],
                cwd=cwd if os.path.isdir(cwd) else "/",
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs, told),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)
            os.close(told)
        self._cwd = cwd
        self._over, over = os.pipe()
        threading.Thread(target=_tell_end, args=(self._process, over), name="driver", daemon=True).start()

    def _command(self) -> list[str]:
        path = self._environment.get("PATH")
        if self._kind == "bash":
            return [_found("bash", path, "apt-get install bash"), self._driver("bash.sh")]
        if self._kind == "javascript":
            return [_found("node", path, "apt-get install nodejs"), self._driver("javascript.js")]
        python = shutil.which("python3", path=path) or shutil.which("python", path=path) or sys.executable
        return [python, "-u", self._driver("plain.py" if self._plain else "kernel.py")]

    def _driver(self, name: str) -> str:
        """The driver as a file: it is inside an archive."""
        path = os.path.join(self._directory, name)
        if not os.path.exists(path):
            load_drivers()
            data = _DRIVERS[name]
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            temporary = f"{path}.{os.urandom(4).hex()}"
            with open(temporary, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        return path

    def _send(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:
            pass  # it has ended; collecting says so

    def _collect(self, seconds: float | None, given_up: int | None) -> dict[str, Any]:
        outputs = {self._process.stdout.fileno(): HeadTail(), self._process.stderr.fileno(): HeadTail()}
        held = dict.fromkeys(outputs, b"")
        waiting = set(outputs)
        answer, answers = bytearray(), [self._answers]
        mark = b"\x1e" + self._mark + b"\x1f"
        deadline = None if seconds is None else time.monotonic() + seconds
        interrupted = False
        while waiting or not answer.endswith(b"\n"):
            # Whatever there is to read: what prints without end has a time, too.
            if deadline is not None and time.monotonic() >= deadline:
                if interrupted:
                    break
                interrupted = True
                os.killpg(self._process.pid, signal.SIGINT)
                deadline = time.monotonic() + _INTERRUPT_SECONDS
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            watched = [*waiting, *answers, self._over, *([] if given_up is None else [given_up])]
            ready = readable(watched, left)
            if self._over in ready:  # also when its children hold the pipes
                self._drain(outputs)
                if answers and readable(answers, 0.0):
                    answer += os.read(self._answers, 1 << 16)
                if answer.startswith(b'{"missing"') and answer.endswith(b"\n"):
                    return dict(json.loads(answer))
                return self._ended(outputs, interrupted)
            if given_up in ready:
                ready.remove(given_up)
                given_up, deadline = None, time.monotonic()
            for descriptor in ready:
                data = os.read(descriptor, 1 << 16)
                if descriptor == self._answers:
                    answer += data
                    if answer.startswith(b'{"missing"') and answer.endswith(b"\n"):
                        return dict(json.loads(answer))
                    if not data:
                        answers.clear()  # the code has closed it: it is heard no more, and may run on
                    if len(answer) > _MAX_ANSWER:
                        self.close()
                        return self._ended(outputs, interrupted, "its results are too large")
                    continue
                if not data:
                    waiting.discard(descriptor)
                    continue
                data = held[descriptor] + data
                at = data.find(mark)
                if at >= 0:
                    waiting.discard(descriptor)
                    outputs[descriptor].append(data[:at])
                    continue
                keep = min(len(mark) - 1, len(data)) if b"\x1e" in data[-len(mark) :] else 0
                outputs[descriptor].append(data[: len(data) - keep])
                held[descriptor] = data[len(data) - keep :]
        else:
            told = _checked(bytes(answer))
            if told is not None:
                return self._answered(told, outputs, interrupted)
            self.close()  # the code has written into the driver's own pipe: no later answer could be believed
            return self._ended(outputs, interrupted, "its answer makes no sense")
        self.close()
        return self._ended(outputs, interrupted)

    def _drain(self, outputs: dict[int, HeadTail]) -> None:
        """What the driver wrote before its end: no more than a pipe holds, its children may go on."""
        for descriptor, output in outputs.items():
            left = 1 << 17
            while left > 0 and readable([descriptor], 0.0):
                data = os.read(descriptor, 1 << 16)
                if not data:
                    break
                output.append(data)
                left -= len(data)

    def _answered(
        self, answer: dict[str, Any], outputs: dict[int, HeadTail], interrupted: bool
    ) -> dict[str, Any]:
        if "status" in answer:
            status = answer["status"]
            error = {"name": "ExitCode", "value": str(status), "traceback": ""} if status else None
            answer = {"execution_count": None, "results": [], "error": error}
        out, err = (text(output.take()) for output in outputs.values())
        return {"stdout": out, "stderr": err, "timed_out": interrupted, **answer}

    def _ended(
        self, outputs: dict[int, HeadTail], interrupted: bool, why: str = "it did not react to an interrupt"
    ) -> dict[str, Any]:
        """The driver is gone, or was ended, and that is `why`."""
        process = self._process
        code = process.wait() if process is not None else None
        self.close()
        said = why if code is None else f"it ended with exit code {code}"
        error = {
            "name": "InterpreterEnded",
            "value": f"{said}; the next code starts a new one, without its state",
            "traceback": "",
        }
        if self._kind == "bash" and code is not None and code >= 0:
            error = {"name": "ExitCode", "value": str(code), "traceback": ""}
            if code == 0:
                return self._answered({"status": 0}, outputs, interrupted)
        out, err = (text(output.take()) for output in outputs.values())
        return {
            "stdout": out,
            "stderr": err,
            "timed_out": interrupted,
            "results": [],
            "error": error,
            "execution_count": None,
        }


def observation(code: str, result: dict[str, Any]) -> IPythonObservation:
    """A result as an agent reads it: everything as text, images as data URLs."""
    said = [result["stdout"], result["stderr"]]
    images = []
    for bundle in result["results"]:
        for kind in ("image/png", "image/jpeg"):
            if kind in bundle:
                images.append(f"data:{kind};base64,{str(bundle[kind]).strip()}")
        said.append(str(bundle.get("text/plain", "")))
    error = result["error"]
    if error is not None:
        said.append(error["traceback"] or f"{error['name']}: {error['value']}")
    if result["timed_out"]:
        said.append("[Interrupted: its time was over.]")
    content = "\n".join(part.rstrip("\n") for part in said if part)
    return IPythonObservation(
        content=content,
        code=code,
        results=tuple(result["results"]),
        error=error,
        image_urls=images or None,
    )


def _checked(answer: bytes) -> dict[str, Any] | None:
    """A driver's answer, or None for something else: it shares its process with the code it runs."""
    try:
        told = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    if type(told.get("status")) is int:
        return {"status": told["status"]}
    count, results, error = (told.get(name) for name in ("execution_count", "results", "error"))
    if not isinstance(results, list) or not all(isinstance(bundle, dict) for bundle in results):
        return None
    if error is not None:
        if not isinstance(error, dict):
            return None
        error = {name: str(error.get(name, "")) for name in ("name", "value", "traceback")}
    return {"execution_count": count if type(count) is int else None, "results": results, "error": error}


def _tell_end(process: Any, over: int) -> None:
    process.wait()
    os.close(over)


def _bytes(code: str) -> bytes:
    try:
        return code.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return code.encode("utf-8", "surrogatepass")


def _found(program: str, path: str | None, fix: str) -> str:
    found = shutil.which(program, path=path)
    if found is None:
        raise Missing(f"there is no {program} in this image; install it, e.g. {fix}")
    return found
