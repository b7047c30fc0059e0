"""Lines, edits and undos where files are not as one expects: other ends of lines, none at the end, changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.actionserver import edit as edit_module
from lowtide.actionserver import files
from lowtide.actionserver.edit import EditError, Editor, lines_of, with_lines
from lowtide.actionserver.models import Edit


def insert(text: str, line: int, new: str) -> str:
    made = Editor().apply(Edit(command="insert", path="f", insert_line=line, new_str=new), "f", text)
    assert made.text is not None
    return made.text


class Held:
    """One file and its editor, as the server uses them."""

    def __init__(self, text: str | None = None) -> None:
        self.editor, self.text = Editor(), text

    def __call__(self, command: str, path: str = "f", **arguments: Any) -> None:
        edit = Edit(command=command, path=path, **arguments)
        made = self.editor.apply(edit, path, self.text)
        self.editor.done(edit, path, self.text, made)
        self.text = None if made.remove else made.text


def test_only_a_line_feed_ends_a_line() -> None:
    text = "a\x0cb\x85\nc\u2028d\r\ne"
    assert lines_of(text, 1, 2) == "c\u2028d\r\n"
    assert with_lines(text, "new", 1, 2) == "a\x0cb\x85\nnew\ne"


def test_lines_after_a_last_one_without_an_end_stand_on_their_own() -> None:
    assert with_lines("a", "b", 1, -1) == "a\nb\n"
    assert with_lines("a\n", "b", 5, -1) == "a\nb\n"
    assert with_lines("a\nb", "", 1, 2) == "a\n"


@pytest.mark.parametrize(("start", "end"), [(4, 2), (0, -2), (1, 0)])
def test_lines_that_are_none_are_refused(start: int, end: int) -> None:
    with pytest.raises(EditError):
        with_lines("0\n1\n2\n3\n4\n5\n", "x", start, end)
    with pytest.raises(EditError):
        lines_of("0\n1\n2\n3\n4\n5\n", start, end)


@pytest.mark.parametrize(
    ("text", "line", "new", "made"),
    [
        ("a\r\nb\r\n", 1, "x", "a\r\nx\r\nb\r\n"),
        ("a\r\nb\r\n", 2, "x\r\ny\r\n", "a\r\nb\r\nx\r\ny\r\n"),
        ("a\r\nb", 2, "x", "a\r\nb\r\nx"),
        ("a\r\nb\n", 1, "x", "a\r\nx\nb\n"),
        ("", 0, "x", "x\n"),
    ],
)
def test_an_inserted_line_ends_as_all_others_do(text: str, line: int, new: str, made: str) -> None:
    assert insert(text, line, new) == made


def test_an_undo_does_not_lose_what_somebody_else_wrote() -> None:
    held = Held()
    held("create", file_text="one\n")
    held("str_replace", old_str="one", new_str="two")
    held.text = "by hand\n"
    with pytest.raises(EditError, match="something else"):
        held("undo_edit")
    held.text = "two\n"
    held("undo_edit")
    assert held.text == "one\n"
    held("undo_edit")
    assert held.text is None


def test_what_is_kept_to_undo_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_module, "_UNDO_CHARACTERS", 1000)
    held = Held("x" * 400 + "END")
    for number in range(20):
        held.text = "x" * 400 + "END"
        held("str_replace", path=f"f{number}", old_str="END", new_str="FIN")
    assert held.editor._held <= 1000
    assert sorted(held.editor._history) == ["f18", "f19"]
    held("undo_edit", path="f19")
    assert held.text == "x" * 400 + "END"
    with pytest.raises(EditError, match="no edit"):
        held("undo_edit", path="f0")


def test_many_places_are_counted_and_the_first_are_named() -> None:
    with pytest.raises(EditError) as caught:
        Held("a\n" * 200_000)("str_replace", old_str="a", new_str="b")
    assert "200000 times" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_archive_that_unpacks_to_too_much_is_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    place = tmp_path_factory.mktemp("bomb")
    with zipfile.ZipFile(place / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", b"\0" * (4 << 20))
    monkeypatch.setattr(files, "MAX_UPLOAD_BYTES", 1 << 20)
    with pytest.raises(files.TooLarge):
        files.extract_zip(str(place / "a.zip"), str(place / "out"))


def test_a_picture_is_read_whole_or_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path_factory.mktemp("picture") / "a.png"
    path.write_bytes(b"x" * 101)
    monkeypatch.setattr(files, "MAX_TEXT_BYTES", 100)
    with pytest.raises(files.BinaryFile, match="larger"):
        files.read_bytes(str(path))
