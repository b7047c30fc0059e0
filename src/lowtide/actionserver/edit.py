"""Edits of a text: view, create, str_replace, insert and undo_edit, without I/O."""

from __future__ import annotations

from lowtide.actionserver.models import Edit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTEXT_LINES = 4
_PLACES = 20
_UNDO_STEPS = 10
_UNDO_CHARACTERS = 64 << 20
"""Of all files together; the newest edit can be undone whatever its size."""
_VIEW_CHARACTERS = 200_000


class EditError(ValueError):
    """The edit cannot be made; the message tells the agent what to do instead."""


class Edited:
    """What an edit came to: the text to write (None: nothing changes) and what to tell."""

    def __init__(self, message: str, text: str | None = None, *, remove: bool = False) -> None:
        self.message, self.text, self.remove = message, text, remove


class _Step:
    """What a file was before an edit, and the hash of what it was after."""

    def __init__(self, before: str | None, after: int) -> None:
        self.before, self.after = before, after


class Editor:
    """Keeps what is needed to undo, for each path; the caller reads and writes the files."""

    def __init__(self) -> None:
        self._history: dict[str, list[_Step]] = {}
        self._order: list[str] = []
        """The paths of all steps, oldest first."""
        self._held = 0

    def apply(self, edit: Edit, path: str, old: str | None) -> Edited:
        """`old` is the file's text, None when there is none. The undo step is kept by `done`."""
        command = _COMMANDS.get(edit.command)
        if command is None:
            known = ", ".join(sorted((*_COMMANDS, "undo_edit")))
            if edit.command != "undo_edit":
                raise EditError(f"unknown edit command {edit.command!r}; known are {known}")
            return self._undo(path, old)
        if old is None and edit.command != "create":
            raise EditError(f"there is no file {path}; create it first")
        return command(edit, path, old or "" if edit.command != "create" else old)

    def done(self, edit: Edit, path: str, old: str | None, edited: Edited) -> None:
        """The edit was written."""
        if edit.command == "undo_edit":
            self._forget(path, -1)
        elif edited.text is not None:
            steps = self._history.setdefault(path, [])
            steps.append(_Step(old, hash(edited.text)))
            self._order.append(path)
            self._held += len(old or "")
            if len(steps) > _UNDO_STEPS:
                self._forget(path, 0)
            while self._held > _UNDO_CHARACTERS and len(self._order) > 1:
                self._forget(self._order[0], 0)

    def _forget(self, path: str, which: int) -> None:
        steps = self._history[path]
        self._held -= len(steps.pop(which).before or "")
        if not steps:
            del self._history[path]
        places = [at for at, one in enumerate(self._order) if one == path]
        del self._order[places[which]]

    def _undo(self, path: str, now: str | None) -> Edited:
        steps = self._history.get(path)
        if not steps:
            raise EditError(f"there is no edit of {path} to undo")
        before = steps[-1].before
        if now is None or hash(now) != steps[-1].after:
            raise EditError(
                f"{path} was changed by something else since its last edit; undoing that edit would lose the change"
            )
        if before is None:
            return Edited(f"The creation of {path} was undone: it is removed.", remove=True)
        return Edited(f"The last edit of {path} was undone.\n{numbered(before)}", before)


def _view(edit: Edit, path: str, text: str | None) -> Edited:
    lines = (text or "").split("\n")
    first, last = _range(edit.view_range, len(lines))
    return Edited(numbered("\n".join(lines[first - 1 : last]), first))


def _create(edit: Edit, path: str, text: str | None) -> Edited:
    if edit.file_text is None:
        raise EditError("create needs file_text")
    if text is not None:
        raise EditError(f"{path} exists already; change it with str_replace or insert")
    return Edited(f"{path} was created.", edit.file_text)


def _str_replace(edit: Edit, path: str, text: str | None) -> Edited:
    assert text is not None
    old, new = edit.old_str, edit.new_str or ""
    if not old:
        raise EditError("str_replace needs old_str")
    if old == new:
        raise EditError("old_str and new_str are the same: nothing would change")
    count = text.count(old)
    if count == 0:
        raise EditError(f"old_str does not occur in {path}; it must match exactly, spaces and line ends too")
    if count > 1:
        where: list[str] = []
        at = text.find(old)
        while at >= 0 and len(where) < _PLACES:
            where.append(str(text.count("\n", 0, at) + 1))
            at = text.find(old, at + 1)
        more = " and others" if at >= 0 else ""
        raise EditError(
            f"old_str occurs {count} times in {path}, at lines {', '.join(where)}{more}; make it longer, so that it "
            "occurs once"
        )
    at = text.find(old)
    changed = text[:at] + new + text[at + len(old) :]
    line = text.count("\n", 0, at) + 1
    return Edited(f"{path} was changed:\n{_snippet(changed, line, line + new.count(chr(10)))}", changed)


def _insert(edit: Edit, path: str, text: str | None) -> Edited:
    assert text is not None
    if edit.insert_line is None or edit.new_str is None:
        raise EditError("insert needs insert_line and new_str")
    end = "\r\n" if text.count("\r\n") == text.count("\n") > 0 else "\n"  # as all its lines end
    lines = text.split(end)
    count = len(lines) - 1 if text.endswith("\n") or not text else len(lines)
    if not 0 <= edit.insert_line <= count:
        raise EditError(f"insert_line must be between 0 and {count}, the number of lines of {path}")
    new = edit.new_str[:-1] if edit.new_str.endswith("\n") else edit.new_str
    added = new.replace("\r\n", "\n").removesuffix("\r").split("\n") if end == "\r\n" else new.split("\n")
    at = edit.insert_line
    changed = end.join((*lines[:at], *added, *lines[at:]))
    return Edited(f"{path} was changed:\n{_snippet(changed, at + 1, at + len(added))}", changed)


_COMMANDS = {"view": _view, "create": _create, "str_replace": _str_replace, "insert": _insert}


def numbered(text: str, first: int = 1) -> str:
    """With line numbers, as people and models know them."""
    shown = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(text.split("\n"), first))
    if len(shown) > _VIEW_CHARACTERS:
        shown = shown[:_VIEW_CHARACTERS] + "\n[... cut here; ask for less with view_range ...]"
    return shown


def lines_of(text: str, start: int, end: int) -> str:
    """The lines from `start` to before `end`, counted from 0; -1 is the end."""
    if start <= 0 and end == -1:
        return text
    lines = _split(text)
    _in_order(start, end)
    return "".join(lines[max(0, start) : len(lines) if end == -1 else end])


def with_lines(text: str | None, content: str, start: int, end: int) -> str:
    """The text with those lines replaced."""
    if text is None or (start <= 0 and end == -1):
        return content
    _in_order(start, end)
    lines = _split(text)
    before, after = lines[: max(0, start)], [] if end == -1 else lines[end:]
    if content and not content.endswith("\n"):
        content += "\n"
    if content and before and not before[-1].endswith("\n"):
        before[-1] += "\n"
    return "".join((*before, content, *after))


def _split(text: str) -> list[str]:
    """Lines as everybody counts them: str.splitlines also ends one at a form feed or U+2028."""
    lines = text.split("\n")
    last = lines.pop()
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]


def _in_order(start: int, end: int) -> None:
    if end < -1 or (end != -1 and end < max(0, start)):
        raise EditError(f"lines {start} to {end} are none; end is -1 (the end of the file) or after start")


def _snippet(text: str, first: int, last: int) -> str:
    lines = text.split("\n")
    begin = max(1, first - _CONTEXT_LINES)
    return numbered("\n".join(lines[begin - 1 : last + _CONTEXT_LINES]), begin)


def _range(view_range: Sequence[int] | None, count: int) -> tuple[int, int]:
    if view_range is None:
        return 1, count
    if not (
        isinstance(view_range, (list, tuple))
        and len(view_range) == 2
        and all(type(n) is int for n in view_range)
    ):
        raise EditError("view_range is two line numbers, e.g. [1, 40]")
    first, last = view_range
    if last == -1:
        last = count
    if not 1 <= first <= count or last < first:
        raise EditError(f"view_range {list(view_range)} is not within 1 and {count}")
    return first, min(last, count)
