"""What an emulated machine looks like from inside: its users, its sudo, and its first process.

A local sandbox gives nobody new privileges, so a setuid sudo cannot work in it. Its first process runs
as the sandbox's own root instead and runs commands for whoever asks through a socket; `sudo` is a small
program that asks. It is a shell blocked on a FIFO until the first time, so it costs next to nothing.
"""

from __future__ import annotations

import os
import sys

WAKE, SOCKET = "/run/lowtide-sudo.wake", "/run/lowtide-sudo.sock"

_SUDO = """#!%PYTHON% -IS
import array, json, os, signal, socket, sys, time
words, env, login = sys.argv[1:], {}, False
while words and (words[0].startswith("-") or "=" in words[0]):
    word = words.pop(0)
    if word == "--":
        break
    if not word.startswith("-"):
        key, _, value = word.partition("=")
        env[key] = value
    elif word in ("-u", "--user", "-g", "--group", "-C", "-D", "-h", "-p", "-U"):
        value = words.pop(0) if words else ""
        if word in ("-u", "--user") and value not in ("root", "#0"):
            if value in (os.environ.get("USER"), "#%d" % os.getuid()) and words:
                os.execvp(words[0], words)
            sys.exit("sudo: this sandbox can only change to root")
    elif word in ("-i", "--login", "-s", "--shell"):
        login = True
    elif word in ("-E", "--preserve-env"):
        env.update(os.environ)
    elif word in ("-v", "-k", "-K", "-l"):
        sys.exit(0)
if login:
    words = ["/bin/bash", "-l"] + (["-c", " ".join(words)] if words else [])
if not words:
    sys.exit("usage: sudo [-E] [-u user] [VAR=value] command")
for name in ("TERM", "LANG", "LC_ALL", "DEBIAN_FRONTEND"):
    if name in os.environ:
        env.setdefault(name, os.environ[name])
env.setdefault("SUDO_USER", os.environ.get("USER", "user"))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
until = time.monotonic() + 10
while True:
    try:
        sock.connect("%SOCKET%")
        break
    except OSError:
        if time.monotonic() > until:
            sys.exit("sudo: the sandbox's root does not answer")
        try:
            wake = os.open("%WAKE%", os.O_WRONLY | os.O_NONBLOCK)
            os.write(wake, b"\\n")
            os.close(wake)
        except OSError:
            pass
        time.sleep(0.01)
ask = json.dumps({"argv": words, "env": env, "cwd": os.getcwd()}).encode()
sock.sendmsg([ask], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
def forward(number, frame):
    sock.send(b"%d" % number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, forward)
answer = sock.recv(64)
sys.exit(int(answer) if answer else 1)
"""

_ROOT = """
import array, json, os, select, signal, socket
try:
    os.unlink("%SOCKET%")
except OSError:
    pass
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind("%SOCKET%")
os.chmod("%SOCKET%", 0o666)
server.listen(64)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def serve(peer):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, control, _, _ = peer.recvmsg(1 << 20, socket.CMSG_SPACE(12))
    fds = array.array("i")
    for level, kind, piece in control:
        fds.frombytes(piece[: len(piece) - len(piece) % 4])
    ask = json.loads(data)
    start, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 256)
        try:
            os.chdir(ask["cwd"])
        except OSError:
            os.chdir("/")
        env = {"PATH": "%PATH%", "HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"}
        env.update(ask["env"], HOME="/root", USER="root", LOGNAME="root", SUDO_UID="1000", SUDO_GID="1000")
        try:
            os.execvpe(ask["argv"][0], ask["argv"], env)
        except OSError as error:
            os.write(2, ("sudo: %s: %s\\n" % (ask["argv"][0], error.strerror)).encode())
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    for fd in fds:
        os.close(fd)
    waiting = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([waiting, peer], [], [])
        if waiting in ready:
            break
        message = peer.recv(16)
        try:
            os.killpg(child, int(message) if message else signal.SIGHUP)
        except OSError:
            pass
        if not message:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        peer.send(b"%d" % (128 - code if code < 0 else code))
    except OSError:
        pass
while True:
    peer, _ = server.accept()
    if os.fork() == 0:
        try:
            server.close()
            serve(peer)
        finally:
            os._exit(0)
    peer.close()
"""

_FIRST = """
umask 022
rm -f "$3" "$4"
mkdir -p /usr/local/bin
printf %s "$1" > /usr/local/bin/sudo.new && chmod 755 /usr/local/bin/sudo.new
mv -f /usr/local/bin/sudo.new /usr/local/bin/sudo
command -v python > /dev/null || ln -s "$5" /usr/local/bin/python
command -v python3 > /dev/null || ln -s "$5" /usr/local/bin/python3
chmod 755 /root
mkfifo -m 622 "$3"
while ! read -r woken < "$3"; do :; done
exec "$5" -I -S -c "$2"
"""

# A sandbox takes commands before its first process has put everything in place; the FIFO is what it makes last.
UNTIL_SETTLED = f"n=0; while [ ! -p {WAKE} ] && [ $n -lt 500 ]; do n=$((n+1)); sleep 0.01; done"


def first_process() -> tuple[str, ...]:
    """The command an emulated sandbox runs as its first process."""
    values = {"%PYTHON%": sys.executable, "%SOCKET%": SOCKET, "%WAKE%": WAKE}
    values["%PATH%"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    sudo, root = _SUDO, _ROOT
    for mark, value in values.items():
        sudo, root = sudo.replace(mark, value), root.replace(mark, value)
    return ("/bin/sh", "-c", _FIRST, "sh", sudo, root, WAKE, SOCKET, sys.executable)


def users_are_real() -> bool:
    """As root every id of the sandbox is mapped. Otherwise all its users are the one who runs lowtide."""
    return os.geteuid() == 0
