"""The documentation: generated pages and pictures are current, and every page is in the navigation of the site.

`scripts/docs` builds the site and checks every link.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PICTURES = sorted(DOCS.glob("pictures/*.svg"))
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the archive of the sources has no reports")
def test_generated_pages_and_pictures_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/site", "--check"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert not [name for page in PAGES[1:] if (name := page.relative_to(DOCS).as_posix()) not in listed]


def test_links_out_of_docs_are_to_files() -> None:
    """The site copies linked files; a link to a folder fails its strict build."""
    links = [(page, link) for page in PAGES[1:] for link in re.findall(r"\]\((\.\.[^)#\s]+)", page.read_text("utf-8"))]
    assert len(links) > 100
    assert not [(page.name, link) for page, link in links if not (page.parent / link).is_file()]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "DESIGN.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_tables_and_numbered_lists_are_read_as_they_look(page: Path) -> None:
    """A | of a cell is escaped, in code too, and each rule of a numbered list begins a line: Markdown numbers lines."""
    cells, wrong, width = r"(?<!\\)\|", [], 0
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for line in text.splitlines():
        count = len(re.findall(cells, line)) if line.startswith("|") else 0
        width = width or count
        wrong += [line] if count and count != width else []
        width = width if count else 0
        wrong += [line] if re.match(r"\d+\. .*\. \d+\. ", line) else []
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_is_readable_in_both_themes(picture: Path) -> None:
    """It is valid XML, every colour is one of the theme, and it loads nothing."""
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "prefers-color-scheme:dark" in text
    shapes = re.sub(r'<style id="theme">.*?</style>', "", text)
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", shapes)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", shapes)


def test_every_picture_is_shown() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert PICTURES
    assert not [picture.name for picture in PICTURES if f"pictures/{picture.name}" not in text]
