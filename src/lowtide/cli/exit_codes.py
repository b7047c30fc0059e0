"""The exit codes of `lowtide`, as docs/cli.md lists them."""

from __future__ import annotations

OK = 0
ERROR = 1  # what was asked could not be done: no such sandbox, a check failed, something could not be ended
USAGE = 2  # the command line is wrong; nothing was created
TIMEOUT = 124  # --timeout ended the command
INFRASTRUCTURE = 125  # lowtide or the provider failed; the command's own exit code is not known
NOT_EXECUTABLE = 126  # as a shell says it
NOT_FOUND = 127  # as a shell says it
INTERRUPTED = 130  # Ctrl+C: 128 + SIGINT
BROKEN_PIPE = 141  # whoever read our output left: 128 + SIGPIPE
