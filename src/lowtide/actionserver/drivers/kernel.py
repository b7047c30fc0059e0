"""Python in a real IPython kernel, where the image has ipykernel."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_START_SECONDS = 60


class Kernel:
    """Starts it, runs code in it, tells what came of it."""

    def __init__(self, answers: int, mark: str) -> None:
        self._answers, self._mark = answers, mark
        self.manager: Any = None
        self.client: Any = None

    def start(self) -> str | None:
        """Why there is none, or None."""
        try:
            import ipykernel  # noqa: F401
            from jupyter_client.manager import KernelManager
        except ImportError as error:
            return str(error)
        # Over sockets in a private directory: other users of the sandbox cannot speak to it.
        place = tempfile.mkdtemp(prefix=".lowtide-kernel-")
        self.manager = KernelManager(transport="ipc", ip=os.path.join(place, "z"))
        self.manager.connection_file = os.path.join(place, "connection.json")
        # Long lists are shown whole, as a plain Python shows them.
        self.manager.start_kernel(cwd=os.getcwd(), extra_arguments=["--PlainTextFormatter.max_seq_length=0"])
        self.client = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=_START_SECONDS)
        except RuntimeError as error:
            self.manager.shutdown_kernel(now=True)
            return f"the kernel did not start: {error}"
        signal.signal(signal.SIGINT, lambda *_: self.manager.interrupt_kernel())
        signal.signal(signal.SIGTERM, lambda *_: (self.manager.shutdown_kernel(now=True), os._exit(0)))
        return None

    def tell(self, answer: dict[str, Any]) -> None:
        _write(self._answers, (json.dumps(answer) + "\n").encode())

    def serve(self, requests: int) -> None:
        for line in os.fdopen(requests, "r", encoding="utf-8"):
            request = json.loads(line)
            if request.get("cwd"):
                move = f"__import__('os').chdir({request['cwd']!r})"
                for _ in self._messages(self.client.execute(move, silent=True)):
                    pass
            answer = self._run(request["code"])
            for number in (1, 2):
                _write(number, f"\036{self._mark}\037".encode())
            self.tell(answer)
        self.manager.shutdown_kernel(now=True)

    def _run(self, code: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"execution_count": None, "results": [], "error": None}
        for message in self._messages(self.client.execute(code, allow_stdin=False)):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                number = 2 if content["name"] == "stderr" else 1
                _write(number, content["text"].encode("utf-8", "surrogatepass"))
            elif kind in ("execute_result", "display_data"):
                answer["results"].append(content["data"])
            elif kind == "execute_input":
                answer["execution_count"] = content["execution_count"]
            elif kind == "error":
                told = "\n".join(content["traceback"])
                answer["error"] = {"name": content["ename"], "value": content["evalue"], "traceback": told}
            elif kind == "dead":
                said = "the kernel ended; the next code starts a new one, without its state"
                answer["error"] = {"name": "KernelDied", "value": said, "traceback": ""}
                self.manager.restart_kernel(now=True)
                self.client.wait_for_ready(timeout=_START_SECONDS)
        return answer

    def _messages(self, number: str) -> Iterator[dict[str, Any]]:
        """What the kernel says about one request, until it is idle again."""
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=2)
            except Exception as error:
                if type(error).__name__ != "Empty":
                    raise
                if not self.manager.is_alive():
                    yield {"msg_type": "dead", "content": {}}
                    return
                continue
            if message["parent_header"].get("msg_id") == number:
                yield message
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    return


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main(requests: int, answers: int, mark: str) -> None:
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    kernel = Kernel(answers, mark)
    missing = kernel.start()
    if missing is not None:
        kernel.tell({"missing": missing})
        return
    kernel.serve(requests)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
