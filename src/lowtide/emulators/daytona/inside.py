"""What runs inside the sandbox for one question about many files: find, search, replace.

It is handed to ``python -I -S -c`` as text; the question comes as JSON on standard input, the answer goes
as JSON to standard output.
"""

import errno
import fnmatch
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

MOST = 10_000
LARGEST = 64 << 20


def resolved(path: str, home: str) -> str:
    return os.path.normpath(os.path.join(home, os.path.expanduser(path)))


def files_under(root: str) -> Iterator[str]:
    if not os.path.isdir(root):
        os.stat(root)
        yield root
        return
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted(files):
            yield os.path.join(folder, name)


def text_of(path: str) -> str | None:
    """None for what is not a plain text file."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > LARGEST:
            return None
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    return None if b"\0" in data[:8192] else data.decode("utf-8", "replace")


def find(asked: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in files_under(resolved(asked["path"], asked["home"])):
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            if asked["pattern"] in line:
                found.append({"file": path, "line": number, "content": line})
                if len(found) >= MOST:
                    return found
    return found


def search(asked: dict[str, Any]) -> list[str]:
    root, found = resolved(asked["path"], asked["home"]), []
    os.stat(root)
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            if fnmatch.fnmatchcase(name, asked["pattern"]):
                found.append(os.path.join(folder, name))
    return found[:MOST]


def replace(asked: dict[str, Any]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for given in asked["files"]:
        path = resolved(str(given), asked["home"])
        try:
            with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
                text = file.read()
            changed = text.replace(asked["pattern"], asked["new"])
            if changed != text:
                with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                    file.write(changed)
            results.append({"file": str(given), "success": True})
        except OSError as error:
            results.append({"file": str(given), "success": False, "error": str(error)})
    return results


def main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    operations = {"find": find, "search": search, "replace": replace}
    answer: dict[str, Any]
    try:
        answer = {"result": operations[asked["op"]](asked)}
    except OSError as error:
        message = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
        answer = {"error": errno.errorcode.get(error.errno or 0, "EIO"), "message": message}
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogateescape"))


if __name__ == "__main__":
    main()
