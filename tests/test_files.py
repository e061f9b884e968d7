"""Files that are replaced: whole, readable as other new files, and without a trace beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from undivided._files import replace_text


def test_a_replaced_file_has_the_permissions_of_a_new_one_and_no_neighbours(tmp_path: Path) -> None:
    path, neighbour, plain = tmp_path / "ranks.json", tmp_path / "ranks.new", tmp_path / "plain"
    neighbour.write_text("of someone else")
    plain.write_text("")
    for text in ("first", "second"):
        replace_text(path, text)
        assert path.read_text() == text
    assert path.stat().st_mode == plain.stat().st_mode
    assert neighbour.read_text() == "of someone else"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plain", "ranks.json", "ranks.new"]


def test_a_text_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "\udc80")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("ranks.json", "old")]
