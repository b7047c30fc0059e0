"""What the package managers of an image do while it is built: nothing but tell whether this machine has what is asked for.

An image is this machine's own /usr, which no package manager in a sandbox can change. So what is installed here counts as
installed, and what is not is an error, unless the user would rather build without it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from lowtide.emulators.dockerfile import Step
from lowtide.errors import ValidationError

CHECK, SKIP = "check", "skip"
TOOLS = "/opt/lowtide-build"
_MANAGERS = ("apt", "apt-get", "apk", "dnf", "yum")
_LISTS = (
    ("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n"),
    ("rpm", "-qa", "--qf", "installed %{NAME}\n"),
)
_LONGEST_ARGUMENT = 100_000  # the kernel takes 128 KiB in one
_MANAGER = r"""#!/bin/sh
tool=${0##*/} verb= missing= value=
for word; do
  if [ -n "$value" ]; then value=; continue; fi
  case $word in
    -o | -c | -t | -X | -p | --option | --config-file | --target-release | --virtual | --repository | --root) value=1 ;;
    -*) ;;
    *) if [ -z "$verb" ]; then verb=$word; continue; fi
      name=${word%%[=:<>~]*}
      grep -qxF -e "$name" "${0%/*}/packages" || command -v "$name" >/dev/null 2>&1 || missing="$missing $word" ;;
  esac
done
case $verb in install | add | reinstall | groupinstall | localinstall | build-dep) ;; *) missing= ;; esac
if [ -z "$missing" ]; then echo "$tool $*: not run here, an image is the /usr of this machine"; exit 0; fi
if [ MODE = skip ]; then echo "$tool $*: NOT INSTALLED, this machine does not have:$missing"; exit 0; fi
echo "$tool: an image is the /usr of this machine, and it does not have:$missing" >&2
echo "Install that on this machine, or build without it: lowtide emulate --packages skip" >&2
exit 100
"""
_ACCOUNTS = ("groupadd", "useradd", "addgroup", "adduser")
# An image here has the accounts that its service gives a sandbox, and recipes for other images make those.
_ACCOUNT = r"""#!/bin/sh
tool=${0##*/} file=passwd name=
for name; do :; done
case $tool in *group*) file=group ;; esac
if [ -n "$name" ] && cut -d: -f1 "/etc/$file" | grep -qxF -e "$name"; then echo "$tool: $name is there already"; exit 0; fi
for place in /usr/sbin /sbin /usr/bin /bin; do [ -x "$place/$tool" ] && exec "$place/$tool" "$@"; done
echo "$tool: this machine does not have it" >&2
exit 127
"""
_SUDO = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'
_PUT = r"""set -e; mkdir -p "$1"; cd "$1"; shift
printf %s "$1" > sudo; manager=$2 account=$3; shift 3
for name in MANAGERS; do printf %s "$manager" > $name; done
for name in ACCOUNTS; do printf %s "$account" > $name; done
printf '%s\n' "$@" > packages
chmod 755 *""".replace("MANAGERS", " ".join(_MANAGERS)).replace("ACCOUNTS", " ".join(_ACCOUNTS))


def checked(said: str) -> str:
    """ValidationError for what is no way to treat packages."""
    if said not in (CHECK, SKIP):
        raise ValidationError(f"packages is {CHECK} or {SKIP}, not {said!r}", argument="packages")
    return said


def first_step(mode: str) -> Step:
    """Puts them where every build finds them first. Asks this machine what it has, so it takes a moment."""
    manager = _MANAGER.replace("MODE", mode)
    argv = ("/bin/sh", "-c", _PUT, "sh", TOOLS, _SUDO, manager, _ACCOUNT, *_in_pieces(_installed()))
    return Step(shown="", argv=argv, apart=True)


def _installed() -> list[str]:
    found: set[str] = set()
    for command in _LISTS:
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = (line.partition(" ") for line in done.stdout.splitlines())
        found.update(name for state, _, name in lines if state == "installed")
    return sorted(found)


def _in_pieces(names: list[str]) -> Iterator[str]:
    piece = ""
    for name in names:
        if len(piece) + len(name) > _LONGEST_ARGUMENT:
            yield piece
            piece = ""
        piece += f"\n{name}" if piece else name
    yield piece
