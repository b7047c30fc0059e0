"""A command as another user, also where all of a provider's commands have the same one: through sudo or su inside."""

from __future__ import annotations

# Nothing of the environment is put into arguments: it may hold keys, and everyone in the sandbox can read those.
_BECOME = """who=$1; shift
[ "$(id -un 2>/dev/null)" = "$who" ] || [ "$(id -u)" = "$who" ] && exec "$@"
name=$who
case $who in *[!0-9]*) ;; *) name=$(getent passwd "$who" | cut -d: -f1) ;; esac
if [ "$(id -u)" = 0 ]; then
  [ -n "$name" ] && id "$name" >/dev/null 2>&1 || { echo "$who: there is no such user in this sandbox" >&2; exit 126; }
  exec su -s /bin/sh -c 'exec "$0" "$@"' "$name" -- "$@"
fi
command -v sudo >/dev/null 2>&1 && exec sudo -n -E -H -u "${name:-#$who}" -- "$@"
echo "commands of this sandbox run as $(id -un 2>/dev/null || id -u), and only sudo could make that $who: take an image \
with sudo, or one whose user is root" >&2
exit 126"""


def become(user: str, argv: list[str]) -> list[str]:
    """`argv` as `user`, a name or a number. Exit code 126 and a line on standard error where that cannot be."""
    return ["sh", "-c", _BECOME, "sh", user, *argv]
