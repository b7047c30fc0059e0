# mypy: ignore-errors
"""A Jupyter kernel for JavaScript: node's own REPL engine behind ipykernel's kernel base."""

import json
import os
import select
import subprocess
import sys
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

NODE = r"""
const repl = require('repl'), fs = require('fs'), util = require('util'), readline = require('readline');
const { PassThrough } = require('stream');
const server = repl.start({ input: new PassThrough(), output: new PassThrough(), prompt: '', useGlobal: true, terminal: false });
const tell = (message) => fs.writeSync(3, JSON.stringify(message) + '\n');
const named = (names) => '{' + names.replace(/\sas\s/g, ':') + '}';
const imports = (code) => code
  .replace(/^[ \t]*import\s+\*\s+as\s+(\w+)\s+from\s+(['"][^'"]+['"])/gm, 'const $1 = await import($2)')
  .replace(/^[ \t]*import\s+(\w+)\s*,\s*\{([^}]*)\}\s+from\s+(['"][^'"]+['"])/gm,
    (_, one, names, from) => `const { default: ${one}, ...${one}Rest } = await import(${from}), ${named(names)} = ${one}Rest`)
  .replace(/^[ \t]*import\s+\{([^}]*)\}\s+from\s+(['"][^'"]+['"])/gm, (_, names, from) => `const ${named(names)} = await import(${from})`)
  .replace(/^[ \t]*import\s+(\w+)\s+from\s+(['"][^'"]+['"])/gm, 'const $1 = (await import($2)).default')
  .replace(/^[ \t]*import\s+(['"][^'"]+['"])/gm, 'await import($1)');
const typed = (code) => {
  const places = [process.cwd(), '/usr/lib/node_modules', '/usr/local/lib/node_modules', '/usr/share/nodejs'];
  places.push(process.env.NODE_PATH);
  const compiler = require(require.resolve('typescript', { paths: places }));
  const options = { target: 'ES2022', module: 'ESNext' };
  return compiler.transpileModule(code, { compilerOptions: options }).outputText;
};
const fail = (error) => {
  const known = error instanceof Error || (error && error.name);
  const stack = String(known ? error.stack || error : error);
  tell({ error: { name: known ? error.name : 'Error', value: known ? error.message : String(error), trace: stack } });
};
let ended = null; // of the code that runs now
process.on('unhandledRejection', fail);
// The REPL gives what code throws to its domain and not to the callback.
server._domain.removeAllListeners('error');
server._domain.on('error', (error) => (ended ? ended(error) : fail(error)));
process.on('SIGINT', () => {});
readline.createInterface({ input: process.stdin }).on('line', (line) => {
  const ask = JSON.parse(line);
  let code = ask.code;
  const evaluate = () => server.eval(imports(code) + '\n', server.context, 'code', (ended = (error, value) => {
    ended = null;
    if (error) {
      const reason = error instanceof repl.Recoverable ? error.err : error;
      if (reason instanceof SyntaxError && !ask.retyped) {
        ask.retyped = true;
        try { code = typed(ask.code); return evaluate(); } catch (ignored) { /* no compiler here */ }
      }
      fail(reason);
    } else if (value !== undefined) {
      const data = { 'text/plain': util.inspect(value) };
      if (value && typeof value === 'object' && (Array.isArray(value) || Object.getPrototypeOf(value) === Object.prototype)) {
        try { data['application/json'] = JSON.parse(JSON.stringify(value)); } catch (ignored) { /* not JSON */ }
      }
      tell({ result: data });
    }
    tell({ done: true });
  }));
  evaluate();
});
"""


class JavaScript(Kernel):
    implementation = "javascript"
    implementation_version = "1"
    language_info = {"name": "javascript", "mimetype": "application/javascript", "file_extension": ".js"}  # noqa: RUF012
    banner = "node"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.launch()

    def launch(self) -> None:
        events, inner = os.pipe()
        # The child's fd 3 is where it tells what happened, apart from what the code prints.
        script = f'exec 3>&{inner}; exec node --no-warnings -e "$0"'
        # TypeScript's compiler is found where `npm install -g --prefix VENV typescript` puts it.
        modules = os.path.join(sys.prefix, "lib", "node_modules")
        self.node = subprocess.Popen(
            ["/bin/bash", "-c", script, NODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(inner,),
            env={"NODE_PATH": modules, **os.environ},
        )
        os.close(inner)
        self.told = events

    def do_execute(
        self, code: str, silent: bool, store_history: bool = True, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if self.node.poll() is not None:
            self.launch()
        assert self.node.stdin is not None
        assert self.node.stdout is not None
        assert self.node.stderr is not None
        self.node.stdin.write(json.dumps({"code": code}).encode() + b"\n")
        self.node.stdin.flush()
        streams = {
            self.node.stdout.fileno(): "stdout",
            self.node.stderr.fileno(): "stderr",
            self.told: "event",
        }
        told, done, error = b"", False, None
        while True:
            try:
                ready, _, _ = select.select(list(streams), [], [], 0 if done else None)
            except KeyboardInterrupt:
                self.node.kill()
                self.node.wait()
                self.launch()
                return self.failed("KeyboardInterrupt", "", [], silent)
            if not ready and done:
                break
            for fd in ready:
                data = os.read(fd, 65536)
                if not data:
                    del streams[fd]
                    done = done or fd == self.told
                elif streams[fd] != "event":
                    if not silent:
                        content = {"name": streams[fd], "text": data.decode("utf-8", "replace")}
                        self.send_response(self.iopub_socket, "stream", content)
                else:
                    *lines, told = (told + data).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        done = done or "done" in event
                        error = event.get("error", error)
                        if "result" in event and not silent:
                            content = {
                                "execution_count": self.execution_count,
                                "data": event["result"],
                                "metadata": {},
                            }
                            self.send_response(self.iopub_socket, "execute_result", content)
        if error is not None:
            return self.failed(error["name"], error["value"], error["trace"].split("\n"), silent)
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": [],
            "user_expressions": {},
        }

    def failed(self, name: str, value: str, trace: list[str], silent: bool) -> dict[str, Any]:
        content = {"ename": name, "evalue": value, "traceback": trace}
        if not silent:
            self.send_response(self.iopub_socket, "error", content)
        return {"status": "error", "execution_count": self.execution_count, **content}

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        self.node.kill()
        return {"status": "ok", "restart": restart}


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=JavaScript, argv=sys.argv[1:])
