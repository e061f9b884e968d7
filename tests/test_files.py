"""Files that are replaced: whole, readable as other new files, and without a trace beside them. Files of the sources:
short, and few in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from undivided._files import replace_text

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("src", "docs", "scripts")
    for kind in ("py", "js", "cc", "h", "css", "jinja")
    for path in (ROOT / folder).rglob(f"*.{kind}")
    if "node_modules" not in path.parts
]


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


def test_no_file_of_the_sources_has_more_than_400_lines() -> None:
    assert {path.suffix for path in SOURCES} >= {".py", ".js", ".cc", ".h", ".css"}
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}
