# mypy: ignore-errors
"""A Jupyter kernel for Java: the JDK's own jshell engine behind ipykernel's kernel base."""

import base64
import os
import subprocess
import sys
import tempfile
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

SHELL = r"""
import java.io.*; import java.nio.charset.StandardCharsets; import java.util.*; import jdk.jshell.*;
public class Shell {
  static PrintStream real = System.out;
  static void tell(String kind, String text) {
    synchronized (real) { real.println(kind + " " + Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8))); real.flush(); }
  }
  static PrintStream told(String kind) {
    return new PrintStream(new OutputStream() {
      public void write(int b) { write(new byte[] {(byte) b}, 0, 1); }
      public void write(byte[] data, int at, int size) {
        String text = new String(data, at, size, StandardCharsets.UTF_8);
        if (text.length() > 1 && text.endsWith("\n")) { tell(kind, text.substring(0, text.length() - 1)); text = "\n"; }
        tell(kind, text);
      }
    }, true);
  }
  public static void main(String[] args) throws Exception {
    System.setOut(told("stdout")); System.setErr(told("stderr"));
    JShell shell = JShell.builder().executionEngine("local").build();
    for (String name : List.of("java.io.*", "java.math.*", "java.util.*", "java.util.function.*", "java.util.stream.*"))
      shell.eval("import " + name + ";");
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
    for (String line; (line = in.readLine()) != null; ) {
      String code = new String(Base64.getDecoder().decode(line), StandardCharsets.UTF_8);
      String value = null; boolean failed = false;
      while (!code.isBlank() && !failed) {
        SourceCodeAnalysis.CompletionInfo part = shell.sourceCodeAnalysis().analyzeCompletion(code);
        String source = part.source() == null ? code : part.source();
        code = part.source() == null || part.remaining() == null ? "" : part.remaining();
        value = null;
        for (SnippetEvent event : shell.eval(source)) {
          if (event.status() == Snippet.Status.REJECTED) {
            String why = shell.diagnostics(event.snippet()).map(d -> d.getMessage(Locale.ENGLISH)).reduce("", (a, b) -> a + b + "\n");
            tell("error", "CompilationException\n" + why.trim()); failed = true;
          } else if (event.exception() != null) {
            String name = event.exception() instanceof EvalException e ? e.getExceptionClassName() : "Exception";
            tell("error", name + "\n" + event.exception().getMessage()); failed = true;
          } else if (event.snippet().kind() == Snippet.Kind.EXPRESSION || event.snippet().kind() == Snippet.Kind.VAR && event.snippet().subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND) value = event.value();
        }
      }
      if (!failed && value != null && !value.isEmpty()) tell("result", value);
      tell("done", "");
    }
  }
}
"""


class Java(Kernel):
    implementation = "java"
    implementation_version = "1"
    language_info = {"name": "java", "mimetype": "text/x-java", "file_extension": ".java"}  # noqa: RUF012
    banner = "jshell"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.directory = tempfile.mkdtemp(prefix=".java-kernel-")
        source = os.path.join(self.directory, "Shell.java")
        with open(source, "w") as file:
            file.write(SHELL)
        self.source = source
        self.launch()

    def launch(self) -> None:
        command = [
            "java",
            "-Xshare:auto",
            "-XX:TieredStopAtLevel=1",
            "--add-modules",
            "jdk.jshell",
            self.source,
        ]
        self.engine = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def do_execute(
        self, code: str, silent: bool, store_history: bool = True, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if self.engine.poll() is not None:
            self.launch()
        assert self.engine.stdin is not None
        assert self.engine.stdout is not None
        self.engine.stdin.write(base64.b64encode(code.encode()) + b"\n")
        self.engine.stdin.flush()
        error: list[str] | None = None
        try:
            for line in self.engine.stdout:
                kind, _, data = line.decode().strip().partition(" ")
                text = base64.b64decode(data).decode("utf-8", "replace")
                if kind == "done":
                    break
                if kind == "error":
                    error = text.split("\n", 1)
                elif not silent and kind == "result":
                    content = {
                        "execution_count": self.execution_count,
                        "data": {"text/plain": text},
                        "metadata": {},
                    }
                    self.send_response(self.iopub_socket, "execute_result", content)
                elif not silent:
                    self.send_response(self.iopub_socket, "stream", {"name": kind, "text": text})
            else:
                error = ["RuntimeError", "the Java shell has ended"]
        except KeyboardInterrupt:
            self.engine.kill()
            self.engine.wait()
            error = ["KeyboardInterrupt", ""]
        if error is not None:
            content = {"ename": error[0], "evalue": error[-1], "traceback": error}
            if not silent:
                self.send_response(self.iopub_socket, "error", content)
            return {"status": "error", "execution_count": self.execution_count, **content}
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": [],
            "user_expressions": {},
        }

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        self.engine.kill()
        return {"status": "ok", "restart": restart}


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=Java, argv=sys.argv[1:])
