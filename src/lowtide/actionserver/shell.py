"""A persistent bash, as a state machine without I/O: bytes and times go in, outcomes come out.

An interactive bash on a terminal reads one short line for each command; the command itself stands in a
file, so that its quotes, lines and heredocs meet no terminal, and standard input is free for the command.
When bash is back at its prompt it prints a mark: a nonce that no output contains, the exit code and the
working directory. So the end of a command is told at once, by bash itself, in step with its output, and
Ctrl+C, Ctrl+Z and job control are what they are for a person at a terminal. Input that a command leaves
unread is thrown away before the prompt: it is never run as a command.

A bash that ends (`exit`, `set -e`) saves its variables, functions, options and directory on its way out;
the next one starts with them. One that is replaced or killed cannot: then only the directory is kept.
"""

from __future__ import annotations

from lowtide.actionserver.output import HeadTail, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SOFT_SECONDS = 30.0
HARD_SECONDS = 120.0
START_SECONDS = 15.0
COLUMNS, ROWS = 200, 50
ENVIRONMENT = {"TERM": "xterm", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "NO_COLOR": "1"}
"""No pager waits for a key, and no colour is paid for in tokens."""
KEYS = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a", "C-\\": b"\x1c"}

_OPEN, _CLOSE = b"\x1e", b"\x1f"
_MARK_BYTES = 8192
"""A path has 4,096 at most."""

_RC = """\
[ -r /etc/bash.bashrc ] && . /etc/bash.bashrc
[ -r ~/.bashrc ] && . ~/.bashrc
__lt_s=0 __lt_c= __lt_k=x __lt_i=0 __lt_f=0
__lt_m() {{ builtin printf '\\036%s;%s;%s;%s;%s;%s\\037' {nonce} "$1" "$__lt_i" "$2" "$$" "${{PWD-}}" >/dev/tty; }}
__lt_p() {{
  __lt_s=$?
  PS1= PS2=
  [[ -t 0 ]] || exec 0</dev/tty
  if [[ $__lt_i != "$__lt_f" ]]; then
    __lt_f=$__lt_i
    while IFS= builtin read -r -t 0 && IFS= builtin read -r -t 0.1 __lt_c; do :; done
  fi
  __lt_m p "$__lt_s"
  return "$__lt_s"
}}
__lt_q() {{ return "$__lt_s"; }}
__lt_e() {{
  __lt_s=$?
  {{ declare -p; declare -f; alias -p; shopt -p; set +o; builtin printf 'umask %s\\n' "$(umask)"; }} >{directory}/state 2>/dev/null
  __lt_m "$__lt_k" "$__lt_s"
}}
exit() {{ __lt_s=$?; __lt_k=g; builtin exit "${{@:-$__lt_s}}"; }}
stty -echo -opost 2>/dev/null
set +o history
PS1= PS2=
PROMPT_COMMAND='{{ __lt_p; }} 2>/dev/null'
trap __lt_e EXIT
cd -- {cwd} 2>/dev/null || cd /
if [ -r {directory}/restore ]; then . {directory}/restore 2>/dev/null; fi
__lt_s=0 __lt_k=x
"""
# The colon: after a command with an open quote, bash does not take the first word it reads as a reserved one.
_LINE = """\
:;{{ __lt_i={number}; [[ ${{PROMPT_COMMAND-}} == '{{ __lt_p; }} 2>/dev/null' ]] || PROMPT_COMMAND='{{ __lt_p; }} 2>/dev/null'; IFS= builtin read -r -d '' __lt_c <{directory}/command || __lt_c='(exit 126)'; [[ $- == *e* ]] || __lt_q; }} 2>/dev/null; builtin eval "$__lt_c"
"""


class Outcome:
    """What a wait came to: the command ended, or the waiting did."""

    def __init__(
        self,
        *,
        running: bool,
        exit_code: int,
        taken: tuple[bytes, int, bytes],
        cwd: str,
        seconds: float,
        prefix: str = "",
        suffix: str = "",
    ) -> None:
        self.running = running
        self.exit_code = exit_code
        self.text = text(taken)
        self.dropped = taken[1]
        self.cwd = cwd
        self.seconds = seconds
        self.prefix, self.suffix = prefix, suffix


class Shell:
    """One session. `directory` is private to it, inside the sandbox; `nonce` is random."""

    def __init__(self, directory: str, nonce: str, cwd: str) -> None:
        self.directory, self.cwd = directory, cwd
        self.pid = -1
        self.at_prompt = False
        self.over = False
        """Its end mark was read."""
        self.command: str | None = None
        """The command that runs, or None."""
        self._number = 0
        self._nonce = nonce
        self._mark = _OPEN + nonce.encode() + b";"
        self._held = b""
        self._output = HeadTail()
        self._began = self._heard = 0.0
        self._leaving: int | None = None
        self.welcomed = False
        """This bash has given its first prompt."""
        self._continued = False
        self._done: Outcome | None = None
        self._unseen: Outcome | None = None
        self._before = ""
        self.forced_exit_code: int | None = None
        """What a command counts as whose shell was ended for it."""

    @property
    def pending(self) -> bool:
        """Whether a command runs, or has ended and nobody has seen how."""
        return self.command is not None or self._done is not None

    # Starting.

    def rc(self) -> bytes:
        """The file that bash starts with."""
        return _RC.format(
            nonce=self._nonce, directory=quote(self.directory), cwd=quote(self.cwd or "/")
        ).encode()

    def argv(self) -> Sequence[str]:
        return ("bash", "--noprofile", "--noediting", "--rcfile", f"{self.directory}/rc", "-i")

    # Commands.

    def begin(self, command: str, now: float) -> bytes:
        """What the file `command` must hold before `line` is written to the terminal."""
        content = command.encode("utf-8", "surrogateescape") + b"\0"  # first: it may be no text
        self._number += 1
        self.command, self.at_prompt = command, False
        self._began = self._heard = now
        self._before, self._unseen = "", self._done
        if self._done is not None:  # it ended after the last look, and nobody has seen how
            self._before = (
                f"[The previous command ended with exit code {self._done.exit_code}; its last output:]\n"
                f"{self._done.text}[Output of this command:]\n"
            )
        self._leaving, self._continued, self._done, self.forced_exit_code = None, False, None, None
        return content

    def take_back(self) -> None:
        """The file could not be written, so `line` was not: the shell stands where it stood before `begin`."""
        if self.command is not None:
            self.command, self.at_prompt, self._done = None, True, self._unseen

    @property
    def line(self) -> bytes:
        """What makes bash run the file."""
        return _LINE.format(number=self._number, directory=quote(self.directory)).encode()

    def feed(self, data: bytes, now: float) -> bytes:
        """Bytes from the terminal. Returns those that are output."""
        data = self._held + data
        self._held = b""
        shown = []
        while data:
            at = data.find(self._mark)
            end = data.find(_CLOSE, at) if at >= 0 else -1
            if at >= 0 and (end - at > _MARK_BYTES or (end < 0 and len(data) - at > _MARK_BYTES)):
                shown.append(self._heard_output(data[: at + 1], now))
                data = data[at + 1 :]  # no mark of ours is so long: somebody has forged its beginning
                continue
            if end < 0:  # no mark, or not all of it
                cut = at if at >= 0 else len(data) - self._beginning_of_mark(data)
                shown.append(self._heard_output(data[:cut], now))
                self._held = data[cut:]
                break
            shown.append(self._heard_output(data[:at], now))
            self._marked(data[at + len(self._mark) : end], now)
            data = data[end + 1 :]
        return b"".join(shown)

    def ended(self, status: int, now: float) -> bool:
        """bash itself is gone, with this exit code. True when it left its state for the next one."""
        orderly = self._leaving is not None
        self._heard_output(self._held, now)
        self._held = b""
        note = "" if orderly else _REPLACED.format(cwd=self.cwd)
        self._finish(status if self._leaving is None else self._leaving, now, note)
        self._leaving = None
        self.at_prompt = self.welcomed = self.over = False
        return orderly

    def end_mark(self) -> bytes:
        """What whoever reaped bash writes to the terminal, so that all output before it is read first."""
        return self._mark + b"e;0;0;-1;" + _CLOSE

    def outcome(self, now: float, since: float, soft: float | None, hard: float | None) -> Outcome | None:
        """What there is to say after waiting from `since` until `now`, or None to wait on."""
        if self._done is not None:
            done, self._done = self._done, None
            return done
        if hard is not None and now - since >= hard:
            return self._still(now, f"{hard:g} seconds are over")
        if soft is not None and now - max(self._heard, since) >= soft:
            return self._still(now, f"there was no new output for {soft:g} seconds")
        return None

    def due(self, since: float, soft: float | None, hard: float | None) -> float | None:
        """When `outcome` is worth asking again, if nothing happens before."""
        times = []
        if hard is not None:
            times.append(since + hard)
        if soft is not None:
            times.append(max(self._heard, since) + soft)
        return min(times) if times else None

    def refused(self, command: str, now: float, *, watched: bool) -> Outcome:
        """A new command while another one runs. The output stays with the request that waits for it, if any does."""
        outcome = self.taken_over(now) if watched else self._still(now, "")
        outcome.suffix = (
            f"\n[{first_line(command)!r} was not run: the previous command is still running "
            f"({first_line(self.command or '')!r}). {_HOW}]"
        )
        return outcome

    def taken_over(self, now: float) -> Outcome:
        """For a request that gets no output, because another one reads it."""
        return Outcome(
            running=True,
            exit_code=-1,
            taken=(b"", 0, b""),
            cwd=self.cwd,
            seconds=now - self._began,
            suffix="\n[Another request reads the output of this session.]",
        )

    def _still(self, now: float, why: str) -> Outcome:
        outcome = Outcome(
            running=True,
            exit_code=-1,
            taken=self._output.take(),
            cwd=self.cwd,
            seconds=now - self._began,
            prefix=self._prefix(),
            suffix=f"\n[Still running after {now - self._began:.1f} seconds; {why}. {_HOW}]",
        )
        self._continued = True
        return outcome

    def _prefix(self) -> str:
        before, self._before = self._before, ""
        return before + ("[Output since the last look:]\n" if self._continued else "")

    def _heard_output(self, data: bytes, now: float) -> bytes:
        if data and self.welcomed:
            self._heard = now
            self._output.append(data)
            return data
        return b""  # what start-up files print is no command's output

    def _marked(self, fields: bytes, now: float) -> None:
        try:
            kind, number_text, status_text, pid_text, cwd = fields.split(b";", 4)
            number, status, pid = int(number_text), int(status_text), int(pid_text)
        except ValueError:
            return  # forged: what runs in the shell can read the nonce
        if kind == b"e":
            self.over = True
            return
        self.cwd = cwd.decode("utf-8", "surrogateescape") or self.cwd
        self.pid = pid
        if kind == b"p":
            if self.command is not None and number != self._number:
                return  # a prompt from before this command, for a line that somebody typed too late
            self._leaving = None
            self.at_prompt = self.welcomed = True
            self._finish(status, now)
            return
        self._leaving = status
        if kind == b"g":
            self._output.drop_end(b"exit\n")  # an interactive bash says so

    def _finish(self, exit_code: int, now: float, note: str = "") -> None:
        if self.command is None:
            return
        self.command = None
        self._done = Outcome(
            running=False,
            exit_code=exit_code if self.forced_exit_code is None else self.forced_exit_code,
            taken=self._output.take(),
            cwd=self.cwd,
            seconds=now - self._began,
            prefix=self._prefix(),
            suffix=note,
        )

    def _beginning_of_mark(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a mark."""
        at = data.rfind(_OPEN, max(0, len(data) - len(self._mark)))
        return len(data) - at if at >= 0 and self._mark.startswith(data[at:]) else 0


_REPLACED = (
    "\n[This command replaced or ended the shell. A new one starts in {cwd}; variables and functions of the old "
    "one are gone.]"
)
_HOW = (
    "An empty command reads on; is_input=true sends a line to it, or a key: C-c interrupts, C-d ends its input, "
    "C-z stops it; a longer timeout waits longer"
)


def first_line(command: str) -> str:
    line = command.strip().partition("\n")[0]
    return line if len(line) <= 100 else line[:97] + "..."


def quote(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
